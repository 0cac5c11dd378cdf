"""Files that people edit: whatever stands where something else should, the answer is an error with what to change."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smpar.emulate import Emulation
from smpar.errors import PlanFileError, ProfileError, SmparError
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.plans import Plan
from smpar.planner.profile import Profile
from smpar.planner.search import search
from smpar.planner.space import Constraints
from smpar.runtime.plan_file import with_plan
from tests.planner.sample_plans import some_cluster, some_plans, some_profile

WRONG = (None, "x", "", -1, 0, 1.5, math.nan, math.inf, 1e300, 10**9, 10**30, True, [], [1], [None], [[]], {"a": 1})
GONE = object()


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a tree of a file; of a list only the first two and the last, the others are alike."""
    if at:
        yield at
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*at, key))
    elif isinstance(tree, list):
        for i in sorted({*range(min(len(tree), 2)), len(tree) - 1} - {-1}):
            yield from places(tree[i], (*at, i))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(tree)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return made


def edited(draw: random.Random, tree: Any, count: int) -> Iterator[tuple[str, Any]]:
    """The tree with a wrong value at one place, by chance; each place at least once if there are so many."""
    everywhere = list(places(tree))
    draw.shuffle(everywhere)
    for i in range(count):
        at, value = everywhere[i % len(everywhere)], draw.choice([*WRONG, GONE])
        yield f"{at} = {'removed' if value is GONE else repr(value)}", changed(tree, at, value)


def plain(made: Any) -> Any:
    return json.loads(json.dumps(made))


def use_plan(given: Any) -> None:
    plan = Plan.from_dict(given)
    assert math.isfinite(plan.samples_per_second) and len(plan.stage_of_layer) == len(plan.layers)
    with_plan({"plan": plan})
    if plan.parts is not None and plan.strategy.microbatches < 1000:
        assert Emulation.of(plan.strategy, plan.parts).orders


def planned(profile: Profile, cluster: Cluster) -> None:
    for plan in search(CostModel(profile, cluster), 4, Constraints.make({"tp": 1}), 2):
        assert 0 < plan.prediction.seconds < math.inf and min(plan.prediction.memory) > 0


def survives(use: Callable[[Any], None], what: str, given: Any) -> bool:
    """Whether it is accepted; anything but that, and an error with a fix, fails."""
    try:
        use(given)
    except SmparError as error:
        assert error.fix, what
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return True


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_edited_plans(seed: int, schedule: str) -> None:
    tree = plain(some_plans(seed, pp=[2], schedule=[schedule], tp=1).best.to_dict())
    use_plan(tree)
    accepted = [survives(use_plan, what, given) for what, given in edited(random.Random(seed), tree, 400)]
    assert not all(accepted)


def test_edited_profiles(seed: int) -> None:
    draw = random.Random(seed)
    tree, cluster = plain(some_profile(draw, 5).to_dict()), some_cluster(draw)
    use = lambda given: planned(Profile.from_dict(given), cluster)  # noqa: E731
    use(tree)
    assert not all([survives(use, what, given) for what, given in edited(draw, tree, 150)])


def test_edited_clusters(seed: int) -> None:
    draw = random.Random(seed)
    profile, cluster = some_profile(draw, 5), some_cluster(draw)

    def use(given: Any) -> None:
        read = Cluster.from_dict(given)
        assert read.size <= 2**17
        if read.size <= 16:
            planned(profile, Cluster.from_dict(read.to_dict()))

    use(cluster.to_dict())
    assert not all([survives(use, what, given) for what, given in edited(draw, cluster.to_dict(), 100)])


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (("strategy", "devices", 0), -1, "one device of its cluster for each place"),
        (("strategy", "devices", 0), 99, "one device of its cluster for each place"),
        (("strategy", "microbatches"), 0, "strategy.microbatches is a whole number from 1"),
        (("strategy", "cuts", 1), 99, "cuts its layers"),
        (("strategy", "cuts", 1), "4", "strategy.cuts[1] is a whole number\n  found: '4' (str)"),
        (("strategy", "schedule"), "1f2b", "1f2b"),
        (("strategy", "schedul"), "1f1b", "did you mean 'schedule'?"),
        (("layers", 1), "h.1", "'h.1' of 12"),
        (("prediction", "seconds"), math.nan, "prediction.seconds is a finite number"),
        (("prediction", "stages"), [], "0 of 2 stages"),
        (("strategy",), GONE, "no 'strategy'"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_plan_is_said(seed: int, at: tuple[Any, ...], value: Any, said: str) -> None:
    tree = plain(some_plans(seed, pp=[2], dp=[1], schedule=["1f1b"], tp=1).best.to_dict())
    with pytest.raises(PlanFileError) as error:
        Plan.from_dict(changed(tree, at, value))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (("times", 0, "forward", 0, 2), math.nan, "a profile.times[0].forward[0][2] is a finite number"),
        (("times", 0, "forward", 0), [1.0], "every layer needs a cost"),
        (("times", 0, "device"), "slow", "one table of times for each"),
        (("times", 0, "tp"), "1", "tp is a whole number\n  found: '1' (str)"),
        (("layers", 1, "saved"), -1, "saved of layer 'h.0' is -1"),
        (("layers", 1, "whole_parameters"), 1e12, "a part of parameters"),
        (("tied", 0, "parameters"), 1e12, "count in each layer"),
        (("tensors", 0, "targets"), 1, "targets is a list"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_profile_is_said(seed: int, at: tuple[Any, ...], value: Any, said: str) -> None:
    tree = plain(some_profile(random.Random(seed)).to_dict())
    with pytest.raises(ProfileError) as error:
        Profile.from_dict(changed(tree, at, value))
    assert said in str(error.value)


def test_parts_of_other_kinds_of_replicas_are_refused(seed: int) -> None:
    plan = some_plans(seed, pp=[2], dp=[2], tp=1).best
    assert plan.parts is not None
    for kinds in ((0, -1), (0, len(plan.parts.pipelines)), (0,)):
        with pytest.raises(SmparError, match="a plan's parts are those of its strategy"):
            Emulation.of(plan.strategy, dataclasses.replace(plan.parts, kinds=kinds))
