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

import itertools
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A module: its cost relative to the root's; a leaf is a unit, numbered in execution order."""

    cost: float
    children: tuple[Node, ...] = ()

    def leaves(self) -> int:
        return sum(child.leaves() for child in self.children) if self.children else 1


def random_tree(rng: random.Random, depth: int = 3) -> Node:
    if depth == 0 or rng.random() < 0.2:
        return Node(rng.choice((0.1, 1.0, 1.0, 5.0)) * rng.random())
    children = tuple(random_tree(rng, depth - 1) for _ in range(rng.randint(1, 4)))
    return Node(sum(child.cost for child in children), children)


def leaf_costs(node: Node) -> list[float]:
    return [cost for child in node.children for cost in leaf_costs(child)] if node.children else [node.cost]


def smp_cuts(root: Node, devices: int) -> tuple[int, ...]:
    """First unit of each non-empty stage. A device that gets no unit drops out: there may be fewer than asked for.

    Nodes are independent once they have their devices, so that depth first here equals SMP's breadth first.
    """
    return tuple(_cut((root,), 0, devices))


def _cut(nodes: tuple[Node, ...], first: int, devices: int) -> list[int]:
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


def min_max_segments(costs: list[float], count: int) -> tuple[int, ...]:
    """Starts of ``count`` contiguous segments, the dearest as cheap as can be."""
    options = ((0, *rest) for rest in itertools.combinations(range(1, len(costs)), count - 1))
    return min(options, key=lambda c: max(sum(costs[a:b]) for a, b in zip(c, (*c[1:], len(costs)), strict=True)))


def d_hondt(costs: list[float], seats: int) -> list[int]:
    """Seats in proportion to costs: each in turn goes where cost / (seats already there + 1) is largest."""
    given = [0] * len(costs)
    for _ in range(seats):
        given[max(range(len(costs)), key=lambda i: costs[i] / (given[i] + 1))] += 1
    return given
