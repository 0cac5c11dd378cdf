"""Plans: the file that a run reads, what a broken one is told, and why runners-up lost."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smpar.errors import PlanError, PlanFileError
from smpar.planner.plans import Plan, Plans, explain
from tests.planner.sample_plans import some_plans


@pytest.fixture
def plans(seed: int) -> Plans:
    return some_plans(seed, pp=[2, 3, 4])


def test_what_is_written_is_read_back(plans: Plans, tmp_path: Path) -> None:
    for plan in plans:
        plan.save(tmp_path / "plan.json")
        assert Plan.from_file(tmp_path / "plan.json") == plan
        bare = replace(plan, parts=None)
        assert Plan.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


def test_layers_are_on_their_stages(plans: Plans) -> None:
    plan = plans.best
    cuts = plan.strategy.cuts
    drawn = [stage for stage, cut in enumerate(cuts) for _ in range(cut, (*cuts[1:], 12)[stage])]
    assert plan.stage_of_layer == tuple(drawn)
    assert plan.samples_per_second == 16 / plan.prediction.seconds


def test_all_plans_as_json(plans: Plans) -> None:
    given = json.loads(json.dumps(plans.to_dict()))
    assert [Plan.from_dict(plan) for plan in given["plans"]] == list(plans)
    assert given["complete"] is True and given["counts"] == dict(plans.counts)
    assert {int(n): s for n, s in given["frontier"].items()} == plans.frontier
    assert str(plans).count("\n") == len(plans) - 1 and str(plans).startswith(f"1. {plans.best.strategy}: ")


def test_a_runner_up_says_what_it_loses(plans: Plans) -> None:
    assert plans.best.why == ""
    assert plans.model is not None
    for plan in plans[1:]:
        percent = 100 * (plan.prediction.seconds / plans.best.prediction.seconds - 1)
        assert plan.why == explain(plans.model, plans.best, plan)
        assert plan.why == "" if percent <= 0 else plan.why.startswith(f"+{percent:.1f} %: ")


def test_no_plan(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"smpar_plan": 1')
    for name in ("cut.json", "none.json"):
        with pytest.raises(PlanFileError, match="a plan is a JSON file"):
            Plan.from_file(tmp_path / name)
    given: Any
    for given in ([], None, "plan", 3, {}, {"smpar_plan": 2}, {"smpar_plan": None}):
        with pytest.raises(PlanFileError, match="`smpar_plan`: 1") as error:
            Plan.from_dict(given)
        assert "smpar plan" in error.value.fix


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("strategy.pp", 5, "for 5 stages"),
        ("strategy.pp", 0, "pp"),
        ("strategy.tp", 1.5, "tp"),
        ("strategy.dp", True, "dp"),
        ("strategy.microbatch", 0, "microbatch"),
        ("strategy.microbatches", "4", "microbatches"),
        ("strategy.schedule", "1f1bb", "1f1bb"),
        ("strategy.schedule", 3, "schedule"),
        ("strategy.virtual_stages", 7, "for 14 stages"),
        ("strategy.cuts", [], "cuts"),
        ("strategy.cuts", [1, 2], "cuts (1, 2)"),
        ("strategy.cuts", [0, 0], "cuts (0, 0)"),
        ("strategy.cuts", [0, 99], "of 12 layers"),
        ("strategy.cuts", [0, "a"], "cuts"),
        ("strategy.devices", [0], "1 different devices"),
        ("strategy.devices", [0, 0], "1 different devices"),
        ("strategy.devices", [0, 99], "99"),
        ("strategy.devices", [0, -1], "-1"),
        ("strategy.recompute", [True], "recompute"),
        ("strategy.recompute", ["yes", "no"], "recompute"),
        ("strategy.shard_optimizer", "no", "shard_optimizer"),
        ("strategy.colour", "red", "colour"),
        ("strategy", None, "`strategy` of a plan is an object"),
        ("layers", [], "cuts"),
        ("layers", "h0", "layers"),
        ("layers", [1] * 12, "layers"),
        ("prediction.seconds", -1, "seconds"),
        ("prediction.seconds", "fast", "seconds"),
        ("prediction.seconds", 0, "seconds"),
        ("prediction.memory", [1.0], "memory"),
        ("prediction.limits", ["much", "more"], "limits"),
        ("prediction.stages", 2, "stages"),
        ("prediction.stages", [], "stages"),
        ("cluster.nodes", [], "`nodes` is a list of at least one"),
        ("parts.kinds", 3, "not iterable"),
        ("parts.tied", [[1, 2, 3]], "too many values"),
        ("parts.reductions", [], "reductions"),
        ("parts.steps", ["a", "b"], "steps"),
    ],
)
def test_a_broken_part(path: str, value: Any, found: str, seed: int) -> None:
    given = some_plans(seed, pp=2, dp=1, tp=1, schedule="1f1b", keep=1).best.to_dict()
    given = json.loads(json.dumps(given))
    at, (*keys, last) = given, path.split(".")
    for key in keys:
        at = at[key]
    at[last] = value
    with pytest.raises(PlanError) as error:
        Plan.from_dict(given)
    assert found in str(error.value) and error.value.fix


def places(given: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in nested data."""
    inside = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from places(value, (*path, key))


def test_a_part_that_is_missing(seed: int) -> None:
    given = some_plans(seed, keep=1).best.to_dict()
    for name in ("strategy", "layers", "cluster", "prediction"):
        with pytest.raises(PlanFileError, match=f"no '{name}'"):
            Plan.from_dict({key: value for key, value in given.items() if key != name})


@pytest.mark.parametrize("trial", range(3))
def test_any_change_is_read_or_refused_with_an_error_of_ours(trial: int, seed: int) -> None:
    """A value taken away or replaced, anywhere: never another error than smpar's."""
    rng = random.Random(f"{seed} {trial}")
    given = json.loads(json.dumps(some_plans(seed, keep=1).best.to_dict()))
    every = list(places(given))
    for path in rng.sample(every, min(120, len(every))):
        broken = copy.deepcopy(given)
        at = broken
        for key in path[:-1]:
            at = at[key]
        value = rng.choice((None, [], {}, "x", -1, 0, 2.5, True, [[1]], del_))
        if value is del_:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        try:
            plan = Plan.from_dict(broken)
        except PlanError as error:
            assert error.fix
        else:
            assert Plan.from_dict(plan.to_dict()) == plan
            str(Plans((plan,), {}, {}, 0.0)), plan.stage_of_layer, plan.samples_per_second, plan.prediction.fits


del_ = object()
