"""The partitioner's promises: the true optimum, the smallest cuts among equals, and errors that help."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from fractions import Fraction

import pytest

from smpar.errors import NativeMissing, PlanError, TooFewUnits
from smpar.planner.chain import Edge, Goal, Partition, Tie, UnitCost
from smpar.planner.partition import least_memory, partition
from smpar.planner.reference import Chain, partition_reference
from smpar.planner.smp_tree import smp_cuts
from tests.planner.problems import Problem, all_cuts, best, problem, true_objective
from tests.planner.smp_baseline import leaf_costs, random_tree

SEED = random.randrange(2**31)
ROUNDING = Fraction(1, 10**12)


def problems(count: int) -> list[Problem]:
    print(f"seed {SEED}")
    return [problem(random.Random(SEED + i)) for i in range(count)]


@pytest.mark.parametrize("solve", [partition, partition_reference])
def test_equals_brute_force(solve) -> None:
    infeasible = 0
    for p in problems(400):
        truth = best(p)
        if truth is None:
            infeasible += 1
            with pytest.raises(PlanError, match="too many"):
                solve(*p.of_stages)
            continue
        found = solve(*p.of_stages)
        assert len(found.cuts) == p.stages
        reached = true_objective(p, found.cuts)
        assert reached is not None, p
        assert abs(reached - truth) <= ROUNDING * truth, p
        assert abs(Fraction(found.objective) - truth) <= ROUNDING * truth, p
    assert 0 < infeasible < 200


@pytest.mark.parametrize("solve", [partition, partition_reference])
def test_takes_the_lexicographically_smallest_of_equals(solve) -> None:
    tried = 0
    for p in problems(300):
        if best(p) is None:
            continue
        chain = Chain(tuple(p.units), tuple(p.edges), tuple(p.ties), Goal(*p[3:]))
        size = len(p.units)
        kept = [c for c in all_cuts(size, p.stages) if true_objective(p, c) is not None]
        smallest = min(chain.objective(c) for c in kept)
        equals = [c for c in kept if chain.objective(c) == smallest]
        tried += len(equals) > 1
        assert solve(*p.of_stages).cuts == min(equals), p
    assert tried > 10


def test_a_drawn_example() -> None:
    """The fastest pace is 5 seconds. The tensor from unit 1 to 2 is dear, so that no cut falls between them.

    ::

        time   3  2 ══ 2  1  5
        stage  0  0    0  1  1     pace 7: cut after the dear tensor
        stage  0  1    1  1  2     with three stages: pace 5
    """
    units = [UnitCost(str(i), t, 1.0) for i, t in enumerate((3.0, 2.0, 2.0, 1.0, 5.0))]
    edges = [Edge(1, (2,), 10.0)]
    two = partition(units, edges, [], stages=2, microbatches=4)
    assert two == Partition((0, 3), two.objective, (7.0, 6.0), (3.0, 2.0), (7.0, 6.0), (3.0, 2.0))
    assert two.objective == pytest.approx(1.0 + 3 * 7 / 13)
    three = partition(units, edges, [], stages=3, microbatches=4)
    assert three == Partition(
        (0, 1, 4), three.objective, (3.0, 5.0, 5.0), (1.0, 3.0, 1.0), (3.0, 5.0, 5.0), (1.0, 3.0, 1.0)
    )
    assert three.objective == pytest.approx(1.0 + 3 * 5 / 13)


def test_a_tensor_used_twice_on_a_stage_is_paid_once() -> None:
    units = [UnitCost(str(i), 1.0, 0.0) for i in range(4)]
    found = partition(units, [Edge(0, (2, 3, 3), 0.25)], [], stages=2, microbatches=1)
    assert found.cuts == (0, 1)
    assert found.stage_time == (1.0, 3.25)
    assert found.objective == 4.25 / 4


def test_a_tie_draws_its_units_together() -> None:
    units = [UnitCost(str(i), 1.0, 0.0) for i in range(6)]
    assert partition(units, [], [], stages=3, microbatches=2).cuts == (0, 2, 4)
    assert partition(units, [], [Tie((1, 2), 9.0)], stages=3, microbatches=2).cuts == (0, 1, 3)


def test_memory_weight_moves_the_cut() -> None:
    """Time is at the front, memory at the back."""
    units = [UnitCost(str(i), t, m) for i, (t, m) in enumerate([(4, 1), (4, 1), (2, 1), (1, 5), (1, 4), (1, 4)])]
    cuts = [partition(units, [], [], 2, 8, memory_weight=w).cuts for w in (0.0, 1.0)]
    assert cuts == [(0, 2), (0, 4)]


def test_never_worse_than_smp() -> None:
    """Over random module trees; better on many of them, or the baseline is no test."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    better = tried = 0
    while tried < 200:
        tree = random_tree(rng)
        units = [UnitCost(str(i), cost, cost) for i, cost in enumerate(leaf_costs(tree))]
        cuts = smp_cuts(tree, rng.randint(2, 8))
        if len(cuts) < 2:
            continue
        tried += 1
        edges = [Edge(i, (i + 1,), rng.uniform(0.0, 0.2)) for i in range(len(units) - 1)]
        p = Problem(units, edges, [], len(cuts), rng.choice((1, 4, 16)), rng.choice((0.0, 0.2, 0.8)), None)
        theirs = true_objective(p, cuts)
        ours = true_objective(p, partition(*p).cuts)
        assert theirs is not None and ours is not None
        assert ours <= theirs * (1 + ROUNDING), p
        better += ours < theirs * (1 - Fraction(1, 1000))
    assert better > 40


def test_too_few_units_names_both_numbers() -> None:
    with pytest.raises(TooFewUnits, match=r"2 units for 3 stages(.|\n)*to 2 or less"):
        partition([UnitCost("a", 1, 1), UnitCost("b", 1, 1)], [], [], stages=3, microbatches=1)


def test_memory_error_says_by_how_much() -> None:
    units = [UnitCost(str(i), 1.0, m) for i, m in enumerate((30.0, 20.0, 60.0, 10.0))]
    with pytest.raises(PlanError, match=r"need 70 bytes(.|\n)*5 too many(.|\n)*'2' with 60"):
        partition(units, [], [], 2, 4, memory_limit=65.0)
    assert partition(units, [], [], 2, 4, memory_limit=70.0).cuts == (0, 2)


def test_least_memory_equals_brute_force() -> None:
    for p in problems(200):
        sizes = [u.memory for u in p.units]
        ends = [(c, (*c[1:], len(sizes))) for c in all_cuts(len(sizes), p.stages)]
        truth = min(max(math.fsum(sizes[a:b]) for a, b in zip(c, e, strict=True)) for c, e in ends)
        assert least_memory(p.units, p.stages) == pytest.approx(truth, rel=1e-12), p


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": [UnitCost("bad", -1.0, 1.0)]}, "time of unit 'bad' is -1"),
        ({"units": [UnitCost("bad", 1.0, math.nan)]}, "memory of unit 'bad' is nan"),
        ({"units": [UnitCost("bad", math.inf, 1.0)]}, "time of unit 'bad' is inf"),
        ({"units": [UnitCost("bad", 1e-300, 1.0)], "edges": [Edge(0, (0,), 1e300)]}, "float64"),
        ({"edges": [Edge(0, (1,), 1.0)]}, "edge 0 names 1, but units are numbered 0 to 0"),
        ({"edges": [Edge(-1, (0,), 1.0)]}, "edge 0 names -1"),
        ({"edges": [Edge(0, (0,), math.nan)]}, "seconds of edge 0"),
        ({"ties": [Tie((7,), 1.0)]}, "tie 0 names 7"),
        ({"ties": [Tie((0,), -2.0)]}, "seconds of tie 0 is -2"),
        ({"stages": 0}, "stages=0"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"memory_weight": 1.5}, "memory_weight=1.5"),
        ({"memory_weight": math.nan}, "memory_weight=nan"),
        ({"memory_limit": -1.0}, "memory_limit is -1"),
    ],
)
@pytest.mark.parametrize("solve", [partition, partition_reference])
def test_meaningless_numbers_are_named(solve, change: dict[str, object], message: str) -> None:
    given = {"units": [UnitCost("a", 1.0, 1.0)], "edges": [], "ties": [], "stages": 1, "microbatches": 1}
    with pytest.raises(PlanError, match=message):
        solve(**(given | change))


def test_a_missing_core_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import smpar

    monkeypatch.delattr(smpar, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "smpar._native", None)
    with pytest.raises(NativeMissing, match="pip install -e"):
        partition([UnitCost("a", 1.0, 1.0)], [], [], stages=1, microbatches=1)


def test_imports_without_torch() -> None:
    rooms = "smpar.planner.partition, smpar.planner.reference, smpar._native"
    code = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
