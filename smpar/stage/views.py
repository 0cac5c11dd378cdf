"""Writes in place into memory that several stage tensors share, when they are not all of one segment.

Within a segment torch keeps views and what they view together. Across a cut it cannot: the later segment has a leaf
for each tensor, and a write into one of them would not be seen through the others. So before such a write the whole
family comes into the segment of the write, in memory of its own:

    segment 0      h ─ first            h and a view of it
                   ╎    ╎   cuts
    segment 2      h ─ first.mul_(2)    both in fresh memory, views of one buffer
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smpar.errors import NotInGlue
from smpar.stage.tensor import StageTensor


def family(tensor: StageTensor) -> list[StageTensor]:
    """The living stage tensors of the same home that share memory with this one, in the order they were made."""
    if tensor.aliases is None:
        return [tensor]
    living = (ref() for ref in tensor.aliases)
    return sorted((t for t in living if t is not None and t.home == tensor.home), key=lambda t: t.ident)


def together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same values and layout as these, which share memory, in a buffer of their own.

    Gradients reach each element by one way only: through the first of the tensors that has it and a gradient. So what
    is viewed comes before its views, which may have been made without gradient.

    Args:
        tensors: parts of one storage, detached; under a trace of one storage each.

    Raises:
        NotInGlue: they see the memory as different types.
    """
    first = tensors[0]
    if any(t.dtype != first.dtype or t.is_conj() or t.is_neg() for t in tensors):
        raise NotInGlue("a write into memory that tensors share as different types", "clone the tensor first")
    start = min(t.storage_offset() for t in tensors)
    end = max(t.storage_offset() + _span(t) for t in tensors)
    buffer = first.new_zeros(end - start)
    for tensor in sorted(reversed(tensors), key=lambda t: t.requires_grad):
        if tensor.numel():
            once = _once(tensor)
            buffer.as_strided(once.shape, once.stride(), tensor.storage_offset() - start).copy_(once)
    parts = [buffer.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in tensors]
    return [p if t.requires_grad else p.detach() for p, t in zip(parts, tensors, strict=True)]


def _span(tensor: torch.Tensor) -> int:
    """From its first element to behind its last, in elements."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its repetitions: expanded dims of size one."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
