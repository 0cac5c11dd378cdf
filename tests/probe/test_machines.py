"""What measurements are taken for: nodes with even links, or every link by itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from smpar.planner.cluster import HERE, Cluster, DeviceType, Link
from smpar.probe.links import Measured, fit, summary
from smpar.probe.machines import Rank, cluster_of

FAST = DeviceType("fast", 2.0**34, 1e14, 9e11)
SLOW = DeviceType("slow", 2.0**33, 2e13, 3e11)


def ranks(*machines: tuple[DeviceType, int]) -> list[Rank]:
    return [Rank(i, f"host{i}", device) for i, (device, count) in enumerate(machines) for _ in range(count)]


def measure(of: Callable[[int, int], float], count: int, rng: random.Random, noise: float = 0.05) -> dict[
    tuple[int, int], Measured
]:  # fmt: skip
    """Links of so many Gbit/s each, up to noise."""
    return {
        (a, b): Measured(Link(of(a, b) * 1.25e8 * rng.uniform(1 - noise, 1 + noise), 2e-5), noise / 2)
        for a, b in itertools.combinations(range(count), 2)
    }


def test_even_links_make_nodes(seed: int) -> None:
    machine = [0, 0, 0, 1, 1, 1, 2, 2]
    nic = [10, 10, 25]
    links = measure(
        lambda a, b: 200 if machine[a] == machine[b] else min(nic[machine[a]], nic[machine[b]]), 8, random.Random(seed)
    )
    cluster = cluster_of(ranks((FAST, 3), (FAST, 3), (SLOW, 2)), links)
    assert cluster.matrix is None and cluster.measured
    assert [(n.name, n.device, n.count) for n in cluster.nodes] == [
        ("host0", "fast", 3), ("host1", "fast", 3), ("host2", "slow", 2)]  # fmt: skip
    for (a, b), found in links.items():
        assert cluster.link(a, b).bandwidth == pytest.approx(found.link.bandwidth, rel=0.11)
        assert cluster.link(a, b).latency == pytest.approx(2e-5)
    assert [t.memory_bytes for t in cluster.types] == [2**34, 2**33]
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_uneven_links_are_written_one_by_one(seed: int) -> None:
    quick = {(0, 1), (2, 3)}  # bridges between neighbours only
    links = measure(lambda a, b: 400 if (a, b) in quick else 80, 4, random.Random(seed))
    cluster = cluster_of(ranks((FAST, 4)), links)
    assert cluster.matrix is not None
    for (a, b), found in links.items():
        assert cluster.link(a, b) == cluster.link(b, a)
        assert cluster.link(a, b).bandwidth == pytest.approx(found.link.bandwidth, rel=1e-3)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_links_that_cards_do_not_explain_are_written_one_by_one(seed: int) -> None:
    far = {(0, 2), (0, 3), (1, 2), (1, 3)}  # machines 0 1 | 2 3 in two halls
    links = measure(lambda a, b: 1 if (a, b) in far else 10, 4, random.Random(seed))
    assert cluster_of(ranks((FAST, 1), (FAST, 1), (FAST, 1), (FAST, 1)), links).matrix is not None


def test_noise_alone_makes_no_matrix(seed: int) -> None:
    links = measure(lambda a, b: 10, 4, random.Random(seed), noise=0.4)
    assert cluster_of(ranks((FAST, 4)), links).matrix is None


def test_two_kinds_of_devices_in_one_machine(seed: int) -> None:
    mixed = [Rank(0, "host", FAST), Rank(0, "host", FAST), Rank(0, "host", SLOW)]
    cluster = cluster_of(mixed, measure(lambda a, b: 100, 3, random.Random(seed)))
    assert [(n.device, n.count) for n in cluster.nodes] == [("fast", 2), ("slow", 1)] and cluster.matrix is not None


def test_a_single_device() -> None:
    cluster = cluster_of(ranks((FAST, 1)), {})
    assert cluster.size == 1 and cluster.nodes[0].intra == cluster.nodes[0].nic == HERE


def test_a_straight_line_is_found(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        link = Link(10 ** rng.uniform(7, 11), 10 ** rng.uniform(-6, -3))
        sizes = [2**k for k in sorted(rng.sample(range(6, 28), rng.randint(2, 6)))]
        found = fit(sizes, [link.seconds(n) for n in sizes])
        for n in sizes:  # one of the two may drown in the other; the seconds must not
            assert found.seconds(n) == pytest.approx(link.seconds(n), rel=1e-6)


def test_nothing_is_below_zero() -> None:
    convex = fit([1e3, 1e6, 1e7], [1e-6, 2e-3, 3e-2])
    assert convex.latency >= 0 and convex.bandwidth == pytest.approx(4e8, rel=0.5)
    falling = fit([1e3, 1e6], [2e-3, 1e-3])
    assert falling.bandwidth == pytest.approx(1e9) and falling.latency == 0.0


def test_the_median_counts_and_its_noise() -> None:
    seconds = [[1e-4] * 5, [1e-2, 1.01e-2, 0.99e-2, 1.02e-2, 5.0]]
    found = summary([1000, 1000_000], seconds)
    assert found.link.seconds(1000_000) == pytest.approx(1.01e-2) and found.noise == pytest.approx(0.01, rel=0.05)
