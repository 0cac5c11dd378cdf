"""Tensors that a unit hides in an object among its arguments which is no container.

    unit a   box.value = h          of a's stage only: no other stage has it
    unit b   x + box.value          would find what was there before

While a program is explored, something stands in their place that whoever else looks at it fails.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from smpar.errors import HiddenTensor
from smpar.trace import tree

_MISSING = object()


class Elsewhere:
    """In place of a tensor that a unit left in an object."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        raise HiddenTensor(self.where)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._fail()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, cls)]
        found += [v for a in args if isinstance(a, (list, tuple)) for v in a if isinstance(v, cls)]
        raise HiddenTensor(found[0].where if found else func)

    __bool__ = __len__ = __iter__ = __getitem__ = __neg__ = __float__ = __int__ = _fail
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = __radd__ = __rsub__ = __rmul__ = _fail


def objects(spec: tree.Spec) -> list[Any]:
    """The objects among a call's arguments that are no containers and may hold something."""
    found = [c.value for c in tree.constants(spec) if c.opaque and not isinstance(c.value, torch.nn.Module)]
    return [value for value in found if hasattr(value, "__dict__")]


class Hidden:
    """What units have left so far in one microbatch."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, str], tuple[Any, Any, Any]] = {}  # object and name -> object, unit, value before

    def note(self, unit: Any, name: str, spec: tree.Spec, hidden: tuple[tuple[int, str], ...]) -> None:
        """A unit has left tensors.

        Args:
            name: the unit's.
            hidden: for each the number of the object in ``objects(spec)``, and the attribute.
        """
        every = objects(spec)
        for index, attribute in hidden:
            held, key = every[index].__dict__, (id(every[index]), attribute)
            before = self._left[key][2] if key in self._left else held.get(attribute, _MISSING)
            self._left[key] = every[index], unit, before
            held[attribute] = Elsewhere(f"{type(every[index]).__name__}.{attribute}, which {name} sets")

    def show(self, unit: Any) -> None:
        """A unit is called again: it finds what was there before."""
        for (_, attribute), (owner, by, before) in self._left.items():
            if by is unit:
                _put(owner, attribute, before)

    def restore(self) -> None:
        """Put back what was there before all."""
        for (_, attribute), (owner, _, before) in self._left.items():
            _put(owner, attribute, before)
        self._left.clear()


def _put(owner: Any, attribute: str, value: Any) -> None:
    if value is _MISSING:
        owner.__dict__.pop(attribute, None)
    else:
        owner.__dict__[attribute] = value
