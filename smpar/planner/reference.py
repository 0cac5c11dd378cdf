"""The partitioner in plain Python: what `smpar.planner.partition` computes, without its bounds and its speed.

The C++ core must decide equally, bit for bit, so the order of additions is part of the definition: units from left to
right; edges and ties by the unit at which they enter a growing interval, then by index; stages from last to first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from smpar.planner.chain import Edge, Goal, Partition, Tie, UnitCost, check, fold, total_memory, total_time
from smpar.planner.partition import too_large


@dataclass(frozen=True)
class Chain:
    """A partition problem, and what any interval ``[a, b)`` of it costs."""

    units: tuple[UnitCost, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    goal: Goal

    def memory(self, a: int, b: int) -> float:
        return fold(u.memory for u in self.units[a:b])

    def time(self, a: int, b: int) -> float:
        computing = fold(u.time for u in self.units[a:b])
        from_left = fold(e.seconds for e in self._from_left(a, b))
        from_right = fold(fold(e.seconds for e in edges) for edges in self._from_right(a, b))
        return computing + from_left + from_right

    def cost(self, a: int, b: int) -> float:
        weight = self.goal.memory_weight
        by_time = (1.0 - weight) * self.time(a, b) / self._time if self._time > 0.0 else 0.0
        by_memory = weight * self.memory(a, b) / self._memory if self._memory > 0.0 else 0.0
        return by_time + by_memory

    def tie_cost(self, a: int, b: int) -> float:
        """Charge for parameters whose first holder is an earlier stage: hence a function of the interval alone."""
        paid = fold(
            t.seconds for i in range(a, b) for t in self.ties if min(t.units, default=a) < a and _first(t, a) == i
        )
        return (1.0 - self.goal.memory_weight) * paid / self._time if self._time > 0.0 else 0.0

    def fits(self, a: int, b: int) -> bool:
        return self.goal.memory_limit is None or self.memory(a, b) <= self.goal.memory_limit

    def objective(self, cuts: Sequence[int]) -> float:
        costs = [(self.cost(a, b), self.tie_cost(a, b)) for a, b in intervals(cuts, len(self.units))]
        total = fold(cost + tie for cost, tie in reversed(costs))
        return total + (self.goal.microbatches - 1.0) * max(cost for cost, _ in costs)

    def _from_left(self, a: int, b: int) -> Iterator[Edge]:
        for unit in range(a, b):
            yield from (e for e in self.edges if e.source < a and unit == min(t for t in (*e.targets, b) if t >= a))

    def _from_right(self, a: int, b: int) -> Iterator[list[Edge]]:
        for unit in reversed(range(a, b)):
            yield [e for e in self.edges if e.source >= b and unit == max(t for t in (*e.targets, a - 1) if t < b)]

    @cached_property
    def _time(self) -> float:
        return total_time(self.units)

    @cached_property
    def _memory(self) -> float:
        return total_memory(self.units)


def _first(tie: Tie, a: int) -> int | None:
    return min((u for u in tie.units if u >= a), default=None)


def intervals(cuts: Sequence[int], size: int) -> list[tuple[int, int]]:
    return list(zip(cuts, (*cuts[1:], size), strict=True))


def partition_reference(
    units: Sequence[UnitCost],
    edges: Sequence[Edge],
    ties: Sequence[Tie],
    stages: int,
    microbatches: int,
    memory_weight: float = 0.0,
    memory_limit: float | None = None,
) -> Partition:
    """As `smpar.planner.partition.partition` where each stage has its own rank: same result and errors; cubic time and
    more."""
    goal = Goal(stages, microbatches, memory_weight, memory_limit)
    check(units, edges, ties, goal)
    chain = Chain(tuple(units), tuple(edges), tuple(ties), goal)

    @lru_cache(None)
    def cost(a: int, b: int) -> tuple[float, float] | None:
        c = chain.cost(a, b)
        return (c, c + chain.tie_cost(a, b)) if chain.fits(a, b) else None

    found = best_cuts(len(units), stages, microbatches, lambda _, a, b: cost(a, b))
    if found is None:
        raise too_large(units, goal)
    cuts, best = found
    ends = intervals(cuts, len(units))
    return Partition.make(goal, cuts, best, [chain.time(a, b) for a, b in ends], [chain.memory(a, b) for a, b in ends])


def best_cuts(
    size: int, stages: int, microbatches: int, cost: Callable[[int, int, int], tuple[float, float] | None]
) -> tuple[list[int], float] | None:
    """The cuts that minimise the sum of totals + (microbatches - 1) * the largest cost, and that objective.

    ``cost(stage, a, b)`` is cost and total of ``[a, b)`` on that stage, or None if it does not fit there.
    """
    cost = lru_cache(None)(cost)

    @lru_cache(None)
    def frontier(left: int, a: int) -> list[tuple[float, float]]:
        """The undominated (sum, max) of all cuts of ``[a, size)`` into the last ``left`` stages."""
        if left == 0:
            return [(0.0, 0.0)] if a == size else []
        points = []
        for b in range(a + 1, size - left + 2):
            if (here := cost(stages - left, a, b)) is not None:
                points += [(here[1] + rest, max(here[0], peak)) for rest, peak in frontier(left - 1, b)]
        return undominated(points)

    def value(head: Sequence[int], rest: float, peak: float) -> float:
        """Objective of cuts that begin with ``head`` and end with a frontier's point at its last entry; infinite if
        one of its stages does not fit."""
        for stage, (a, b) in reversed(list(enumerate(pairwise(head)))):
            c, total = cost(stage, a, b) or (math.inf, math.inf)
            rest, peak = total + rest, max(c, peak)
        return rest + (microbatches - 1.0) * peak

    best = min((value((0,), *point) for point in frontier(stages, 0)), default=None)
    if best is None:
        return None
    cuts = [0]
    for left in range(stages - 1, 0, -1):
        ends = range(cuts[-1] + 1, size)
        cuts.append(next(b for b in ends if any(value((*cuts, b), *p) == best for p in frontier(left, b))))
    return cuts, best


def undominated(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points than which no other has both a smaller or equal sum and a smaller or equal max."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
