"""The search: against trying everything, and what it says when there is nothing to find."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from smpar.errors import PlanError, ProfileError, SmparError
from smpar.planner.cost import CostModel
from smpar.planner.hardware import SMPAR
from smpar.planner.plans import Plans
from smpar.planner.profile import Profile
from smpar.planner.search import search
from smpar.planner.space import Constraints
from tests.planner.exhaustive import best_of_all, small_cluster, small_profile
from tests.planner.sample_plans import some_cluster, some_profile

ROOMY = replace(SMPAR, reserve=0.0)
SHAPES = (
    (("fast", 2), ("fast", 2)),
    (("fast", 2), ("slow", 2)),
    (("fast", 1), ("slow", 2)),
    (("fast", 3),),
    (("slow", 1), ("fast", 2)),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "+".join(f"{n}{name}" for name, n in shape))
@pytest.mark.parametrize(("memory", "loses"), [(64e9, 0.01), (6e9, 0.25)], ids=["roomy", "tight"])
def test_nothing_is_much_faster(shape: Any, memory: float, loses: float, seed: int) -> None:
    """Every placement, schedule, cut, microbatch and way to save memory of small models.

    Where memory is tight, which stages recompute is decided greedily: of some hundred small models one lost 11 %.
    """
    rng = random.Random(seed)
    layers = rng.randint(3, 5)
    model = CostModel(small_profile(rng, layers, rng.choice(((1,), (1, 2)))), small_cluster(rng, shape, memory), ROOMY)
    batch = rng.choice((4, 6))
    best, strategy = best_of_all(model, batch, model.runtime.schedules)
    if strategy is None:
        with pytest.raises(PlanError, match="lacks"):
            search(model, batch)
        return
    found = search(model, batch).best
    assert found.prediction.seconds <= (1 + loses) * best, f"{strategy} {strategy.cuts} {strategy.devices}"
    assert found.prediction.seconds >= best * (1 - 1e-9), "all were tried"


@pytest.fixture
def model(seed: int) -> CostModel:
    rng = random.Random(seed)
    return CostModel(some_profile(rng), some_cluster(rng))


def test_plans_are_sorted_fit_and_are_what_the_model_says(model: CostModel) -> None:
    plans = search(model, 12, keep=6)
    assert plans.complete and 1 <= len(plans) <= 6 and plans.model is model
    seconds = [plan.prediction.seconds for plan in plans]
    assert seconds == sorted(seconds)
    kinds = set()
    for plan in plans:
        s = plan.strategy
        assert plan.prediction == model.predict(s) and plan.prediction.fits
        assert s.global_batch == 12 and plan.layers == tuple(layer.name for layer in model.profile.layers)
        assert plan.parts == model.parts(s)
        kinds.add((s.tp, s.pp, s.dp, s.microbatch, s.schedule, s.virtual_stages))
    assert len(kinds) == len(plans), "they differ in more than cuts and placement"


@pytest.mark.parametrize(
    "fix",
    [
        {"pp": 2, "schedule": "zb"},
        {"dp": [1, 2], "microbatch": 2},
        {"devices": 3},
        {"schedule": ["gpipe", "zbv"], "pp": [2, 3]},
        {"virtual_stages": 3, "schedule": "interleaved_1f1b", "pp": 2},
        {"recompute": "full", "pp": 2},
        {"shard_optimizer": True},
        {"recompute": "none", "shard_optimizer": False, "tp": 1},
    ],
    ids=str,
)
def test_constraints_are_kept(fix: dict[str, Any], model: CostModel) -> None:
    allowed = Constraints.make(fix)
    for plan in search(model, 12, allowed):
        s = plan.strategy
        assert all(allowed.allows(n, getattr(s, n)) for n in ("tp", "pp", "dp", "microbatch", "virtual_stages"))
        assert allowed.allows("schedule", s.schedule) and allowed.allows("shard_optimizer", s.shard_optimizer)
        assert allowed.allows("devices", len(s.devices))
        assert all(allowed.allows("recompute", "full" if s.recomputes(k) else "none") for k in range(s.stages))


def test_the_frontier_is_the_best_of_each_number_of_devices(model: CostModel) -> None:
    plans = search(model, 12, keep=100)
    for devices, seconds in plans.frontier.items():
        alone = search(model, 12, Constraints(devices=(devices,))).best.prediction.seconds
        assert alone <= 1.01 * seconds, "a search for so many devices only looks closer"
        assert seconds <= 1.1 * alone
    for (tp, pp, dp), seconds in plans.degrees.items():
        assert plans.frontier[tp * pp * dp] <= seconds
    assert min(plans.frontier.values()) == min(plans.degrees.values()) == plans.best.prediction.seconds
    for plan in plans:
        assert plans.frontier[len(plan.strategy.devices)] <= plan.prediction.seconds


def test_progress_is_told_and_an_interrupt_keeps_the_best_so_far(model: CostModel) -> None:
    told: list[tuple[int, int, float]] = []
    whole = search(model, 12, progress=lambda *now: told.append(now))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    best = [seconds for _, _, seconds in told]
    assert best == sorted(best, reverse=True) and best[0] == float("inf") and len({n for _, n, _ in told}) == 1
    assert whole.best.prediction.seconds <= best[-1]

    def stop(after: int) -> Plans:
        left = iter(range(after))

        def progress(done: int, count: int, seconds: float) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        return search(model, 12, progress=progress)

    part = stop(3)
    assert not part.complete and part.best.prediction.seconds >= whole.best.prediction.seconds * (1 - 1e-9)
    assert part.best.prediction.seconds <= told[3][2]
    with pytest.raises(KeyboardInterrupt):
        stop(0)


def test_what_does_not_fit_is_said_with_bytes_and_help(model: CostModel) -> None:
    cluster = model.cluster
    tiny = replace(cluster, types=tuple(replace(t, memory_bytes=1e8) for t in cluster.types))
    small = CostModel(model.profile, tiny, ROOMY)
    with pytest.raises(PlanError) as error:
        search(small, 8, Constraints.make({"pp": 1, "dp": 1, "microbatch": 2, "shard_optimizer": False}))
    layers = model.profile.layers
    state = 16 * (sum(x.parameters for x in layers) - model.profile.tied[0].parameters)
    # the best that one device can do: recompute all, keep nothing before the only stage
    lacks = state + 2 * (sum(x.saved for x in layers) + max(x.transient for x in layers)) - 1e8
    assert f"lacks {lacks / 2**30:.2f} GiB" in str(error.value)
    for word in ("shard_optimizer", "smaller microbatches", "more devices"):
        assert word in error.value.fix
    with pytest.raises(PlanError, match='recompute "full"'):
        search(small, 8, Constraints.make({"recompute": "none"}))
    freed = replace(cluster, types=tuple(replace(t, memory_bytes=1e8 + lacks + 1) for t in cluster.types))
    search(CostModel(model.profile, freed, ROOMY), 8, Constraints.make({"pp": 1, "dp": 1, "microbatch": 2}))


@pytest.mark.parametrize(
    ("fix", "batch"),
    [
        ({"tp": 3}, 8),
        ({"pp": 50}, 8),
        ({"dp": 5}, 8),
        ({"microbatch": 3}, 8),
        ({"devices": 1000}, 8),
        ({"pp": 2, "dp": 2, "devices": 3}, 8),
        ({"pp": 1, "schedule": "zbv"}, 8),
        ({"pp": 1, "schedule": "1f1b", "virtual_stages": 4}, 8),
        ({"pp": 3, "schedule": "interleaved_1f1b", "virtual_stages": 7}, 8),
        ({"shard_optimizer": True, "dp": 1}, 8),
    ],
    ids=str,
)
def test_impossible_constraints(fix: dict[str, Any], batch: int, model: CostModel) -> None:
    with pytest.raises(PlanError, match="some degrees keep the constraints") as error:
        search(model, batch, Constraints.make(fix))
    assert next(iter(fix)) in error.value.values and "relax the constraints" in error.value.fix


@pytest.mark.parametrize("name", ["list", "fill_drain"])
def test_a_schedule_that_is_not_simulated(name: str, model: CostModel) -> None:
    with pytest.raises(SmparError, match=name):
        search(model, 8, Constraints.make({"schedule": name, "pp": 2}))


@pytest.mark.parametrize("batch", [0, -4, 2.0, True, "8"])
def test_a_batch_that_is_none(batch: Any, model: CostModel) -> None:
    with pytest.raises(PlanError, match="global batch is a whole number"):
        search(model, batch)


def test_devices_without_times(model: CostModel) -> None:
    """They are left out; if nothing is left, that is said."""
    profile = model.profile
    only = replace(profile, times=tuple(t for t in profile.times if t.device == "slow"))
    for plan in search(CostModel(only, model.cluster), 8):
        assert {model.cluster.type_of(device).name for device in plan.strategy.devices} == {"slow"}
    other = replace(profile, times=(replace(profile.times[0], device="H100"),))
    with pytest.raises(PlanError, match="H100") as error:
        search(CostModel(other, model.cluster), 8)
    assert "profile the model on these devices" in error.value.fix
    with pytest.raises(ProfileError, match="every layer needs a cost"):
        replace(profile, layers=(*profile.layers, profile.layers[0]))


def test_a_model_that_takes_no_time() -> None:
    rng = random.Random(0)
    p = some_profile(rng)
    rows = tuple((0.0,) * p.size for _ in (1, 2))
    nothing = replace(p, times=tuple(replace(t, forward=rows, backward=rows, weight=rows) for t in p.times))
    assert isinstance(nothing, Profile)
    assert search(CostModel(nothing, some_cluster(rng)), 8).best.prediction.seconds > 0.0
