"""What one rank asks of a communicator, and whether it fits what another asks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What NCCL moves, as torch binds it; anything else goes as bytes, or not at all.
MOVED = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)


@dataclass(frozen=True)
class Call:
    """An operation, as a rank describes it to the others of its communicator.

    Attributes:
        kind: ``send``, ``recv``, or the name of a collective.
        rank: who asks; a global rank.
        peer: the other rank of a transfer; None for a collective.
        tensors: what moves, as ``float32[64]``.
        detail: the reduction or the root of a collective.
    """

    kind: str
    rank: int
    peer: int | None
    tensors: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        what = " ".join((self.kind, *self.tensors, *filter(None, [self.detail])))
        towards = {"send": " to", "recv": " from"}.get(self.kind, "")
        return f"rank {self.rank}: {what}{towards}" + (f" rank {self.peer}" if self.peer is not None else "")


def sizes(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """Number of elements and type of each tensor: all that NCCL goes by."""
    return tuple(f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]" for t in tensors)


def fit(mine: Call, theirs: Call) -> bool:
    """Whether the two are one operation, seen from its two ends."""
    if mine.tensors != theirs.tensors or mine.detail != theirs.detail:
        return False
    if mine.peer is None or theirs.peer is None:
        return mine.kind == theirs.kind and mine.peer == theirs.peer
    paired = {mine.kind, theirs.kind} == {"send", "recv"}
    return paired and mine.peer == theirs.rank and theirs.peer == mine.rank


def refusal(tensors: list[torch.Tensor]) -> str | None:
    """Why NCCL would not take these tensors; None if it would."""
    for t in tensors:
        if t.dtype not in MOVED:
            return f"a tensor of {t.dtype}, which NCCL has no type for"
        if not t.is_contiguous():
            return f"a tensor of shape {tuple(t.shape)} and strides {t.stride()}, not one block of memory in its order"
    return None
