"""Messages and rings on the cards and links of a cluster, counted again one by one over all pairs of devices."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from smpar.planner.cluster import Cluster, DeviceType, Link, Matrix, Node
from smpar.planner.hardware import SMPAR
from smpar.planner.network import FREE, Network, Wiring

PLAIN = replace(SMPAR, nic=1.0, intra=1.0, message_seconds=0.0, reserve=0.0)
"""A runtime that reaches what links are said to do."""
WHOLE = {"fast": 1.0, "slow": 3.0}


def cluster(rng: random.Random, nodes: int, nics: Sequence[int] = (1, 2)) -> Cluster:
    """Nodes of 1 to 4 devices of two types, with different links and one card or two."""
    types = (DeviceType("fast", 16e9, 1e14, 9e11), DeviceType("slow", 8e9, 4e13, 3e11))
    made = []
    for n in range(nodes):
        count = rng.randint(1, 4)
        links = Link(rng.uniform(5e9, 5e10), rng.random()), Link(rng.uniform(1e8, 3e9), rng.random())
        made.append(Node(f"n{n}", rng.choice(types).name, count, *links, min(count, rng.choice(nics))))
    return Cluster(types, tuple(made))


def degrees(rng: random.Random, size: int) -> tuple[int, int]:
    """Random (pp, dp) of at most `size` devices."""
    pp = rng.randint(1, size)
    return pp, rng.randint(1, size // pp)


def counted_way(c: Cluster, pairs: Sequence[tuple[int, int]], one: tuple[int, int]) -> tuple[float, float]:
    """Per byte and latency of one message among those of `pairs`, all under way at once."""
    a, b = one
    if c.same_node(a, b):
        return 1 / c.link(a, b).bandwidth, c.link(a, b).latency
    outgoing = incoming = 0
    for x, y in pairs:
        if not c.same_node(x, y):
            outgoing += c.nic_of(x) == c.nic_of(a)
            incoming += c.nic_of(y) == c.nic_of(b)
    return max(outgoing, incoming) / c.link(a, b).bandwidth, c.link(a, b).latency


def counted_rings(c: Cluster, rings: Sequence[Sequence[int]]) -> list[float]:
    """Seconds per byte of each ring; devices of a node are neighbours in it, and its nodes follow each other."""
    order = [sorted(ring) for ring in rings]
    users = defaultdict(set)  # card -> the rings that pass it
    for k, ring in enumerate(order):
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            if not c.same_node(a, b):
                users[c.nic_of(a)].add(k)
                users[c.nic_of(b)].add(k)
    found = []
    for ring in order:
        slowest = 0.0
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            if a != b:
                share = 1 if c.same_node(a, b) else max(len(users[c.nic_of(a)]), len(users[c.nic_of(b)]))
                slowest = max(slowest, share / c.link(a, b).bandwidth)
        found.append(slowest * 2 * (len(ring) - 1) / len(ring))
    return found


def test_two_replicas_share_one_card() -> None:
    """::

    node 0 [stage 0: replicas 0, 1] ══▶ node 1 [stage 1: replicas 0, 1]
    """
    types = (DeviceType("fast", 16e9, 1e14, 9e11),)
    one = Cluster(types, tuple(Node(f"n{n}", "fast", 2, Link(1e10, 1e-6), Link(1e9, 1e-5)) for n in (0, 1)))
    net = Wiring(one, PLAIN).network(1, 2, 2, (0, 1, 2, 3), WHOLE)
    assert [(w.per_byte, w.latency) for w in net.replicas[0].ways] == [(2 / 1e9, 1e-5)] * 2
    assert len(net.replicas) == 1 and net.kinds == (0, 0) and net.slow == (0,), "both are alike"
    assert net.reduction == (1 / 1e10,) * 2, "rings inside their nodes: 2 (n - 1) / n = 1"
    own = replace(one, nodes=tuple(replace(node, nics=2) for node in one.nodes))
    net = Wiring(own, PLAIN).network(1, 2, 2, (0, 1, 2, 3), WHOLE)
    assert net.replicas[0].ways[0].per_byte == 1 / 1e9, "a card each"
    across = Wiring(one, PLAIN).network(1, 2, 2, (0, 2, 1, 3), WHOLE)
    assert across.replicas[0].ways[0].per_byte == 1 / 1e10 and across.reduction == (2 / 1e9,) * 2


def test_what_a_runtime_reaches_of_a_link() -> None:
    types = (DeviceType("fast", 16e9, 1e14, 9e11),)
    nodes = tuple(Node(f"n{n}", "fast", 2, Link(1e10, 1e-6), Link(1e9, 1e-5)) for n in (0, 1))
    runtime = replace(PLAIN, nic=0.5, intra=0.25, message_seconds=1.0, reserve=1e9)
    net = Wiring(Cluster(types, nodes), runtime).network(1, 4, 1, (0, 1, 2, 3), WHOLE)
    inside, between = (4 / 1e10, 1.0 + 1e-6), (2 / 1e9, 1.0 + 1e-5)
    assert [(w.per_byte, w.latency) for w in net.replicas[0].ways] == [inside, between, inside, between]
    assert net.limits == (15e9,) * 4
    least = Wiring(Cluster(types, nodes), replace(runtime, nic_most=1e8)).network(1, 4, 1, (0, 1, 2, 3), WHOLE)
    assert least.replicas[0].ways[1].per_byte == 1 / 1e8
    measured = Cluster(types, nodes, measured=True)
    net = Wiring(measured, runtime).network(1, 4, 1, (0, 1, 2, 3), WHOLE)
    assert [w.per_byte for w in net.replicas[0].ways] == [1 / 1e10, 1 / 1e9] * 2, "what was measured was reached"


@pytest.mark.parametrize("trial", range(5))
def test_messages_and_rings_are_those_counted_over_all_pairs(trial: int, seed: int) -> None:
    rng = random.Random(f"{seed} {trial}")
    for _ in range(20):
        c = cluster(rng, rng.randint(1, 4), nics=(1, 2) if trial else (1,))
        pp, dp = degrees(rng, c.size)
        devices = tuple(rng.sample(range(c.size), pp * dp))
        check_ways(c, Wiring(c, PLAIN).network(1, pp, dp, devices, WHOLE), pp, dp, devices)
        one = [devices[p * dp : (p + 1) * dp] for p in range(pp)]
        worst = counted_rings(c, one)
        assert Wiring(c, PLAIN).ring_seconds([[ring] for ring in one]) == pytest.approx(worst)
        assert Wiring(c, PLAIN).ring_seconds([one]) == pytest.approx([max(worst)]), "one set: its slowest"


def check_ways(c: Cluster, net: Network, pp: int, dp: int, devices: tuple[int, ...]) -> None:
    for d in range(dp):
        replica = net.replicas[net.kinds[d]]
        mine = [devices[p * dp + d] for p in range(pp)]
        assert replica.types == tuple(c.type_of(device).name for device in mine)
        for p, way in enumerate(replica.ways):
            if pp == 1:
                assert way == FREE
                continue
            after = (p + 1) % pp
            pairs = [(devices[p * dp + k], devices[after * dp + k]) for k in range(dp)]
            expected = counted_way(c, pairs, (mine[p], mine[after]))
            assert (way.per_byte, way.latency) == pytest.approx(expected)
    assert net.reduction == pytest.approx(counted_rings(c, [devices[p * dp : (p + 1) * dp] for p in range(pp)]))
    for p in range(pp):
        held = [c.type_of(device) for device in devices[p * dp : (p + 1) * dp]]
        assert net.limits[p] == min(t.memory_bytes for t in held)
        assert net.bandwidths[p] == min(t.memory_bandwidth for t in held)
        assert set(net.types[p]) == {t.name for t in held}


def test_tensor_parallel_members_send_and_reduce_side_by_side(seed: int) -> None:
    """Each member of a group sends to its like, over the card of its node; each has a ring of its own."""
    rng = random.Random(seed)
    types = (DeviceType("fast", 16e9, 1e14, 9e11),)
    for _ in range(20):
        tp, pp, dp = rng.choice((2, 4)), rng.randint(1, 3), rng.randint(1, 3)
        nodes = [Node(f"n{n}", "fast", 4, Link(1e10, 0), Link(rng.uniform(1e8, 1e9), 0)) for n in range(10)]
        c = Cluster(types, tuple(nodes))
        groups = [tuple(range(k, k + tp)) for k in range(0, c.size, tp)]
        devices = [device for group in rng.sample(groups, pp * dp) for device in group]
        net = Wiring(c, PLAIN).network(tp, pp, dp, devices, WHOLE)
        rings = [devices[p * tp * dp + t : (p + 1) * tp * dp : tp] for p in range(pp) for t in range(tp)]
        each = counted_rings(c, rings)
        assert net.reduction == pytest.approx([max(each[p * tp : (p + 1) * tp]) for p in range(pp)])
        for p in range(pp if pp > 1 else 0):
            here, there = (devices[r * tp * dp : (r + 1) * tp * dp] for r in (p, (p + 1) % pp))
            pairs = list(zip(here, there, strict=True))
            for d in range(dp):
                way = net.replicas[net.kinds[d]].ways[p]
                assert way.per_byte == pytest.approx(
                    max(counted_way(c, pairs, pair)[0] for pair in pairs[d * tp :][:tp])
                )


def test_a_matrix_says_what_each_pair_can_do(seed: int) -> None:
    rng = random.Random(seed)
    c = cluster(rng, 3, nics=(1,))
    speeds = [[1.0 if a == b else rng.uniform(1e8, 1e10) for b in range(c.size)] for a in range(c.size)]
    zeros = tuple((0.0,) * c.size for _ in range(c.size))
    c = replace(c, matrix=Matrix(tuple(map(tuple, speeds)), zeros))
    devices = tuple(rng.sample(range(c.size), c.size))
    check_ways(c, Wiring(c, PLAIN).network(1, c.size, 1, devices, WHOLE), c.size, 1, devices)
    assert Wiring(c, PLAIN).ring_seconds([[devices]]) == pytest.approx(counted_rings(c, [devices]))


def test_only_replicas_that_could_be_the_slowest_are_simulated(seed: int) -> None:
    """Each other one has no slower device and no slower way than one of those; and those do not cover each other."""
    rng = random.Random(seed)
    for _ in range(50):
        c = cluster(rng, rng.randint(2, 4))
        pp, dp = degrees(rng, c.size)
        net = Wiring(c, PLAIN).network(1, pp, dp, tuple(rng.sample(range(c.size), pp * dp)), WHOLE)

        def covers(slow: int, fast: int, net: Network = net) -> bool:
            a, b = net.replicas[slow], net.replicas[fast]
            devices = all(WHOLE[x] >= WHOLE[y] for x, y in zip(a.types, b.types, strict=True))
            ways = zip(a.ways, b.ways, strict=True)
            return devices and all(x.per_byte >= y.per_byte and x.latency >= y.latency for x, y in ways)

        assert net.slow
        for kind in range(len(net.replicas)):
            assert (kind in net.slow) != any(covers(k, kind) for k in range(len(net.replicas)) if k != kind)
