"""Writes in place into memory that several stage tensors share.

Within a segment torch keeps views and what they view together. Across a cut it cannot: the later segment has a leaf
for each tensor, and a write into one of them would not be seen through the others. So before such a write the whole
family comes into the segment of the write, in memory of its own:

    segment 0      h ─ first            h and a view of it
                   ╎    ╎   cuts
    segment 2      h ─ first.mul_(2)    both in fresh memory, views of one buffer

All of a family see what is written; only those who are kin (for autograd, views of one tensor) have its gradient, too:

    x ─ x[1:] ─ x[1:][2:]               kin: what is written into one has a part in the gradients of all
    x.detach() ─ x.detach()[1:]         of the same family, and kin to each other
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from smpar.errors import NotInGlue
from smpar.stage.tensor import StageTensor
from smpar.trace.outcome import NoSubclass


def family(tensor: StageTensor) -> list[StageTensor]:
    """The living stage tensors that share memory with this one, itself included, in the order they were made."""
    if tensor.aliases is None:
        return [tensor]
    living = (ref() for ref in tensor.aliases)
    return sorted((t for t in living if t is not None), key=lambda t: t.ident)


def kin(tensor: StageTensor) -> list[StageTensor]:
    """Those of the family, but for itself, that autograd takes for views of what this one is or views."""
    if tensor.viewed is None:
        return []
    return [t for t in family(tensor) if t is not tensor and t.viewed is tensor.viewed]


def told(tensor: StageTensor) -> list[StageTensor]:
    """After a write that leaves a tensor with a gradient: its kin have one, too; returns them.

    Views made under ``no_grad`` get none; torch lets nobody use them any more, unless under ``no_grad``.
    """
    joining = []
    for other in kin(tensor):
        if other.muted:
            other.spoilt = True
        else:
            with NoSubclass():
                other.requires_grad_(True)
            if (
                other.value is not None
            ):  # a view looks for its gradient when asked; until then torch lets nobody write it
                with contextlib.suppress(RuntimeError):  # of several views at once, which torch lets nobody use now
                    _ = other.value.grad_fn
            joining.append(other)
    return joining


@dataclasses.dataclass(frozen=True)
class Together:
    """Copies tensors that share memory into a buffer of their own, with the same values and layout.

    Gradients reach each element by one way only: through the first of the kin that has it and a gradient. Between
    those who are not kin none passes: each group has an alias of the buffer to itself.

    Attributes:
        stage: where it is done.
        groups: for each tensor a number, the same for kin.
        muted: for each, whether it is a view made under ``no_grad``.
        layouts: of each, its strides and where it begins in their memory. What has come over a wire has others.
    """

    stage: int
    groups: tuple[int, ...]
    muted: tuple[bool, ...]
    layouts: tuple[tuple[tuple[int, ...], int], ...]

    __name__ = "a write into memory that tensors share"  # for messages

    @classmethod
    def of(cls, members: Sequence[StageTensor], stage: int) -> Together:
        """What brings a family to a stage."""
        numbers: dict[object, int] = {}
        groups = tuple(numbers.setdefault(m.viewed or m.ident, len(numbers)) for m in members)
        start = min(m.offset for m in members)
        with NoSubclass():
            layouts = tuple((m.stride(), m.offset - start) for m in members)
        return cls(stage, groups, tuple(m.muted for m in members), layouts)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies.

        Args:
            tensors: of the layouts' shapes.

        Raises:
            NotInGlue: they see the memory as different types.
        """
        first = tensors[0]
        if any(t.dtype != first.dtype or t.is_conj() or t.is_neg() for t in tensors):
            raise NotInGlue("a write into memory that tensors share as different types", "clone the tensor first")
        size = max(start + _span(t.shape, stride) for t, (stride, start) in zip(tensors, self.layouts, strict=True))
        memory = first.new_zeros(size)
        bases = [memory, *(memory.detach() for _ in range(max(self.groups)))]
        sources = [t.detach() if muted else t for t, muted in zip(tensors, self.muted, strict=True)]
        order = sorted(reversed(range(len(tensors))), key=lambda i: sources[i].requires_grad)
        for i in order:
            if sources[i].numel():
                stride, start = self.layouts[i]
                once = _once(sources[i], stride)
                bases[self.groups[i]].as_strided(once.shape, stride, start).copy_(once)
        parts = []
        for tensor, group, muted, layout in zip(tensors, self.groups, self.muted, self.layouts, strict=True):
            with torch.set_grad_enabled(not muted):
                parts.append(bases[group].as_strided(tensor.shape, *layout))
        return parts


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """From a tensor's first element to behind its last, in elements."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0


def _once(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor without its repetitions: expanded dims of size one."""
    for dim, step in enumerate(stride):
        if step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
