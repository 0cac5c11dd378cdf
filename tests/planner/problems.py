"""Random partition problems, and their truth by trying all cuts in exact arithmetic."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any, NamedTuple

from smpar.planner.chain import Edge, Tie, UnitCost


class Problem(NamedTuple):
    units: list[UnitCost]
    edges: list[Edge]
    ties: list[Tie]
    stages: int
    microbatches: int
    memory_weight: float
    memory_limit: float | None
    ranks: tuple[int, ...] = ()
    evenness: float = 0.0

    @property
    def of_stages(self) -> tuple[Any, ...]:
        """The arguments of a partition in which each stage has a rank of its own."""
        return self[:7]


def loop(ranks: int, per_rank: int) -> tuple[int, ...]:
    """0 1 2 0 1 2: the rank of each stage under interleaved schedules."""
    return tuple(range(ranks)) * per_rank


def vee(ranks: int) -> tuple[int, ...]:
    """0 1 2 2 1 0: there and back, as in zbv."""
    return (*range(ranks), *reversed(range(ranks)))


def shared(rng: random.Random, most_units: int = 10) -> Problem:
    """A random problem with two or three stages on each of two or three ranks, in a loop or a V."""
    ranks = rng.choice((loop(2, 2), loop(3, 2), loop(2, 3), loop(3, 3), vee(2), vee(3)))
    while True:
        p = problem(rng, most_units)
        if len(p.units) >= len(ranks):
            limit = None
            if p.memory_limit is not None:
                limit = rng.uniform(0.9, 1.8) * sum(u.memory for u in p.units) / (1 + max(ranks))
            return p._replace(stages=len(ranks), ranks=ranks, memory_limit=limit, evenness=rng.choice((0.0, 0.4, 1.0)))


def problem(rng: random.Random, most_units: int = 11, most_stages: int = 5) -> Problem:
    """Edges run both ways, skip units and repeat targets; about a third of the numbers are small integers, so that
    equal objectives occur."""
    size = rng.randint(1, most_units)
    coarse = rng.random() < 0.35

    def number(scale: float) -> float:
        return float(rng.randint(0, 3)) if coarse else rng.choice((0.0, 1.0, 1.0, 1.0)) * rng.uniform(0.0, scale)

    units = [UnitCost(f"unit{i}", number(2.0), number(5.0) * 1e6) for i in range(size)]
    edges = [
        Edge(rng.randrange(size), tuple(rng.choices(range(size), k=rng.randint(0, 3))), number(1.0))
        for _ in range(rng.randint(0, size))
    ]
    edges += [Edge(i, (i + 1,), number(0.5)) for i in range(size - 1) if rng.random() < 0.7]
    ties = [
        Tie(tuple(rng.choices(range(size), k=rng.randint(0, 4))), number(1.0)) for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    stages = rng.randint(1, min(size, most_stages))
    total = sum(u.memory for u in units)
    limit = rng.uniform(0.8, 2.5) * total / stages if rng.random() < 0.4 else None
    weight = rng.choice((0.0, 0.2, 0.8, 1.0, rng.random()))
    return Problem(units, edges, ties, stages, rng.choice((1, 2, 3, 8, 32)), weight, limit)


def all_cuts(size: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in itertools.combinations(range(1, size), stages - 1)]


def true_objective(p: Problem, cuts: tuple[int, ...]) -> Fraction | None:
    """The objective straight from its definition, without rounding; None if a rank is above the memory limit.

    Stage by stage and set by set, with none of the shortcuts of the code under test.
    """
    size = len(p.units)
    rank_of_stage = p.ranks or tuple(range(p.stages))
    ranks = range(1 + max(rank_of_stage))
    stage_of = [sum(cut <= unit for cut in cuts) - 1 for unit in range(size)]
    rank_of = [rank_of_stage[stage] for stage in stage_of]
    time = [Fraction(0)] * p.stages
    memory = [Fraction(0)] * p.stages
    for unit, stage in zip(p.units, stage_of, strict=True):
        time[stage] += Fraction(unit.time)
        memory[stage] += Fraction(unit.memory)
    whole_time, whole_memory = sum(time), sum(memory)
    for edge in p.edges:
        for stage in {stage_of[t] for t in edge.targets}:
            if rank_of_stage[stage] != rank_of[edge.source]:
                time[stage] += Fraction(edge.seconds)

    def of_rank(rank: int, values: list[Fraction]) -> Fraction:
        return sum((v for r, v in zip(rank_of_stage, values, strict=True) if r == rank), Fraction(0))

    if p.memory_limit is not None and max(of_rank(r, memory) for r in ranks) > Fraction(p.memory_limit):
        return None
    tied = sum(
        (Fraction(tie.seconds) * (len({rank_of[u] for u in tie.units}) - 1) for tie in p.ties if tie.units),
        Fraction(0),
    )
    w = Fraction(p.memory_weight)
    by_time = (1 - w) / whole_time if whole_time else Fraction(0)
    by_memory = w / whole_memory if whole_memory else Fraction(0)
    cost = [by_time * t + by_memory * m for t, m in zip(time, memory, strict=True)]
    v = Fraction(p.stages, len(ranks))
    even = Fraction(p.evenness)
    pace = (1 - even) * max(of_rank(r, cost) for r in ranks) + even * v * max(cost)
    return sum(cost, Fraction(0)) / v + (p.microbatches - 1 / v) * pace + by_time * tied


def best(p: Problem) -> Fraction | None:
    found = [true_objective(p, cuts) for cuts in all_cuts(len(p.units), p.stages)]
    return min((f for f in found if f is not None), default=None)
