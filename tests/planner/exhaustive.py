"""Small random models and clusters, and the best of all strategies on them, by trying each one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from smpar.planner.cluster import Cluster, DeviceType, Link, Node
from smpar.planner.cost import CostModel
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times
from smpar.planner.strategy import Strategy
from smpar.schedule import virtual_stages_of

SPEED = {"fast": 1.0, "slow": 2.5}
"""Seconds on a device, to those on the fastest."""


def small_cluster(rng: random.Random, counts: tuple[tuple[str, int], ...], memory: float = 16e9) -> Cluster:
    """A node for each (device type, devices); links between 1 and 100 Gbit/s."""
    types = tuple(
        DeviceType(name, memory / SPEED[name], 1e14, 9e11 / SPEED[name]) for name in dict.fromkeys(n for n, _ in counts)
    )
    thin = 10 ** rng.uniform(9, 11) / 8
    return Cluster(
        types,
        tuple(
            Node(f"node{i}", name, count, Link(2.5e10, 1e-5), Link(thin * rng.uniform(1.0, 2.0), 3e-5))
            for i, (name, count) in enumerate(counts)
        ),
    )


def small_profile(rng: random.Random, layers: int, tp: tuple[int, ...] = (1,)) -> Profile:
    """A chain with a skip and a tied parameter; a layer takes 1 to 20 ms, its weights up to 400 MB."""
    made = tuple(
        Layer(f"l{i}", rng.uniform(1e6, 1e8), rng.uniform(1e7, 4e8), transient=rng.uniform(0, 1e8))
        for i in range(layers)
    )
    tensors = [Tensor(i, (i + 1,), rng.uniform(1e5, 1e7)) for i in range(layers - 1)]
    tensors.append(Tensor(0, (layers - 1,), rng.uniform(1e5, 1e6)))
    base = [rng.uniform(1e-3, 2e-2) for _ in range(layers)]
    fixed = rng.choice((1e-4, 2e-3))
    times = []
    for device, slower in SPEED.items():
        for degree in tp:
            table = [tuple(fixed + slower * size * x / degree**0.8 for x in base) for size in (1, 4)]
            twice = tuple(tuple(2 * x for x in row) for row in table)
            times.append(Times(device, degree, (1.0, 4.0), tuple(table), twice, tuple(table)))
    return Profile(made, tuple(tensors), tuple(times), (Tied((0, layers - 1), 1e6),))


def all_strategies(model: CostModel, batch: int, schedules: tuple[str, ...]) -> Iterator[Strategy]:
    """Each strategy that is not the same as another one with devices of a node exchanged; without recomputation."""
    cluster, layers = model.cluster, model.profile.size
    degrees = {tp for d in model.profile.devices for tp in model.profile.degrees(d)}
    for used in range(1, cluster.size + 1):
        for tp, pp, dp, size in itertools.product(degrees, range(1, used + 1), range(1, used + 1), range(1, batch + 1)):
            if tp * pp * dp != used or batch % (dp * size):
                continue
            for devices, (name, virtual) in itertools.product(
                _ordered(cluster, used, tp), _named(schedules, pp, layers)
            ):
                for inner in itertools.combinations(range(1, layers), pp * virtual - 1):
                    for shard in (False, True)[: 1 + (dp > 1)]:
                        yield Strategy(
                            tp, pp, dp, size, batch // (dp * size), name, virtual, (0, *inner), devices, (), shard
                        )


def _named(schedules: tuple[str, ...], pp: int, layers: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    return [
        (name, virtual)
        for name in schedules
        for virtual in ((2, 3, 4) if name == "interleaved_1f1b" else (virtual_stages_of(name),))
        if pp * virtual <= layers
    ]


def _ordered(cluster: Cluster, used: int, tp: int) -> list[tuple[int, ...]]:
    """All orders of so many devices; of a node the first ones, in ascending order, tp by tp in one node."""
    found = []
    for nodes in set(
        itertools.permutations([n for n, node in enumerate(cluster.nodes) for _ in range(node.count)], used)
    ):
        if all(len(set(nodes[i : i + tp])) == 1 for i in range(0, used, tp)):
            count = [itertools.count(start) for start in cluster.starts]
            found.append(tuple(next(count[n]) for n in nodes))
    return sorted(found)


def best_of_all(model: CostModel, batch: int, schedules: tuple[str, ...]) -> tuple[float, Strategy | None]:
    """Seconds of the fastest strategy that fits, and the strategy."""
    best: tuple[float, Strategy | None] = float("inf"), None
    for strategy in all_strategies(model, batch, schedules):
        prediction = model.predict(strategy)
        if prediction.fits:
            best = min(best, (prediction.seconds, strategy), key=lambda pair: pair[0])
            continue
        for flags in itertools.product((False, True), repeat=strategy.stages):
            if any(flags):
                again = Strategy(**{**vars(strategy), "recompute": flags})
                prediction = model.predict(again)
                if prediction.fits:
                    best = min(best, (prediction.seconds, again), key=lambda pair: pair[0])
    return best
