"""Modules that know they are units: for the length of a step, by a subclass set on the instance.

A unit's ``__call__`` is intercepted, so the module's hooks, transformers' gradient-checkpointing
layers and the like run inside it, on plain tensors.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from smpar.errors import NotInGlue
from smpar.stage.layout import Layout
from smpar.stage.tensor import active


class _Unit:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = active()
        call = super().__call__  # type: ignore[misc]
        if run is None:
            return call(*args, **kwargs)
        return run.call_unit(self, call, args, kwargs)  # type: ignore[arg-type]


class _Split:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._backward_hooks or self._backward_pre_hooks:  # type: ignore[attr-defined]
                raise NotInGlue(
                    f"a full backward hook on {type(self).__name__}, whose parts are on several stages",
                    "set it on the parts, or put the module on one stage (smpar.set_partition)",
                )
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            if not hasattr(error, "_smpar_module"):
                with contextlib.suppress(AttributeError):
                    error._smpar_module = self  # type: ignore[attr-defined]
            raise


class _Kept:
    """An attribute in which a unit leaves a tensor: in glue, the running microbatch's own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module, owner: type) -> Any:
        run = active()
        if run is not None:
            kept = run.attributes.get((module, self.name))
            if kept is not None:
                return kept
        try:
            return module.__dict__[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}") from None

    def __set__(self, module: nn.Module, value: Any) -> None:
        run = active()
        if run is not None:
            run.attributes.pop((module, self.name), None)
        module.__dict__[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__[self.name]


_classes: dict[tuple[type, type, frozenset[str]], type] = {}


def _subclass(mixin: type, cls: type, kept: frozenset[str] = frozenset()) -> type:
    found = _classes.get((mixin, cls, kept))
    if found is None:
        body: dict[str, Any] = {name: _Kept(name) for name in kept}
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_smpar_plain_class": cls}
        found = _classes[mixin, cls, kept] = type(cls.__name__, (mixin, cls), body)
    return found


def keep_attribute(layout: Layout, module: nn.Module, name: str) -> None:
    """From now on glue reads ``module.name`` from its microbatch."""
    names = layout.attributes.setdefault(module, set())
    if name not in names:
        names.add(name)
        plain = getattr(type(module), "_smpar_plain_class", type(module))
        module.__class__ = _subclass(_Unit, plain, frozenset(names))


def can_be_marked(module: nn.Module) -> bool:
    """Whether the module's class allows the subclass (scripted modules do not)."""
    try:
        cls = type(module)
        module.__class__ = _subclass(_Split, cls)
        module.__class__ = cls
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def marked(layout: Layout, inside: bool = False) -> Iterator[None]:
    """Mark the units and split modules of a layout for the duration of a step.

    Args:
        inside: mark the modules inside units too, so that a trace sees glue call one of them directly, past its unit
            (``for layer in self.layers`` over an ``nn.Sequential``); such a module then counts as a unit.
    """
    units = {*layout.units, *layout.attributes}
    if inside:
        units |= {m for unit in layout.units for m in unit.modules() if can_be_marked(m)}
    before = [(m, type(m)) for m in (*units, *layout.split)]
    hooks = [(m, m._forward_pre_hooks, m._forward_hooks) for m in layout.glue_hooks]
    layout.hooks = {m: (pre, post) for m, pre, post in hooks}
    for m in layout.glue_hooks:
        m._forward_pre_hooks, m._forward_hooks = OrderedDict(), OrderedDict()
    try:
        for unit in units:
            unit.__class__ = _subclass(_Unit, type(unit), frozenset(layout.attributes.get(unit, ())))
        for module in layout.split:
            module.__class__ = _subclass(_Split, type(module))
        yield
    finally:
        for module, cls in before:
            module.__class__ = cls
        for module, pre, post in hooks:
            module._forward_pre_hooks, module._forward_hooks = pre, post


def blamed(error: BaseException) -> nn.Module | None:
    """The innermost split module whose glue raised ``error``, or the error that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        module: nn.Module | None = getattr(cause, "_smpar_module", None)
        if module is not None:
            return module
        cause = cause.__cause__
    return None
