"""How a tensor is divided among the ranks of a tensor-parallel group, and put together again. Knows no processes.

One dim is divided. A rank holds *runs* of it, one after another: of a fused query-key-value weight with four heads,
on two ranks,

    whole    | q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 |
    rank 0   | q0 q1 | k0 k1 | v0 v1 |        runs (0, 2) (4, 6) (8, 10), in heads
    rank 1   | q2 q3 | k2 k3 | v2 v3 |        runs (2, 4) (6, 8) (10, 12)

What does not divide evenly is divided unevenly, by whole heads; the first ranks hold the more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Slicing:
    """Which part of a dim each rank of a tensor-parallel group holds.

    Attributes:
        dim: the dim that is divided, 0 or more.
        length: of that dim in the whole tensor.
        runs: for each rank, the (start, stop) ranges of the whole dim that it holds, in its order.
    """

    dim: int
    length: int
    runs: tuple[Runs, ...]

    @classmethod
    def even(cls, dim: int, length: int, ranks: int, unit: int = 1, blocks: int = 1) -> Slicing:
        """As even as units allow.

        Args:
            unit: elements that stay together, such as a head's.
            blocks: number of equal blocks that the dim consists of, each divided for itself (3 for fused q, k, v).

        Raises:
            ValueError: the dim does not consist of whole units in each block.
        """
        block = length // blocks
        if length % blocks or block % unit:
            raise ValueError(f"{length} elements do not consist of {blocks} blocks of whole units of {unit}")
        bounds = bounds_of(block // unit, ranks)
        return cls(
            dim,
            length,
            tuple(
                tuple((b * block + start * unit, b * block + stop * unit) for b in range(blocks))
                for start, stop in bounds
            ),
        )

    def size(self, rank: int) -> int:
        """Length of the dim on a rank."""
        return sum(stop - start for start, stop in self.runs[rank])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole tensor: a view where it is one run, else a copy."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.runs[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of all ranks' parts. What several ranks hold is taken from the last of them."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.length
        whole = parts[0].new_empty(shape)
        for part, runs in zip(parts, self.runs, strict=True):
            at = 0
            for start, stop in runs:
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
                at += stop - start
        return whole

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, given that of any rank's part."""
        return (*part[: self.dim], self.length, *part[self.dim + 1 :])


def bounds_of(length: int, ranks: int) -> list[tuple[int, int]]:
    """Divide ``range(length)`` among ranks as evenly as possible; the first get the more."""
    share, more = divmod(length, ranks)
    starts = [rank * share + min(rank, more) for rank in range(ranks + 1)]
    return list(itertools.pairwise(starts))


def sliced(parameter: nn.Parameter, slicing: Slicing) -> nn.Parameter:
    """Note on a parameter (or buffer) that it is this rank's part of a whole one; returns it."""
    parameter.smp_slicing = slicing  # type: ignore[attr-defined]
    return parameter


def slicing_of(tensor: Tensor) -> Slicing | None:
    """How a parameter's whole is divided; None if this rank holds it whole."""
    return getattr(tensor, "smp_slicing", None)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of the whole of which a parameter is perhaps a slice."""
    slicing = slicing_of(tensor)
    return tuple(tensor.shape) if slicing is None else slicing.whole_shape(tensor.shape)
