"""Outcomes remembered by signature: equal units with equal inputs are run under fake tensors once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from smpar.trace import tree
from smpar.trace.fake import FakeRunner
from smpar.trace.outcome import Cost, NoSubclass, Outcome, meta_of

_POSITION_NAMES = {"layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx", "block_index",
                   "block_id", "layer_i", "depth_idx"}  # fmt: skip
_STANDARD = set(nn.Module().__dict__) - {"training"}
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def autocast_state() -> tuple[Any, ...]:
    """The autocast settings that decide an operation's dtypes."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


class Outcomes:
    """Cache of what units and glue operations do, keyed by their signature.

    Two units count as equal if their classes, parameter shapes, modes and attributes are equal (but for
    attributes that just number the layers); functions by their code, other objects by identity. Every home
    checks the real result of a unit against the outcome, so a pair that differs after all ends in an error,
    not in a wrong result.
    """

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self._units: dict[Any, Outcome] = {}
        self._operations: dict[Any, Outcome] = {}
        self._unit_keys: dict[nn.Module, tuple[Any, Any]] = {}
        self.leaky: set[nn.Module] = set()  # units whose hooks hand tensors to the outside
        self.on_run: Callable[[], None] | None = None
        self.on_call: Callable[[nn.Module, Any, list[torch.Tensor], tree.Spec], None] | None = None

    def forget_keys(self) -> None:
        """Modes and flags of modules may have changed: work their keys out anew."""
        self._unit_keys.clear()

    def of_unit(self, unit: nn.Module, leaves: list[torch.Tensor], spec: tree.Spec) -> Outcome:
        """The outcome of ``unit`` called with the nested arguments (args, kwargs) = unflatten(spec, leaves)."""
        key: tuple[Any, ...] = (self.unit_key(unit), spec, states(spec), _signature(leaves))
        found = self._units.get(key)
        if found is not None and found.borrowed:  # an equal unit may borrow from another module
            key = (*key, unit)
            found = self._units.get(key)
        if found is None:
            args, kwargs = tree.unflatten(spec, leaves)
            found = self._units[key] = self._run(unit, args, kwargs, unit)
        if found.leaks:
            self.leaky.add(unit)
        if self.on_call is not None:
            self.on_call(unit, key, leaves, spec)
        return found

    def cost(self, key: Any) -> Cost:
        """The cost of the call that ``on_call`` told by this key."""
        return self._units[key].cost

    def set_cost(self, key: Any, cost: Cost) -> None:
        """Replace a counted cost by a measured one."""
        self._units[key] = dataclasses.replace(self._units[key], cost=cost)

    def of_operation(self, func: Callable[..., Any], leaves: list[torch.Tensor], spec: tree.Spec) -> Outcome:
        """The outcome of a function of torch; arguments as for ``of_unit``."""
        key = (func, spec, _signature(leaves))
        found = self._operations.get(key)
        if found is None:
            args, kwargs = tree.unflatten(spec, leaves)
            found = self._run(func, args, kwargs, None)
            if not any(c.opaque for c in tree.constants(spec)):
                self._operations[key] = found
        return found

    def _run(self, fn: Callable[..., Any], args: Any, kwargs: Any, unit: nn.Module | None) -> Outcome:
        if self.on_run is not None:
            self.on_run()
        return self.runner.evaluate(fn, args, kwargs, unit)

    def unit_key(self, unit: nn.Module) -> Any:
        now = flags(unit.modules())  # these may change within a step, too
        known = self._unit_keys.get(unit)
        if known is None or known[0] != now:
            known = self._unit_keys[unit] = now, tuple(module_key(m) for m in unit.modules())
        return known[1]


def module_key(module: nn.Module) -> Any:
    """What decides a module's own part in an outcome, its children aside; hashable."""
    attributes = module.__dict__
    own = tuple(
        (name, _attribute_key(value))
        for name, value in attributes.items()
        if name not in _STANDARD and not (name in _POSITION_NAMES and isinstance(value, int))
    )
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for group in ("_parameters", "_buffers")
        for name, t in attributes[group].items()
        if t is not None
    )
    # hooks are code of one module's own, and scripted modules are all of one class
    alone = isinstance(module, torch.jit.ScriptModule) or any(attributes.get(name) for name in _HOOKS)
    return _base_class(type(module)), own, tensors, id(module) if alone else None


def _attribute_key(value: Any, depth: int = 3) -> Any:
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if depth and isinstance(value, (tuple, list)):
        return type(value), tuple(_attribute_key(v, depth - 1) for v in value)
    if depth and isinstance(value, dict):
        return tuple((_attribute_key(k, 0), _attribute_key(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_attribute_key(v, 0) for v in value)
    if depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_attribute_key(getattr(value, f.name), depth - 1) for f in dataclasses.fields(value))
    if callable(value) and not isinstance(value, nn.Module):
        return tree.Const(value).key
    return id(value)


def states(spec: tree.Spec) -> tuple[Any, ...]:
    """What objects that are no containers, among a call's arguments, hold; one level deep."""
    return tuple(_state_key(c.value, 2) for c in tree.constants(spec) if c.opaque)


def _state_key(value: Any, depth: int) -> Any:
    if isinstance(value, nn.Module):
        return id(value)
    if isinstance(value, (*_SIMPLE, torch.Tensor)):
        return _attribute_key(value)
    if depth and isinstance(value, (list, tuple)):
        return type(value), tuple(_state_key(v, depth - 1) for v in value)
    if depth and isinstance(value, dict):
        return tuple((_state_key(k, 0), _state_key(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_state_key(v, 0) for v in value)
    if depth and hasattr(value, "__dict__") and not callable(value):
        return type(value), _state_key(vars(value), depth)
    return type(value)


def flags(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """All truth values and strings among the modules' attributes: what a training loop switches between steps.

    Numbers are left out: many modules count their calls.
    """
    return tuple(v for m in modules for v in m.__dict__.values() if v.__class__ is bool or v.__class__ is str)


def _base_class(cls: type) -> type:
    return getattr(cls, "_smpar_plain_class", cls)


def _signature(leaves: list[torch.Tensor]) -> Any:
    seen: dict[int, int] = {}
    with NoSubclass():
        metas = tuple((meta_of(t), seen.setdefault(id(t), i)) for i, t in enumerate(leaves))
    return metas, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()
