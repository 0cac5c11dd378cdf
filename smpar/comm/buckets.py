"""Gradients in flat buckets, which are reduced over a group of ranks one after another.

    ready     p5   p4   p3   p2   p1   p0     in backward, the last parameters' gradients come first
    buckets  [p5] [p4   p3] [p2   p1] [p0]    the first one is small: its reduction starts early
    memory        | p4     | p3    |1 1|      flags, one per parameter, tell whether any rank has its gradient

A bucket's memory is kept from step to step. After a reduction the parameters' gradients lie in it, so nothing is
copied back; whoever keeps an old gradient keeps that memory, and the bucket takes another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from smpar.comm.peers import Peers
from smpar.errors import WrongHookResult

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]
FIRST = 1 << 20  # bytes of the first bucket

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], first: int, cap: int
) -> tuple[tuple[int, ...], ...]:
    """Which parameters share a bucket, in the order in which the buckets are reduced.

        sizes 3 3 3 3 9 1, order 5 4 3 2 1 0, first 1, cap 6   ->   (5) (4) (3 2) (1 0)

    Args:
        sizes: bytes of each parameter's gradient.
        kinds: parameters of different kinds (type, device, ranks that hold them) never share a bucket.
        order: the parameters' indices as their gradients become ready.
        first, cap: bytes at which the first bucket, and each later one, is closed.
    """
    closed: list[tuple[int, ...]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index in order:
        members, filled = open_.pop(kinds[index], ([], 0))
        members.append(index)
        filled += sizes[index]
        if filled >= (cap if closed else first):
            closed.append(tuple(members))
        else:
            open_[kinds[index]] = members, filled
    closed += [tuple(members) for members, _ in open_.values()]
    place = {index: i for i, index in enumerate(order)}
    return tuple(sorted(closed, key=lambda members: place[members[-1]]))


class Memory:
    """One flat buffer: a view per parameter, laid out as the parameter is, and a flag for each."""

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        count = sum(p.numel() for p in parameters)
        self.whole = torch.zeros(count + len(parameters), dtype=dtype, device=parameters[0].device)
        self.flat, self.flags = self.whole[:count], self.whole[count:]
        self.views: list[Tensor] = []
        offset = 0
        for p in parameters:
            stride = torch.empty_like(p, device="meta").stride()  # contiguous where the parameter's own have gaps
            self.views.append(self.whole.as_strided(p.shape, stride, offset))
            offset += p.numel()
        self.places = [view.data_ptr() for view in self.views]
        self._ours = self._references()

    def _references(self) -> int:
        return _use_count(self.whole.untyped_storage()._cdata)

    def others(self) -> int:
        """How many tensors outside of this bucket lie in the memory."""
        return self._references() - self._ours


class Bucket:
    """Some parameters' gradients, reduced together.

    Args:
        index: its place in the order of reductions, 0 the first.
        numbers: what the owner of the bucket calls its parameters.
        parameters: of one device, whose gradients are of one type.
        dtype: of the reduction; another one than the parameters' own when gradients are accumulated in float32.
        peers: the ranks that it is reduced over.

    Attributes:
        wide: whether the reduction is of another type than the gradients, which then cannot lie in the memory.
        last: whether it is the last one of the step.
        missing: parameters whose gradients are not ready.
        launched: whether this step's reduction has begun.
        filled: by place, whether the gradient is in already, scaled.
        absent: places of the parameters that had no gradient when it did.
    """

    def __init__(
        self, index: int, numbers: Sequence[int], parameters: Sequence[nn.Parameter], dtype: torch.dtype, peers: Peers
    ) -> None:
        self.index, self.numbers, self.parameters, self.dtype = index, tuple(numbers), tuple(parameters), dtype
        self.peers = peers
        self.wide = dtype != parameters[0].dtype
        self.last = False
        self.missing = len(self.parameters)
        self.launched = False
        self.filled = [False] * len(self.parameters)
        self.absent: list[int] = []
        self._memories = [Memory(self.parameters, dtype)]
        self._scale = 1.0, torch.tensor(1.0)
        self._work: Any = None
        self._result: torch.futures.Future[Tensor | list[Tensor]] | None = None

    @property
    def memory(self) -> Memory:
        return self._memories[-1]

    def begin(self) -> None:
        """A step starts: take memory in which no gradient lies that somebody may still read."""
        self.missing, self.launched = len(self.parameters), False
        self.filled = [False] * len(self.parameters)
        now = self.memory
        inside = sum(
            p.grad is not None and _address(p.grad) == place
            for p, place in zip(self.parameters, now.places, strict=True)
        )
        if now.others() == inside:
            return
        # Gradients of before are kept by someone, so they stay as they are.
        spare = [m for m in self._memories[:-1] if not m.others()]
        self._memories = [now, spare[0] if spare else Memory(self.parameters, self.dtype)]

    def fill(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Bring in the gradients that are not there yet, times ``scale``; absent ones count as zero.

        Unless the bucket is of another type, its memory becomes the parameters' gradients.
        """
        self.absent = []
        for place, grad in enumerate(gradients):
            if self.filled[place]:
                continue
            if grad is None:
                self.absent.append(place)
                self.memory.views[place].zero_()
            else:
                self.put(place, grad, scale)

    def put(self, place: int, grad: Tensor, scale: float = 1.0) -> None:
        """Bring one gradient in, unless it is there, and scale it."""
        memory = self.memory
        view = memory.views[place]
        if _address(grad) == memory.places[place]:
            if scale != 1.0:
                view.mul_(self._factor(scale))
            return
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if grad.requires_grad:  # of a backward that can be differentiated again
            grad = grad.detach()
        if grad.dtype == view.dtype:
            torch.mul(grad, self._factor(scale), out=view)
        else:
            view.copy_(grad).mul_(self._factor(scale))
        if not self.wide:
            self.adopt(place)

    def _factor(self, scale: float) -> Tensor:
        """The scale as a tensor, which makes an operation on a small gradient half as long as a number does."""
        if scale != self._scale[0]:
            dtype = torch.float32 if self.dtype == torch.float32 else torch.float64  # others convert it in any case
            self._scale = scale, torch.tensor(scale, dtype=dtype)
        return self._scale[1]

    def adopt(self, place: int) -> None:
        """Let a parameter's gradient be its part of the memory: a tensor of its own, that is no view."""
        self.parameters[place].grad = self.memory.views[place].data

    def launch(self, hook: tuple[Any, CommHook] | None) -> None:
        """Start the reduction: the sum over the peers, or whatever the hook makes of it.

        Raises:
            WrongHookResult: the hook returns no future.
        """
        self.launched = True
        if hook is not None:
            state, function = hook
            result = function(state, GradBucket(self))
            if not isinstance(result, torch._C.Future):  # nothing would be reduced, and nobody would notice
                raise WrongHookResult(f"a {type(result).__name__} from {_name(function)}")
            self._result = cast("torch.futures.Future[Tensor | list[Tensor]]", result)
            return
        memory = self.memory
        if self.peers.group is None:
            return
        memory.flags.fill_(1)
        for i in self.absent:
            memory.flags[i].zero_()
        self._work = self.peers.group.allreduce([_real(memory.whole)])

    @property
    def at_work(self) -> bool:
        """Whether a communication hook may still send something."""
        return self._result is not None and not self._result.done()

    def settle(self) -> None:
        """Wait for the communication hook, if there is one."""
        if self._result is not None:
            self._result.wait()

    def wait(self) -> list[bool]:
        """The reduction's end; whether any rank had a gradient, by parameter (without flags: whether this one had).

        Raises:
            WrongHookResult: the hook's future holds something else than the bucket's gradients.
        """
        memory = self.memory
        if self._result is not None:
            result, self._result = self._result.wait(), None
            flat = result[0] if isinstance(result, list) and result else result  # gloo's own futures give lists
            if not isinstance(flat, Tensor) or flat.numel() != memory.flat.numel():
                got = f"a tensor of {flat.numel()}" if isinstance(flat, Tensor) else f"a {type(flat).__name__}"
                raise WrongHookResult(f"a future of {got} for a bucket of {memory.flat.numel()} numbers")
            if flat.data_ptr() != memory.flat.data_ptr():
                memory.flat.copy_(flat.view(-1))
        elif self._work is not None:
            self._work.wait()
            self._work = None
            if self.absent:
                return [bool(flag) for flag in memory.flags.tolist()]
        return [i not in self.absent for i in range(len(self.parameters))]


class GradBucket:
    """What a communication hook gets: the methods of ``torch.distributed.GradBucket``, which only C++ can make."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        """The bucket's place in the order of reductions."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All gradients of the bucket, flat."""
        return self._bucket.memory.flat

    def gradients(self) -> list[Tensor]:
        """The parts of the buffer, each in its parameter's shape."""
        return list(self._bucket.memory.views)

    def parameters(self) -> list[Tensor]:
        """The parameters that the gradients belong to."""
        return cast("list[Tensor]", list(self._bucket.parameters))

    def is_last(self) -> bool:
        """Whether this is the step's last bucket."""
        return self._bucket.last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer's content."""
        self._bucket.memory.flat.copy_(buffer.view(-1))


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _address(grad: Tensor) -> int:
    return grad.data_ptr() if grad.layout is torch.strided else -1


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def cap_in_bytes(megabytes: float) -> int:
    """The size at which buckets close; at least one byte, so that each closes."""
    return max(1, math.ceil(megabytes * (1 << 20)))
