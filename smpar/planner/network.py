"""Where a strategy's messages and reductions go, and what each byte of them takes.

All pairs of a boundary talk at about the same time, and so do all rings of a reduction; what passes a node's network
card shares it::

    node 0 [stage 0: replica 0, replica 1] ══ 2 messages over one card ══▶ [stage 1: replica 0, replica 1] node 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smpar.planner.cluster import Cluster
from smpar.planner.hardware import Runtime


@dataclass(frozen=True)
class Way:
    """From device to device: ``latency + bytes * per_byte`` seconds."""

    per_byte: float
    latency: float


FREE = Way(0.0, 0.0)


@dataclass(frozen=True)
class Replica:
    """A kind of replica: the device type of each pipeline rank, and the way from each rank to the next (cyclic)."""

    types: tuple[str, ...]
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Network:
    """Placed degrees.

    Attributes:
        replicas: the kinds of replica that differ.
        kinds: replica -> its kind, an index of `replicas`.
        slow: the kinds of which one is the slowest: each other is in nothing slower than one of these.
        types: by pipeline rank, the device types that hold it.
        reduction: by pipeline rank, seconds per byte of gradients averaged over the replicas; 0 with one replica.
        limits: by pipeline rank, bytes of the smallest device that holds it.
        bandwidths: by pipeline rank, bytes per second of the slowest memory.
    """

    replicas: tuple[Replica, ...]
    kinds: tuple[int, ...]
    slow: tuple[int, ...]
    types: tuple[tuple[str, ...], ...]
    reduction: tuple[float, ...]
    limits: tuple[float, ...]
    bandwidths: tuple[float, ...]


def network(
    cluster: Cluster,
    runtime: Runtime,
    tp: int,
    pp: int,
    dp: int,
    devices: Sequence[int],
    seconds: Mapping[str, float],
) -> Network:
    """What `smpar.planner.strategy.Strategy.devices` means for the messages of its degrees.

    Args:
        seconds: device type -> what the whole model takes on it; of a tensor-parallel group, the slowest type counts.
    """
    node = [cluster.node_of(device) for device in devices]
    card = [cluster.nic_of(device) for device in devices]
    kind = [cluster.type_of(device) for device in devices]
    places = range(tp * dp)  # of one pipeline rank
    width = tp * dp
    ways: list[list[Way]] = [[] for _ in range(dp)]
    for p in range(pp):
        q = (p + 1) % pp
        here, there = [p * width + i for i in places], [q * width + i for i in places]
        out: Counter[int] = Counter(card[a] for a, b in zip(here, there, strict=True) if node[a] != node[b])
        into: Counter[int] = Counter(card[b] for a, b in zip(here, there, strict=True) if node[a] != node[b])
        seen: dict[tuple[int, int, int], Way] = {}
        for d in range(dp):
            a, b = here[d * tp], there[d * tp]
            if pp == 1:
                ways[d].append(FREE)
                continue
            share = 1 if node[a] == node[b] else max(out[card[a]], into[card[b]])
            key = (node[a], node[b], share)
            way = None if cluster.matrix is not None else seen.get(key)
            if way is None:
                way = seen[key] = _way(cluster, runtime, devices[a], devices[b], share)
            ways[d].append(way)
    groups = [[kind[(p * dp + d) * tp : (p * dp + d + 1) * tp] for p in range(pp)] for d in range(dp)]
    types = [[max((k.name for k in group), key=seconds.__getitem__) for group in groups[d]] for d in range(dp)]
    every = [Replica(tuple(t), tuple(w)) for t, w in zip(types, ways, strict=True)]
    kinds = {replica: index for index, replica in enumerate(dict.fromkeys(every))}
    slow = [k for r, k in kinds.items() if not any(o is not r and _never_faster(o, r, seconds) for o in kinds)]
    ranks = [range(p * width, (p + 1) * width) for p in range(pp)]
    return Network(
        tuple(kinds),
        tuple(kinds[replica] for replica in every),
        tuple(slow),
        tuple(tuple(dict.fromkeys(types[d][p] for d in range(dp))) for p in range(pp)),
        ring_seconds(cluster, runtime, [[list(r[t::tp]) for t in range(tp)] for r in ranks], devices),
        tuple(min(kind[i].memory_bytes for i in r) - runtime.reserve for r in ranks),
        tuple(min(kind[i].memory_bandwidth for i in r) for r in ranks),
    )


def _never_faster(slow: Replica, fast: Replica, seconds: Mapping[str, float]) -> bool:
    """Whether each device and way of `slow` takes as long as those of `fast`, or longer; they differ."""
    devices = all(a == b or seconds[a] > seconds[b] for a, b in zip(slow.types, fast.types, strict=True))
    pairs = zip(slow.ways, fast.ways, strict=True)
    return devices and all(a.per_byte >= b.per_byte and a.latency >= b.latency for a, b in pairs)


def ring_seconds(
    cluster: Cluster, runtime: Runtime, groups: Sequence[Sequence[Sequence[int]]], devices: Sequence[int]
) -> tuple[float, ...]:
    """Seconds per byte summed over each of several groups of places at once, the slowest group of each set.

    A ring of n passes each of its links ``2 (n - 1) / n`` times the bytes; one over several nodes passes each of their
    cards once in and once out, however many of its members are there (as NCCL orders its rings).

    Args:
        groups: sets of groups of places; all of them are at work at once.
        devices: place -> device.
    """
    rings: Counter[int] = Counter()
    for group in (g for groups_ in groups for g in groups_):
        members = [devices[i] for i in group]
        if len({cluster.node_of(device) for device in members}) > 1:
            rings.update({cluster.nic_of(a) for edge in _crossing(cluster, members) for a in edge})
    return tuple(max(_ring(cluster, runtime, [devices[i] for i in g], rings) for g in groups_) for groups_ in groups)


def _ring(cluster: Cluster, runtime: Runtime, members: list[int], rings: Counter[int]) -> float:
    size = len(members)
    if size == 1:
        return 0.0
    slowest = max(
        _share(cluster, rings, a, b) / _rate(cluster, runtime, a, b)
        for a, b in _round(sorted(members, key=cluster.node_of))
    )
    return 2 * (size - 1) / size * slowest


def _share(cluster: Cluster, rings: Mapping[int, int], a: int, b: int) -> int:
    """How many rings the network cards between two devices carry."""
    return 1 if cluster.same_node(a, b) else max(rings[cluster.nic_of(a)], rings[cluster.nic_of(b)])


def _round(members: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(members, (*members[1:], members[0]), strict=True)


def _crossing(cluster: Cluster, members: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The links of a ring that lie between nodes."""
    return ((a, b) for a, b in _round(sorted(members, key=cluster.node_of)) if not cluster.same_node(a, b))


def _rate(cluster: Cluster, runtime: Runtime, a: int, b: int) -> float:
    """Bytes per second that a transfer gets."""
    stated = cluster.link(a, b).bandwidth
    if cluster.measured:
        return stated
    return stated * runtime.intra if cluster.same_node(a, b) else min(stated * runtime.nic, runtime.nic_most)


def _way(cluster: Cluster, runtime: Runtime, a: int, b: int, share: int) -> Way:
    return Way(share / _rate(cluster, runtime, a, b), cluster.link(a, b).latency + runtime.message_seconds)
