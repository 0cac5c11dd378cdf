"""The compiled partitioner decides as its Python twin, bit for bit; and it is quick."""

from __future__ import annotations

import random
import time

from smpar.errors import PlanError
from smpar.planner.chain import Edge, Partition, Tie, UnitCost
from smpar.planner.partition import partition
from smpar.planner.reference import partition_reference
from tests.planner.problems import Problem, problem


def decision(solve, p: Problem) -> Partition | str:
    try:
        return solve(*p.of_stages)
    except PlanError as error:
        return str(error)


def test_equals_the_twin_on_small_chains() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    for i in range(1000):
        p = problem(random.Random(seed + i))
        assert decision(partition, p) == decision(partition_reference, p), p


def test_equals_the_twin_on_longer_chains() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    for i in range(40):
        p = problem(random.Random(seed + i), most_units=40, most_stages=12)
        assert decision(partition, p) == decision(partition_reference, p), p


def test_equals_the_twin_when_all_units_are_equal() -> None:
    """Hundreds of equal optima: the tie rule decides, and rounding must not."""
    for size, stages in ((24, 5), (30, 7), (33, 8)):
        for value in (1.0, 0.1, 1e-3 / 3, 0.0):
            units = [UnitCost(str(i), value, value) for i in range(size)]
            edges = [Edge(i, (i + 1,), value / 10) for i in range(size - 1)]
            p = Problem(units, edges, [Tie((0, size - 1), value)], stages, 8, 0.3, None)
            assert decision(partition, p) == decision(partition_reference, p)


def test_a_thousand_units_take_no_second() -> None:
    """The aim is 100 ms; the limit here leaves room for a busy machine, and still tells a lost bound (minutes)."""
    rng = random.Random(random.randrange(2**31))
    units = [UnitCost(str(i), rng.uniform(0.2, 2.0), rng.uniform(0.1, 1.0)) for i in range(1000)]
    edges = [Edge(i, (min(i + rng.randint(1, 3), 999),), rng.uniform(0.0, 0.2)) for i in range(999)]
    for microbatches in (1, 4, 64):
        start = time.process_time()
        partition(units, edges, [Tie((0, 999), 1.0)], 64, microbatches)
        assert time.process_time() - start < 1.0
