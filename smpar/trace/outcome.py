"""What is known of a tensor on every rank, and what is known of a call without its data."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from smpar.trace import tree

NoSubclass = torch._C.DisableTorchFunctionSubclass


class Meta(NamedTuple):
    """All that every rank knows of a tensor; ``stride`` in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        gradient = " with gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{gradient}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def meta_of(tensor: torch.Tensor) -> Meta:
    """The metadata of any tensor, without going through an overridden ``__torch_function__``."""
    with NoSubclass():
        strided = tensor.layout is torch.strided
        return Meta(
            tuple(tensor.shape),
            tuple(tensor.stride()) if strided else (),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )


class Work(NamedTuple):
    """What one operator does, from which its time on any device follows: `seconds`.

    Attributes:
        flops: floating-point operations, weighted by how much slower than plain products they run.
        bytes: read and written.
        weights: whether it multiplies by a parameter, whose gradient may be computed later than that of the input.
        told: bytes that it all-reduces among the ranks of a tensor-parallel group, if it is a collective.
        late: whether it runs in the backward.
    """

    flops: float
    bytes: float
    weights: bool
    told: float = 0.0
    late: bool = False

    def seconds(self, flops: float, bandwidth: float, launch: float) -> float:
        """On a device of so many FLOP/s and bytes/s, with so many seconds per launched operator (roofline)."""
        return max(self.flops / flops, self.bytes / bandwidth) + launch


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Counted cost of one call: floating-point operations and seconds of its forward, bytes kept for its backward.

    ``work`` has its operators one by one, each with how often it is there.
    """

    flops: float = 0.0
    seconds: float = 0.0
    saved: int = 0
    work: tuple[tuple[Work, int], ...] = ()

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops, self.seconds + other.seconds, self.saved + other.saved, self.work + other.work
        )


class Out(NamedTuple):
    """A tensor that a call made (or wrote into).

    Attributes:
        reaches: inputs that its gradient reaches.
        shares: whose memory it has: an input's number, or -1, -2, ... for the first, second, ... place before it.
        views: those of them that it views in autograd's eyes, or that view what it does; `detach` gives an alias of
            the same memory that is no view.
        offset: where it begins in that memory, in elements; inputs begin at 0.
    """

    meta: Meta
    reaches: frozenset[int]
    shares: frozenset[int] = frozenset()
    views: frozenset[int] = frozenset()
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a call does, as far as can be known without data.

    ``places`` says for each tensor of the result where it comes from: an ``Out``, or the index of
    the input that it is. The last of them are ``attributes``, tensors that the unit leaves in its modules
    (number of the module in ``unit.modules()``, name). ``written`` are inputs changed in place, each with its
    state afterwards. ``leaks``: the unit hands tensors to the outside, by a forward hook or a list.
    ``guessed``: it read data on its way; ``varies``: the shapes or the numbers of its result depend on them.
    """

    spec: tree.Spec
    places: tuple[Out | int, ...]
    attributes: tuple[tuple[int, str], ...]
    written: tuple[tuple[int, Out], ...]
    draws: int
    random: bool
    guessed: bool
    cost: Cost
    leaks: bool = False
    varies: bool = False
    mutates: bool = False  # it changes lists or dicts among its arguments; the result is (result, (args, kwargs)) then
    keeps: bool = False  # the unit changes a state of its own: buffers, or other attributes
    hidden: tuple[tuple[int, str], ...] = ()  # tensors it leaves in objects: see smpar.trace.hidden
    borrowed: tuple[torch.nn.Parameter, ...] = ()  # parameters it uses that are neither its own nor arguments
