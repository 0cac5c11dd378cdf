"""Calls in glue that are no plain operation: reading values, hooks, iteration, custom functions, checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as checkpoint_module

from smpar.errors import NotInGlue
from smpar.stage.tensor import StageTensor, active, metadata
from smpar.stage.views import kin

if TYPE_CHECKING:
    from smpar.stage.run import Run

T = torch.Tensor
_asks_for_gradient = T.requires_grad.__get__  # type: ignore[attr-defined]
plain_checkpoint = checkpoint_module.checkpoint
_plain_apply = torch.autograd.Function.__dict__["apply"]
_plain_generator = checkpoint_module._checkpoint_without_reentrant_generator

READS: set[Any] = {
    T.item, T.__bool__, T.__int__, T.__float__, T.__index__, T.__complex__, T.tolist, T.__repr__, T.__format__,
    T.numpy, T.__array__, T.is_nonzero, torch.is_nonzero, torch.equal, T.equal, torch.allclose, T.allclose,
    T.__contains__,
}  # fmt: skip

# What makes a tensor that glue may fill with stage tensors' data.
FACTORIES: set[Any] = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.tensor, torch.eye,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.empty_strided, torch.clone, T.clone,
    T.new_empty, T.new_zeros, T.new_ones, T.new_full, T.new_tensor,
}  # fmt: skip


def _read(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    return run.read(func, args, kwargs)


def _backward(run: Run, func: Any, args: Any, kwargs: Any) -> None:
    run.backward(args[0], kwargs.get("gradient", args[1] if len(args) > 1 else None))


def _iterate(run: Run, func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    return iter(torch.unbind(args[0], 0))


def _reverse(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    return torch.flip(args[0], tuple(range(args[0].dim())))


class _NoHandle:
    """What ``register_hook`` gives on ranks that do not hold the tensor."""

    def remove(self) -> None:
        """There is nothing to remove."""


def _register_hook(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, hook = args[0], kwargs.get("hook", args[1] if len(args) > 1 else None)
    if tensor.parameter is not None if type(tensor) is StageTensor else True:
        real = tensor.parameter if type(tensor) is StageTensor else tensor
        with run.plain():
            return func(real, hook)
    if tensor.value is None:
        return _NoHandle()
    with run.plain():
        return tensor.value.register_hook(hook)


def _requires_grad(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    if type(tensor) is not StageTensor or tensor.parameter is not None:
        with run.plain():
            return func(tensor.parameter if type(tensor) is StageTensor else tensor, wanted)
    if wanted and not metadata(_asks_for_gradient, (tensor,), {}) and _is_base(tensor):
        for view in kin(tensor):  # to torch they ask for a gradient, too, but hand it on to nobody
            view.muted = view.spoilt = True
    metadata(T.requires_grad_, (tensor, wanted), {})
    if tensor.value is not None:
        tensor.value.requires_grad_(wanted)
    return tensor


def _is_base(tensor: StageTensor) -> bool:
    return tensor.viewed is not None and tensor.viewed.base is not None and tensor.viewed.base() is tensor


def _grad_of(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if type(tensor) is StageTensor and tensor.parameter is None:
        return None
    with run.plain():
        return func(tensor.parameter if type(tensor) is StageTensor else tensor)


def _refuse(name: str, instead: str) -> Callable[..., Any]:
    def handler(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotInGlue(name, instead)

    return handler


def _copy(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    return torch.clone(args[0])


HANDLERS: dict[Any, Callable[..., Any]] = {
    **{func: _read for func in READS},
    T.backward: _backward,
    T.__iter__: _iterate,
    T.__reversed__: _reverse,
    T.register_hook: _register_hook,
    T.requires_grad_: _requires_grad,
    vars(torch._C.TensorBase)["grad"].__get__: _grad_of,
    T.retain_grad: _refuse("retain_grad", "use tensor.register_hook(f): f gets the gradient on the tensor's stage"),
    T.__deepcopy__: _copy,
    T.__reduce_ex__: _refuse("pickling", "return the tensor from the step and save it outside"),
    torch.autograd.backward: _refuse("torch.autograd.backward", "use model.backward(loss)"),
    torch.autograd.grad: _refuse("torch.autograd.grad", "put the computation that needs it into one nn.Module"),
}


def with_hooks(
    unit: torch.nn.Module, hooks: tuple[Any, Any], call: Callable[[Any, Any], Any], args: Any, kwargs: Any
) -> Any:
    """Call a unit with its forward hooks run in glue, on stage tensors."""
    before, after = hooks
    for key, hook in list(before.items()):
        if key in unit._forward_pre_hooks_with_kwargs:
            changed = hook(unit, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(unit, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = call(args, kwargs)
    for key, hook in list(after.items()):
        with_kwargs = key in unit._forward_hooks_with_kwargs
        changed = hook(unit, args, kwargs, result) if with_kwargs else hook(unit, args, result)
        if changed is not None:
            result = changed
    return result


def _holds_stage_tensor(value: Any) -> bool:
    if isinstance(value, StageTensor):
        return True
    return isinstance(value, (tuple, list)) and any(_holds_stage_tensor(v) for v in value)


class _Applied:
    """A custom autograd function as an operation of glue; equal to others of the same class."""

    def __init__(self, cls: type[torch.autograd.Function]) -> None:
        self.cls = cls
        self.__qualname__ = f"{cls.__qualname__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _plain_apply.__get__(None, self.cls)(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Applied) and other.cls is self.cls

    def __hash__(self) -> int:
        return hash(self.cls)


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    run = active()
    if run is None or not _holds_stage_tensor(args):
        return _plain_apply.__get__(None, cls)(*args, **kwargs)
    if cls is checkpoint_module.CheckpointFunction:
        function, preserve, *inputs = args
        with _checkpointed(run, preserve_rng_state=preserve):
            return function(*inputs)
    return run.operation(_Applied(cls), args, kwargs)


def _generator(fn: Callable[..., Any], preserve_rng_state: bool = True, *rest: Any, **kwargs: Any) -> Any:
    run = active()
    if run is None:
        return _plain_generator(fn, preserve_rng_state, *rest, **kwargs)
    return _marking(run, preserve_rng_state)


def _marking(run: Run, preserve_rng_state: bool) -> Iterator[None]:
    with _checkpointed(run, preserve_rng_state=preserve_rng_state):
        yield


@contextlib.contextmanager
def _checkpointed(run: Run, **options: Any) -> Iterator[None]:
    """``torch.utils.checkpoint`` in glue: the units called inside are checkpointed one by one."""
    before, run.checkpointing = run.checkpointing, options
    try:
        yield
    finally:
        run.checkpointing = before


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """While a step runs: custom autograd functions and checkpointing know of stage tensors."""
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    checkpoint_module._checkpoint_without_reentrant_generator = _generator
    try:
        yield
    finally:
        torch.autograd.Function.apply = _plain_apply  # type: ignore[method-assign]
        checkpoint_module._checkpoint_without_reentrant_generator = _plain_generator
