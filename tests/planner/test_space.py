"""The space of strategies: which degrees, schedules and placements there are, counted again by trying all numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from smpar.errors import PlanError, ScheduleNameError
from smpar.planner.cluster import Cluster, DeviceType, Link, Node
from smpar.planner.hardware import SMPAR
from smpar.planner.space import Constraints, Degrees, degrees, divisors, every_placement, placements, schedules
from smpar.planner.strategy import Strategy
from smpar.schedule import virtual_stages_of


def cluster(*counts: tuple[str, int]) -> Cluster:
    """A node for each (device type, devices)."""
    types = tuple(DeviceType(name, 16e9, 1e14, 9e11) for name in dict.fromkeys(name for name, _ in counts))
    link = Link(1e9, 1e-5)
    return Cluster(types, tuple(Node(f"n{n}", name, count, link, link) for n, (name, count) in enumerate(counts)))


def some_cluster(rng: random.Random, names: Sequence[str] = ("A", "B", "C")) -> Cluster:
    return cluster(*((rng.choice(names), rng.randint(1, 4)) for _ in range(rng.randint(1, 4))))


def test_divisors(seed: int) -> None:
    for number in (1, 2, 36, 97, random.Random(seed).randint(1, 5000)):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize("trial", range(5))
def test_degrees_are_all_that_cluster_batch_and_constraints_allow(trial: int, seed: int) -> None:
    rng = random.Random(f"{seed} {trial}")
    c, layers, batch = some_cluster(rng), rng.randint(1, 9), rng.choice((1, 6, 8, 12, 7))
    fixed: dict[str, Any] = {}
    for name in ("tp", "pp", "dp", "microbatch", "devices")[: 5 * (trial > 0)]:
        if rng.random() < 0.4:
            fixed[name] = rng.sample(range(1, 9), 5)
    allowed = Constraints.make(fixed)
    found = list(degrees(c, layers, (1, 2, 4), batch, allowed))
    groups = {tp: sum(node.count // tp for node in c.nodes) for tp in (1, 2, 4)}  # inside one node each
    every = itertools.product((1, 2, 4), range(1, c.size + 1), range(1, c.size + 1), range(1, batch + 1))
    expected = {
        Degrees(tp, pp, dp, size, batch // (dp * size))
        for tp, pp, dp, size in every
        if pp * dp <= groups[tp] and pp <= layers and batch % (dp * size) == 0
        and all(value in fixed.get(name, [value]) for name, value in
                (("tp", tp), ("pp", pp), ("dp", dp), ("microbatch", size), ("devices", tp * pp * dp)))
    }  # fmt: skip
    assert len(found) == len(set(found)) and set(found) == expected


def test_on_large_clusters_only_some_depths_are_tried() -> None:
    c = cluster(*[("A", 8)] * 16)
    depths = {d.pp for d in degrees(c, 40, (1,), 1, Constraints())}
    assert depths == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}


def test_schedules_of_a_pipeline(seed: int) -> None:
    everything = Constraints()
    assert list(schedules(1, 8, everything, SMPAR.schedules)) == [("1f1b", 1)], "one rank: all are the same"
    found = list(schedules(3, 9, everything, ("1f1b", "interleaved_1f1b", "zb", "zbv")))
    virtual = [("interleaved_1f1b", 2), ("interleaved_1f1b", 3)]
    assert found == [("1f1b", 1), *virtual, ("zb", 1), ("zbv", 2)], "never more stages than layers"
    assert list(schedules(5, 9, everything, SMPAR.schedules)) == [("1f1b", 1), ("zb", 1)]
    only = Constraints.make({"schedule": ["gpipe", "zbv"]})
    assert list(schedules(2, 9, only, SMPAR.schedules)) == [("gpipe", 1), ("zbv", 2)]
    assert list(schedules(1, 9, only, SMPAR.schedules)) == [("gpipe", 1)]
    assert list(schedules(1, 9, Constraints.make({"schedule": ["zbv", "zb"]}), SMPAR.schedules)) == [("zb", 1)]
    assert list(schedules(1, 9, Constraints.make({"schedule": "zbv"}), SMPAR.schedules)) == []
    five = Constraints.make({"virtual_stages": 5})
    assert list(schedules(2, 10, five, SMPAR.schedules)) == [("interleaved_1f1b", 5)]
    rng = random.Random(seed)
    for _ in range(50):
        names = tuple(rng.sample(("gpipe", "1f1b", "zb", "interleaved_1f1b", "zbv"), rng.randint(1, 3)))
        pp, layers, wanted = rng.randint(1, 5), rng.randint(5, 12), rng.choice((None, (1,), (2,), (1, 3)))
        for name, stages in schedules(pp, layers, Constraints(schedule=names, virtual_stages=wanted), SMPAR.schedules):
            assert name in names and pp * stages <= layers and (wanted is None or stages in wanted)
            assert virtual_stages_of(name) == stages or name == "interleaved_1f1b"


@pytest.mark.parametrize("trial", range(5))
def test_a_placement_puts_each_place_on_a_device_of_its_own(trial: int, seed: int) -> None:
    rng = random.Random(f"{seed} {trial}")
    for _ in range(10):
        c = some_cluster(rng)
        for d in degrees(c, 12, (1, 2, 4), 12, Constraints(microbatch=(1,))):
            found = placements(c, d.tp, d.pp, d.dp, {"A": 3.0, "B": 2.0, "C": 1.0})
            assert found and len(set(found)) == len(found)
            for devices in found:
                assert len(devices) == d.devices == len(set(devices)) and max(devices) < c.size
                s = Strategy(d.tp, d.pp, d.dp, 1, d.microbatches, "1f1b", 1, tuple(range(d.pp)), devices)
                for p, r in itertools.product(range(d.pp), range(d.dp)):
                    group = s.group(p, r)
                    assert len({c.node_of(device) for device in group}) == 1, "tensor parallelism inside a node"
                    assert group == tuple(s.place(p, r, t) for t in range(d.tp))


def test_the_drawing() -> None:
    """Two nodes of A, one of B, four devices each: every order of the types, stage by stage or replica by replica."""
    c = cluster(("A", 4), ("A", 4), ("B", 4))
    by_stage = placements(c, 1, 3, 4, {"A": 2.0, "B": 1.0})
    assert tuple(range(12)) in by_stage, "stages A A B"
    assert (8, 9, 10, 11, *range(8)) in by_stage, "stages B A A"
    by_replica = placements(c, 1, 4, 3, {"A": 2.0, "B": 1.0})
    assert (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11) in by_replica, "replicas A A B"
    part = cluster(("A", 1), ("B", 2))
    assert set(placements(part, 1, 2, 1, {"A": 2.0, "B": 1.0})) == {(0, 1), (1, 0), (1, 2)}, "with one B left out, too"
    assert placements(c, 1, 1, 1, {"A": 2.0, "B": 1.0}) == [(0,), (8,)], "either type alone"


@pytest.mark.parametrize("trial", range(3))
def test_every_placement_of_few_devices(trial: int, seed: int) -> None:
    """As many as sequences of nodes, where equal nodes are told apart by who comes first only."""
    rng = random.Random(f"{seed} {trial}")
    c = some_cluster(rng, ("A", "B"))
    for tp, slots in itertools.product((1, 2), (1, 2, 3, 4)):
        found = every_placement(c, tp, slots, 10**6)
        expected = set()
        for nodes in itertools.product(range(len(c.nodes)), repeat=slots):
            if all(nodes.count(n) <= c.nodes[n].count // tp for n in nodes):
                kinds = [(c.nodes[n].device, c.nodes[n].count) for n in nodes]
                first = [nodes.index(n) for n in nodes]
                expected.add((tuple(kinds), tuple(first)))
        assert len(found) == len(set(found)) == len(expected)
        assert all(len(set(devices)) == tp * slots for devices in found)
        assert all(c.same_node(d[k], d[k + tp - 1]) for d in found for k in range(0, tp * slots, tp))
        assert every_placement(c, tp, slots, len(found) - 1) == []


def test_all_orders_of_few_types_and_two_of_many() -> None:
    three = cluster(("A", 1), ("B", 1), ("C", 1))
    speed = {"A": 1.0, "B": 3.0, "C": 2.0}
    assert set(placements(three, 1, 3, 1, speed)) == set(itertools.permutations(range(3)))
    five = cluster(*((name, 1) for name in "ABCDE"))
    speed |= {"D": 5.0, "E": 4.0}
    assert placements(five, 1, 5, 1, speed) == [(3, 4, 1, 2, 0), (0, 2, 1, 4, 3)], "fastest first, slowest first"


def test_constraints_are_what_a_user_writes() -> None:
    made = Constraints.make({"tp": 1, "pp": [2, 4], "schedule": "zb", "shard_optimizer": False, "dp": range(1, 3)})
    expected = Constraints(tp=(1,), pp=(2, 4), schedule=("zb",), shard_optimizer=(False,), dp=(1, 2))
    assert made == expected and Constraints.make() == Constraints()
    assert made.allows("pp", 4) and not made.allows("pp", 3) and made.allows("microbatch", 77)
    assert str(replace(made, dp=None)) == "tp in [1], pp in [2, 4], schedule in ['zb'], shard_optimizer in [False]"
    assert str(Constraints()) == "none"


@pytest.mark.parametrize(
    ("fix", "found"),
    [
        ({"ppp": 2}, "did you mean 'pp'?"),
        ({"colour": 2}, "remove 'colour'"),
        ({"tp": 0}, "tp=0"),
        ({"pp": 2.5}, "a whole number, 1 or more"),
        ({"dp": True}, "dp=True"),
        ({"dp": [1, "2"]}, "dp='2'"),
        ({"microbatch": []}, "no value"),
        ({"recompute": "some"}, '"none" or "full"'),
        ({"recompute": True}, "recompute=True"),
        ({"shard_optimizer": 1}, "True or False"),
        ({"schedule": 4}, "a name"),
    ],
)
def test_wrong_constraints(fix: dict[str, Any], found: str) -> None:
    with pytest.raises(PlanError) as error:
        Constraints.make(fix)
    assert found in str(error.value) and error.value.fix


def test_an_unknown_schedule() -> None:
    with pytest.raises(ScheduleNameError, match="1f1b"):
        Constraints.make({"schedule": "1f1bb"})
