"""Cluster files that people edit: whatever stands where something else should, the answer says what to change."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smpar.emulate import Emulation
from smpar.errors import SmparError
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.profile import Profile
from smpar.planner.search import search
from smpar.planner.space import Constraints
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


def test_parts_of_other_kinds_of_replicas_are_refused(seed: int) -> None:
    plan = some_plans(seed, pp=[2], dp=[2], tp=1).best
    assert plan.parts is not None
    for kinds in ((0, -1), (0, len(plan.parts.pipelines)), (0,)):
        with pytest.raises(SmparError, match="a plan's parts are those of its strategy"):
            Emulation.of(plan.strategy, dataclasses.replace(plan.parts, kinds=kinds))
