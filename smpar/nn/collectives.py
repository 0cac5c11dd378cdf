"""Collectives over a tensor-parallel group, with their gradients.

Each is linear, and its backward is its transpose, given how its input and output are held::

    function         forward           backward          input -> output, as the ranks hold them
    copy             -                 all-reduce        whole -> whole, for work on slices
    reduce           all-reduce        -                 addends -> their sum
    gather           all-gather        reduce-scatter    slices -> whole, for work on slices
    reduce_scatter   reduce-scatter    all-gather        addends -> a slice of their sum
    take             -                 all-gather        whole -> slice
    whole            all-gather        -                 slices -> whole, for work that all ranks do alike
    alike            -                 a share          whole, from work on slices -> whole, for work that all do alike
    all_to_all       all-to-all        all-to-all        slices of one dim -> slices of another

(Megatron-LM, arXiv 1909.08053, section 3; sequence parallelism, arXiv 2205.05198, section 4.2.) Under fake tensors
they give shapes and do not communicate, but tell who watches what they and their backwards would move. In a group
without processes a rank is alone: it takes its own slice for those of the others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from smpar.nn.group import TensorGroup
from smpar.trace.watch import tell

_CPU = torch.device("cpu")
_TAG = 7300  # of the messages between pairs
_SMALL = 1 << 20  # bytes to all others, up to which they are given whole, rather than reduced in slices and gathered

_counts: list[Counter[str]] = []


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the collectives that really run: their number by name, and under "bytes" those that this rank sends."""
    counter: Counter[str] = Counter()
    _counts.append(counter)
    try:
        yield counter
    finally:
        _counts.remove(counter)


def _count(name: str, sent: int) -> None:
    for counter in _counts:
        counter[name] += 1
        counter["bytes"] += sent


def _real(tensor: Tensor, group: TensorGroup) -> bool:
    return group.group is not None and not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _tell(tensor: Tensor, group: TensorGroup, share: float, late: bool = False) -> None:
    """Tell who watches of a collective as so many all-reduces of the tensor; ``late``: in the backward."""
    if group.size > 1 and isinstance(tensor, FakeTensor):
        tell(share * tensor.numel() * tensor.element_size(), late)


def will_gather(part: Tensor, group: TensorGroup) -> None:
    """Tell who watches that a backward gathers the slices."""
    _tell(part, group, 0.5 * group.size, late=True)


def _processes(group: TensorGroup) -> dist.ProcessGroup:
    # its own methods: the functions of torch.distributed around them take as long as a small transfer
    assert group.group is not None
    return group.group


def _direct(tensor: Tensor) -> bool:
    # gloo's collectives go through a thread of their own and copy more; its transfers between pairs do not. NCCL's
    # collectives are as fast as it gets.
    return tensor.device.type == "cpu"


class _Exchange:
    """Each rank gives each other one a tensor, and takes one from it: straight between pairs, all at once.

    Args:
        give, take: by rank, contiguous; those of this rank are not looked at.
    """

    def __init__(self, give: Sequence[Tensor], take: Sequence[Tensor], group: TensorGroup) -> None:
        gloo = cast(Any, _processes(group)._get_backend(_CPU))
        others = [(group.rank + step) % group.size for step in range(1, group.size)]  # not all the same one first
        self._works = [gloo.recv([take[rank]], rank, _TAG) for rank in others]
        self._works += [gloo.send([give[rank]], rank, _TAG) for rank in others]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _from_others(give: Sequence[Tensor], group: TensorGroup) -> list[Tensor]:
    """What each rank gives this one, and what it gives itself: that is not copied."""
    give = [part.detach() if rank == group.rank else part.contiguous() for rank, part in enumerate(give)]
    mine = give[group.rank]
    take = [mine if rank == group.rank else torch.empty(mine.shape, dtype=mine.dtype) for rank in range(group.size)]
    _Exchange(give, take, group).wait()
    return take


def _total(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Their sum, in the order of ranks: so it is equal on all, to the bit."""
    total = torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total += part
    return total


def all_reduced(tensor: Tensor, group: TensorGroup, own: bool = False) -> Tensor:
    """The sum over the group, without gradient.

    Args:
        own: the result may take the place of ``tensor``.
    """
    if not _real(tensor, group):
        _tell(tensor, group, 1.0)
        return tensor if own else tensor.clone()
    to_others = (group.size - 1) * tensor.nbytes
    small = _direct(tensor) and to_others <= _SMALL
    _count("all_reduce", to_others if small else 2 * to_others // group.size)
    if small:
        return _total(_from_others([tensor.contiguous()] * group.size, group))
    if not _direct(tensor):
        total = tensor if own and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
        _processes(group).allreduce([total]).wait()
        return total
    total = torch.empty(tensor.shape, dtype=tensor.dtype)
    places = total.view(-1).tensor_split(group.size)
    mine = _total(_from_others(tensor.reshape(-1).tensor_split(group.size), group), out=places[group.rank])
    _Exchange([mine] * group.size, places, group).wait()
    return total


def all_max(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The greatest values over the group, without gradient."""
    if not _real(tensor, group):
        _tell(tensor, group, 1.0)
        return tensor.clone()
    greatest = tensor.clone(memory_format=torch.contiguous_format)
    _count("all_reduce", 2 * (group.size - 1) * tensor.nbytes // group.size)
    _processes(group).allreduce([greatest], dist.ReduceOp.MAX).wait()
    return greatest


def all_gathered(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """All ranks' slices, joined along ``dim``, without gradient."""
    if not _real(tensor, group):
        _tell(tensor, group, 0.5 * group.size)
        return torch.cat([tensor] * group.size, dim)
    tensor = tensor.contiguous()
    shape = list(tensor.shape)
    _count("all_gather", (group.size - 1) * tensor.nbytes)
    if not _direct(tensor):
        flat = tensor.new_empty([group.size * shape[0], *shape[1:]])
        _processes(group)._allgather_base(flat, tensor).wait()
        return flat if dim == 0 else torch.cat(flat.chunk(group.size), dim)
    give = [tensor] * group.size
    if any(length != 1 for length in shape[:dim]):
        return torch.cat(_from_others(give, group), dim)
    shape[dim] *= group.size
    whole = tensor.new_empty(shape)
    places = whole.chunk(group.size, dim)
    exchange = _Exchange(give, places, group)
    places[group.rank].copy_(tensor.detach())  # meanwhile
    exchange.wait()
    return whole


def reduce_scattered(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's slice, along ``dim``, of the sum over the group, without gradient."""
    shape = list(tensor.shape)
    shape[dim] //= group.size
    if not _real(tensor, group):
        _tell(tensor, group, 0.5)
        return tensor.narrow(dim, 0, shape[dim]).clone()
    _count("reduce_scatter", (group.size - 1) * tensor.nbytes // group.size)
    if _direct(tensor):
        return _total(_from_others(tensor.chunk(group.size, dim), group))
    parts = torch.cat(tensor.chunk(group.size, dim)) if dim else tensor.contiguous()
    mine = tensor.new_empty(shape)
    _processes(group)._reduce_scatter_base(mine, parts, dist.ReduceScatterOptions()).wait()
    return mine


def sliced_of(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's slice along ``dim``, a copy."""
    if tensor.shape[dim] % group.size:
        raise ValueError(f"dim {dim} of {list(tensor.shape)} does not divide by {group.size}")
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        _tell(x, group, 1.0, late=True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduced(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        _tell(x, group, 0.5 * group.size, late=True)
        return all_gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scattered(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        _tell(x, group, 0.5, late=True)
        return reduce_scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gathered(grad, ctx.group, ctx.dim), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int, scale: float) -> Tensor:
        ctx.group, ctx.dim, ctx.scale = group, dim, scale
        _tell(x, group, 0.5, late=True)
        return sliced_of(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad if ctx.scale == 1.0 else grad * ctx.scale
        return all_gathered(grad, ctx.group, ctx.dim), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int, scale: float) -> Tensor:
        ctx.group, ctx.dim, ctx.scale = group, dim, scale
        return all_gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = sliced_of(grad, ctx.group, ctx.dim)
        return grad if ctx.scale == 1.0 else grad * ctx.scale, None, None, None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        _tell(x, group, 0.5, late=True)
        return exchanged(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return exchanged(grad, ctx.group, ctx.join, ctx.split), None, None, None


def exchanged(tensor: Tensor, group: TensorGroup, split: int, join: int) -> Tensor:
    """Give each rank its slice along ``split``, and join what comes along ``join``; without gradient."""
    parts = tensor.chunk(group.size, split)
    if not _real(tensor, group):
        _tell(tensor, group, 0.5)
        return torch.cat(parts, join)
    _count("all_to_all", (group.size - 1) * tensor.nbytes // group.size)
    if _direct(tensor):
        return torch.cat(_from_others(parts, group), join)
    given = torch.stack(parts)
    came = torch.empty_like(given)
    _processes(group).alltoall_base(came, given, [], []).wait()
    return torch.cat(came.unbind(0), join)


def copy(x: Tensor, group: TensorGroup) -> Tensor:
    """A whole tensor, on which ranks work with their slices."""
    return _Copy.apply(x, group)


def reduce(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum of all ranks' addends."""
    return _Reduce.apply(x, group)


def gather(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """All slices along ``dim``, joined, on which ranks work with their slices of something else."""
    return _Gather.apply(x, group, dim)


def reduce_scatter(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's slice, along ``dim``, of the sum of all ranks' addends."""
    return _ReduceScatter.apply(x, group, dim)


def take(x: Tensor, group: TensorGroup, dim: int, scale: float = 1.0) -> Tensor:
    """This rank's slice, along ``dim``, of what all hold.

    Args:
        scale: a factor for the gradient.
    """
    return _Take.apply(x, group, dim, scale)


def whole(x: Tensor, group: TensorGroup, dim: int, scale: float = 1.0) -> Tensor:
    """All slices along ``dim``, joined, on which all ranks do the same.

    Args:
        scale: a factor for the gradient.
    """
    return _Whole.apply(x, group, dim, scale)


def scaled(x: Tensor, factor: float) -> Tensor:
    """The tensor, with a factor for its gradient."""
    return _Scaled.apply(x, factor)


def alike(x: Tensor, group: TensorGroup) -> Tensor:
    """What each rank has whole inside a region, for work outside: each rank's gradient is its share of the whole."""
    return scaled(x, 1.0 / group.size)


def all_to_all(x: Tensor, group: TensorGroup, split: int, join: int) -> Tensor:
    """From slices along ``join`` to slices along ``split``: [.., S/n, .., H] to [.., S, .., H/n]."""
    return _AllToAll.apply(x, group, split, join)
