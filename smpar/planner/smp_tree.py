"""SMP's own partition algorithm, as a baseline (arXiv 2111.05972): top down over the module tree.

::

    root  [0 1 2 3]            a node holds a set of devices; its children, in execution order, are cut
    ├─ embed   ┐ segment 0     into as many segments, so that the dearest segment is cheapest; devices go
    ├─ block0  ┘ [0]           to segments in proportion to their cost (D'Hondt); a segment with one
    ├─ block1  ─ segment 1     device lands there whole, one with more is cut in turn.
    │  ├─ attn   [1 2]
    │  └─ mlp
    └─ head    ─ segment 2 [3]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby


@dataclass(frozen=True)
class Tree:
    """A module: its cost relative to the root's; a leaf is a unit, numbered in execution order."""

    cost: float
    children: tuple[Tree, ...] = ()

    def leaves(self) -> int:
        """Number of units in it."""
        return sum(child.leaves() for child in self.children) if self.children else 1


def tree(names: Sequence[str], costs: Sequence[float]) -> Tree:
    """The tree of units by the dots in their names: ``h.0.attn`` and ``h.0.mlp`` are in ``h.0``, in ``h``.

    A module whose units do not follow each other in execution order becomes several.
    """
    paths = [tuple(name.split(".")) for name in names]
    return _tree(list(zip(paths, costs, strict=True)), 0)


def _tree(units: list[tuple[tuple[str, ...], float]], depth: int) -> Tree:
    total = sum(cost for _, cost in units)
    if len(units) == 1:
        return Tree(total)
    shared = [list(group) for _, group in groupby(units, key=lambda unit: unit[0][: depth + 1])]
    if max(len(path) for path, _ in units) <= depth:  # equal names: nothing tells them apart
        return Tree(total, tuple(Tree(cost) for _, cost in units))
    if len(shared) == 1:
        return _tree(units, depth + 1)
    return Tree(total, tuple(_tree(group, depth + 1) for group in shared))


def smp_cuts(root: Tree, devices: int) -> tuple[int, ...]:
    """First unit of each non-empty stage. A device that gets no unit drops out: there may be fewer than asked for.

    Nodes are independent once they have their devices, so that depth first here equals SMP's breadth first.
    """
    return tuple(_cut((root,), 0, devices))


def _cut(nodes: tuple[Tree, ...], first: int, devices: int) -> list[int]:
    if devices == 1 or (len(nodes) == 1 and not nodes[0].children):
        return [first]
    if len(nodes) == 1:
        return _cut(nodes[0].children, first, devices)
    begins = min_max_segments([node.cost for node in nodes], min(devices, len(nodes)))
    segments = [nodes[a:b] for a, b in zip(begins, (*begins[1:], len(nodes)), strict=True)]
    starts: list[int] = []
    at = first
    for segment, seats in zip(segments, d_hondt([sum(n.cost for n in s) for s in segments], devices), strict=True):
        # A segment without a device goes to the stage before it, or after it if it is the first.
        starts += _cut(segment, at, seats) if seats else []
        at += sum(node.leaves() for node in segment)
    return [first, *starts[1:]]


def min_max_segments(costs: Sequence[float], count: int) -> tuple[int, ...]:
    """Starts of ``count`` contiguous segments, the dearest as cheap as can be; of equals, the first ones."""
    size = len(costs)
    sums = [list(accumulate(costs[i:])) for i in range(size)]  # sums[i][k]: of costs i to i + k
    best = [sums[i][-1] for i in range(size)]  # of the costs from i on, in as many segments as there are so far
    levels = [best]
    for segments in range(2, count + 1):
        before, last = levels[-1], size - segments
        levels.append(
            [min(max(sums[i][j - i - 1], before[j]) for j in range(i + 1, last + 2)) for i in range(last + 1)]
        )
    worst, starts = levels[-1][0], [0]
    for rest in range(count - 1, 0, -1):
        i = starts[-1]
        starts.append(next(j for j in range(i + 1, size) if max(sums[i][j - i - 1], levels[rest - 1][j]) <= worst))
    return tuple(starts)


def d_hondt(costs: Sequence[float], seats: int) -> list[int]:
    """Seats in proportion to costs: each in turn goes where cost / (seats already there + 1) is largest."""
    given = [0] * len(costs)
    for _ in range(seats):
        given[max(range(len(costs)), key=lambda i: costs[i] / (given[i] + 1))] += 1
    return given
