"""Stage tensors: real data on one stage, shape, dtype and device everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smpar.errors import BypassedGlue, OutsideStep, WriteIntoReplicated
from smpar.trace.outcome import Meta, NoSubclass

if TYPE_CHECKING:
    from smpar.stage.run import Run

_active: list[Run | None] = [None]


def active() -> Run | None:
    """The microbatch whose glue is running in this process, if any (units run with none)."""
    return _active[0]


def activate(run: Run | None) -> Run | None:
    """Set the running microbatch; returns the one before."""
    before = _active[0]
    _active[0] = run
    return before


class Viewed:
    """What all views of one tensor have in common, for autograd.

    Attributes:
        base: the tensor; None: no stage tensor stands for it.
    """

    __slots__ = ("base",)

    def __init__(self, base: StageTensor | None) -> None:
        self.base = None if base is None else weakref.ref(base)


class StageTensor(torch.Tensor):
    """A tensor with a home stage.

    The wrapper itself has no storage; its metadata are the same on every rank. ``value`` is the
    real tensor on the home's rank and None elsewhere. ``ident`` numbers the tensors of a microbatch
    in program order and is the same on every rank; a write in place gives the wrapper a new one.
    ``owner`` is the number of the microbatch's run: no other may use the tensor.
    ``aliases`` are all that share its memory, in which they begin at their ``offset``, in elements. ``viewed`` is what
    it is a view of, or is itself. ``muted``: a view that gradients pass by, made under ``no_grad``; ``spoilt``: and
    its memory has got a gradient since.
    """

    home: int
    ident: int
    segment: int
    owner: int
    value: torch.Tensor | None
    parameter: torch.nn.Parameter | None
    aliases: list[weakref.ref[StageTensor]] | None
    offset: int
    viewed: Viewed | None
    muted: bool
    spoilt: bool

    @staticmethod
    def __new__(cls, meta: Meta, home: int, ident: int, segment: int, owner: int) -> StageTensor:
        self: StageTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            meta.stride or None,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        self.home = home
        self.ident = ident
        self.segment = segment
        self.owner = owner
        self.value = None
        self.parameter = None
        self.aliases = None
        self.offset = 0
        self.viewed = None
        self.muted = False
        self.spoilt = False
        return self

    def __init__(self, meta: Meta, home: int, ident: int, segment: int, owner: int) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = active()
        if run is None:
            return _without_run(func, args, kwargs or {})
        return run.operation(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if torch.ops.aten.detach.default is func:  # how torch makes Parameters and new_* of subclasses
            return args[0]
        error = BypassedGlue(str(func))
        run = active()
        if run is not None:
            run.bypassed = error  # what is called from C++ may turn it into an error of its own
        raise error


METADATA: set[Any] = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu",
                 "is_sparse", "is_quantized", "is_meta", "is_mps", "is_xpu", "itemsize", "nbytes", "names",
                 "is_nested", "is_mkldnn", "grad_fn", "_version", "output_nr", "is_sparse_csr")
    if hasattr(torch.Tensor, name)
} | {
    getattr(owner, name)
    for owner, names in (
        (torch.Tensor, ("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
                        "is_contiguous", "ndimension", "get_device", "is_signed", "storage_offset", "__len__",
                        "__hash__", "is_inference", "is_same_size", "is_conj", "is_neg", "is_shared", "is_pinned")),
        (torch, ("is_floating_point", "is_complex", "numel", "is_inference", "is_conj", "is_neg", "get_device",
                 "is_same_size")),
    )
    for name in names
    if hasattr(owner, name)
}  # fmt: skip


def metadata(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Answer a query of shape, dtype and the like from the wrapper."""
    with NoSubclass():
        return func(*args, **kwargs)


def _without_run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if func in METADATA:
        return metadata(func, args, kwargs)
    if func is torch.Tensor.__repr__:
        return f"StageTensor(shape={tuple(args[0].shape)}, dtype={args[0].dtype}, home={args[0].home})"
    raise OutsideStep(getattr(func, "__name__", str(func)))


def link(made: StageTensor, other: StageTensor, offset: int, viewed: bool, beside: bool) -> None:
    """Note that a new stage tensor has the memory of another.

    Args:
        offset: from where the other begins to where the new one does.
        viewed: whether they are views of one tensor, perhaps the other itself.
        beside: whether both come from the same call; then nobody knows that tensor.
    """
    group = other.aliases
    if group is None:
        group = other.aliases = [weakref.ref(other)]
    if made.aliases is not group:
        group.append(weakref.ref(made))
        made.aliases, made.offset = group, other.offset + offset
    if viewed:
        if other.viewed is None:
            other.viewed = Viewed(None if beside else other)
        made.viewed = other.viewed
        made.muted = other.muted or not torch.is_grad_enabled()


def shared(tensor: StageTensor) -> bool:
    """Whether another living stage tensor shares this one's memory."""
    return tensor.aliases is not None and any(r() is not None and r() is not tensor for r in tensor.aliases)


def relink(tensors: list[StageTensor]) -> None:
    """Note that these stage tensors, and no others, share memory."""
    group = [weakref.ref(t) for t in tensors]
    fresh = {t.viewed: Viewed(None) for t in tensors if t.viewed is not None}  # they view a new buffer now
    for tensor in tensors:
        tensor.aliases = group
        if tensor.viewed is not None:
            tensor.viewed = fresh[tensor.viewed]


def rebind(tensor: StageTensor, meta: Meta, stage: int, ident: int, segment: int, value: Any) -> None:
    """A write in place: the same Python object now stands for a new tensor of the program."""
    with NoSubclass():
        if tensor.shape != meta.shape or tensor.stride() != meta.stride:  # unsqueeze_, t_ and the like
            tensor.data = StageTensor(meta, stage, ident, segment, tensor.owner)
        tensor.requires_grad_(meta.requires_grad)
    if tensor.home != stage or tensor.segment != segment:
        tensor.aliases = None
    tensor.home, tensor.ident, tensor.segment, tensor.value = stage, ident, segment, value


def become(tensor: torch.Tensor, other: StageTensor) -> None:
    """Turn a replicated tensor that glue made into a stage tensor: the same Python object, with another content.

    Raises:
        WriteIntoReplicated: others have its memory, and would not see what is written.
    """
    with NoSubclass():
        memory = tensor.untyped_storage()
        if torch._C._storage_Use_Count(memory._cdata) > 2:  # its own, and `memory`
            raise WriteIntoReplicated("a plain tensor of which views or aliases exist")
        try:
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError as error:  # a view of it exists, which would not see what is written
            raise WriteIntoReplicated("a plain tensor of which views or aliases exist") from error
