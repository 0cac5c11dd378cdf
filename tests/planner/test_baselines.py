"""What others would choose: AMP's published predictions, cuts worked by hand, and that our search is never worse."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smpar.errors import PlanError
from smpar.planner.amp_form import AmpCosts, amp_cuts, amp_seconds
from smpar.planner.baselines import ALL, BASELINES, megatron, megatron_least, smp, uniform
from smpar.planner.cluster import Cluster, DeviceType, Link, Node
from smpar.planner.cost import CostModel
from smpar.planner.hardware import GIB, SMPAR, Runtime
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times
from smpar.planner.search import search
from smpar.planner.smp_tree import Tree, min_max_segments, tree
from smpar.planner.space import Constraints
from smpar.planner.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from benches._amp import Experiment, experiments
from benches._fit import Constants, amp_scored, scored

PRINTED = 6e-5
"""AMP prints four decimals."""
PLAIN = replace(SMPAR, fixed=0.0, message_seconds=0.0, nic=1.0, intra=1.0)


@pytest.fixture(scope="module")
def published() -> dict[str, Experiment]:
    return {e.name: e for e in experiments()}


def cluster(*nodes: tuple[str, int], memory: float = 16.0, nic: float = 1e9) -> Cluster:
    """Nodes of (device type, count)."""
    types = {name: DeviceType(name, memory * GIB, 1e14, 1e12) for name, _ in nodes}
    links = Link(1e10, 1e-6), Link(nic, 1e-5)
    return Cluster(tuple(types.values()), tuple(Node(f"node of {name}", name, n, *links) for name, n in nodes))


def model(
    seconds: list[float],
    machines: Cluster,
    parameters: float = 1e6,
    saved: float = 1e6,
    elements: float = 1e5,
    slower: float = 2.0,
    runtime: Runtime = PLAIN,
    names: list[str] | None = None,
) -> CostModel:
    """A chain whose layers take so many seconds forward, and twice as many backward; each further type is slower."""
    size = len(seconds)
    layers = tuple(Layer(names[i] if names else f"layer.{i}", parameters, saved, output=elements) for i in range(size))
    tensors = tuple(Tensor(i, (i + 1,), elements) for i in range(size - 1))
    times = []
    for k, device in enumerate(machines.types):
        for tp in (1, 2, 4):
            rows = [[t * slower**k * (0.2 + m * (0.8 / tp + 0.1 * (tp > 1))) for t in seconds] for m in (1, 16)]
            forward = tuple(tuple(row) for row in rows)
            backward = tuple(tuple(2 * t for t in row) for row in rows)
            times.append(Times(device.name, tp, (1, 16), forward, backward))
    profile = Profile(layers, tensors, tuple(times), (Tied((0, size - 1), parameters / 2),))
    return CostModel(profile, machines, runtime)


# ---- AMP ------------------------------------------------------------------------------------------------------


def test_the_closed_form_gives_all_of_amps_published_predictions(published: dict[str, Experiment]) -> None:
    assert {name: len(e.trials) for name, e in published.items()} == {"homogeneous": 52, "transgan": 65}
    for e in published.values():
        for trial in e.trials:
            found = amp_seconds(e.amp, e.cluster, trial.strategy)
            assert found == pytest.approx(trial.predicted, abs=PRINTED), trial.strategy


def test_its_cuts_are_never_worse_than_those_that_amp_found(published: dict[str, Experiment]) -> None:
    for e in published.values():
        for trial in e.trials:
            cuts = amp_cuts(e.amp, e.cluster, trial.strategy)
            assert cuts is not None
            found = amp_seconds(e.amp, e.cluster, replace(trial.strategy, cuts=cuts))
            assert found <= trial.predicted + PRINTED, trial.strategy


def test_its_cuts_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        size, pp, dp = rng.randint(2, 8), rng.randint(1, 4), rng.choice((1, 2, 4))
        if pp > size:
            continue
        machines = cluster(*((rng.choice("ab"), 4) for _ in range(4)))
        costs = AmpCosts(
            {(name, 1): tuple(rng.uniform(0.0, 1.0) for _ in range(size)) for name in "ab"},
            tuple(rng.choice((0.0, 1e8 * rng.random())) for _ in range(size)),
            tuple(rng.choice((1e5, 1e8)) for _ in range(size)),
            (False,) * size,
            tuple(range(1, size)),
            (Tied((0, size - 1), 5e6),),
        )
        devices = tuple(rng.sample(range(16), pp * dp))
        strategy = Strategy(1, pp, dp, 1, rng.randint(1, 9), "1f1b", 1, tuple(range(pp)), devices)
        every = [replace(strategy, cuts=(0, *rest)) for rest in itertools.combinations(range(1, size), pp - 1)]
        cuts = amp_cuts(costs, machines, strategy)
        assert cuts is not None
        best = min(amp_seconds(costs, machines, s) for s in every)
        assert amp_seconds(costs, machines, replace(strategy, cuts=cuts)) == pytest.approx(best, rel=1e-9)


def test_the_cost_model_ranks_amps_trials_better_than_amp(published: dict[str, Experiment]) -> None:
    """The targets: rank correlation, mean relative error, and no first choices that did not run."""
    for name, rank in (("homogeneous", 0.97), ("transgan", 0.93)):
        ours, (theirs, _) = scored(published[name], Constants()), amp_scored(published[name])
        assert ours.spearman >= rank > theirs.spearman
        assert ours.mare <= 0.10 < theirs.mare
        assert ours.regret <= 1.05
        assert ours.oom == 0
        assert ours.feasible >= 0.95


# ---- rules ----------------------------------------------------------------------------------------------------


def test_megatrons_rule_by_hand() -> None:
    """Two nodes of four, and a model of 8 x 2e8 parameters of 16 bytes: 23.8 GiB.

    A whole node's tensor parallelism leaves 6.0 GiB on each device; so the nodes are replicas, if a device has 8 GiB.
    If it has 4, two stages of four layers are needed, with 3.0 GiB each; if it has 2, nothing here is enough.
    """
    fits = model([1e-3] * 8, cluster(("a", 4), ("a", 4), memory=8.0), parameters=2e8)
    found = megatron(fits, 16, ALL)
    assert (found.tp, found.pp, found.dp, found.cuts) == (4, 1, 2, (0,))
    assert found.devices == tuple(range(8))
    small = model([1e-3] * 8, cluster(("a", 4), ("a", 4), memory=4.0), parameters=2e8)
    found = megatron(small, 16, Constraints(schedule=("1f1b",)))
    assert (found.tp, found.pp, found.dp, found.cuts) == (4, 2, 1, (0, 4))
    with pytest.raises(PlanError, match="megatron has none"):
        megatron(model([1e-3] * 8, cluster(("a", 4), ("a", 4), memory=2.0), parameters=2e8), 16, ALL)


def test_the_least_model_parallelism_is_narrow_where_that_fits() -> None:
    machines = cluster(("a", 4), ("a", 4), memory=16.0)
    found = megatron_least(model([1e-3] * 8, machines, parameters=2e8), 16, ALL)
    assert (found.tp, found.pp, found.dp) == (2, 1, 4)  # 11.9 GiB on each device
    found = megatron_least(model([1e-3] * 8, machines, parameters=1e8), 16, ALL)
    assert (found.tp, found.pp, found.dp) == (1, 1, 8)


def test_uniform_cuts_are_equal_numbers_of_layers(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(6, 20)
    case = model([rng.uniform(1e-3, 5e-3) for _ in range(size)], cluster(("a", 4), ("a", 4), nic=1e7), parameters=1e7)
    found = uniform(case, 16, Constraints(pp=(4, 5, 6)))
    sizes = [b - a for a, b in zip(found.cuts, (*found.cuts[1:], size), strict=True)]
    assert found.pp in (4, 5, 6)
    assert len(sizes) == found.pp
    assert max(sizes) - min(sizes) <= 1


def test_smp_cuts_by_the_tree_of_names() -> None:
    """Of 4 devices all go to the body of six blocks, by D'Hondt: 6, 3, 2 and 1.5 beat the ends' 1.

    ::

        embed  h.0 | h.1 | h.2 h.3 | h.4 h.5  head
    """
    names = ["embed", *(f"h.{i}" for i in range(6)), "head"]
    case = model([1e-3] * 8, cluster(("a", 4)), names=names)
    assert tree(names, [1.0] * 8) == Tree(8.0, (Tree(1.0), Tree(6.0, (Tree(1.0),) * 6), Tree(1.0)))
    found = smp(case, 16, Constraints(pp=(4,), dp=(1,), tp=(1,)))
    assert found.cuts == (0, 2, 3, 5)


def test_dearest_segments_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        costs = [float(rng.randint(0, 6)) if rng.random() < 0.5 else rng.random() for _ in range(rng.randint(1, 9))]
        count = rng.randint(1, len(costs))
        options = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), count - 1)]
        dearest = {c: max(sum(costs[a:b]) for a, b in zip(c, (*c[1:], len(costs)), strict=True)) for c in options}
        assert min_max_segments(costs, count) == min(options, key=dearest.__getitem__)


# ---- all of them -----------------------------------------------------------------------------------------------


def test_our_search_is_never_worse(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        machines = cluster(
            *((rng.choice("ab"), rng.choice((2, 4))) for _ in range(2)), nic=rng.choice((1e8, 1e9)), memory=12.0
        )
        seconds = [rng.choice((1e-3, 1e-3, 5e-3)) * rng.uniform(0.5, 1.5) for _ in range(rng.randint(6, 12))]
        case = model(seconds, machines, parameters=rng.choice((1e6, 2e7)), slower=rng.choice((1.5, 3.0)))
        ours = search(case, 8).best.prediction.seconds
        for name, choose in BASELINES.items():
            chosen = case.predict(choose(case, 8, ALL))
            assert chosen.fits
            assert chosen.seconds >= ours * (1 - 1e-9), name


def test_a_baseline_keeps_the_constraints(seed: int) -> None:
    rng = random.Random(seed)
    case = model([1e-3] * 8, cluster(("a", 4), ("a", 4)))
    fixed = {"pp": rng.choice((1, 2)), "tp": rng.choice((1, 2, 4)), "microbatch": rng.choice((1, 2))}
    for name, choose in BASELINES.items():
        found = choose(case, 16, Constraints.make(fixed))
        assert {key: getattr(found, key) for key in fixed} == fixed, name


def test_a_baseline_that_may_not_do_anything_says_so() -> None:
    case = model([1e-3] * 4, cluster(("a", 4)))
    for choose in BASELINES.values():
        with pytest.raises(PlanError, match="constraints: pp in"):
            choose(case, 8, Constraints(pp=(17,)))
