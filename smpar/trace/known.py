"""Values that a module works out from shapes and literals alone; they are the same for all data.

    torch.div(x.size(1), 2, rounding_mode="floor")     torch.tensor(x.size(-2)).clamp(max=16)
    torch.arange(n)[mask_of_positions]                 torch.linspace(0, p, layers).tolist()

A trial under fake tensors would have to guess what ``item()`` gives of these. So small tensors that come from no
tensor but such ones are computed beside their fake twins. Arguments, parameters, buffers and attributes of modules
are not known: an outcome is remembered by their shapes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

LIMIT = 65536  # elements; what decides shapes and branches is small
_LITERAL = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}


class KnownValues:
    """Real twins of the fake tensors whose values are known."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def of(self, fake: Any) -> torch.Tensor | None:
        """The value of a fake tensor, if it is known."""
        found = self._real.get(id(fake))
        return found[1] if found is not None and found[0]() is fake else None

    def apply(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives on known values; None if it has other operands. Comes before the fake operator."""
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            return self._forget(func, args, kwargs)
        literal = func in _LITERAL
        if any((not literal or isinstance(t, FakeTensor)) and self.of(t) is None for t in operands):
            return self._forget(func, args, kwargs)
        if not operands and not _small(func, args):
            return None

        def real(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, torch.Tensor):
                return value
            return value.clone() if literal else self.of(value)

        try:
            with no_dispatch(), torch.no_grad():
                a, k = tree_map(real, (args, kwargs))
                return func(*a, **k)
        except Exception:  # the fake operator raises the same, or has its own answer
            return self._forget(func, args, kwargs)

    def note(self, fakes: Any, reals: Any) -> None:
        """Remember what `apply` gave, once the fake results are there."""
        if reals is None:
            return
        for fake, real in zip(tree_leaves(fakes), tree_leaves(reals), strict=False):
            if not isinstance(fake, FakeTensor) or not isinstance(real, torch.Tensor):
                continue
            if fake.shape == real.shape and real.numel() <= LIMIT:
                self._real[id(fake)] = weakref.ref(fake), real

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator with unknown operands: what it writes into is not known any more, nor what shares its memory."""
        if not func._schema.is_mutable:
            return
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._drop(given.get(argument.name))

    def _drop(self, written: Any) -> None:
        for fake in tree_leaves(written):
            real = self.of(fake)
            if real is not None:
                memory = real.untyped_storage().data_ptr()
                self._real = {k: v for k, v in self._real.items() if v[1].untyped_storage().data_ptr() != memory}


def _small(func: Any, args: Any) -> bool:
    """Whether a factory called with these literals makes a small tensor."""
    size = 1
    for value in tree_leaves(args):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            size *= max(1, abs(int(value))) if abs(value) < 1e9 else LIMIT + 1
    return size <= LIMIT * 16
