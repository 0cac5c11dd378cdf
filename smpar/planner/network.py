"""Where a strategy's messages and reductions go, and what each byte of them takes.

All pairs of a boundary talk at about the same time, and so do all rings of a reduction; what passes a node's network
card shares it::

    node 0 [stage 0: replica 0, replica 1] ══ 2 messages over one card ══▶ [stage 1: replica 0, replica 1] node 1
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from smpar.planner.cluster import Cluster, DeviceType
from smpar.planner.hardware import Runtime

_T = TypeVar("_T")


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

    def way(self, source: int, target: int) -> Way:
        """From a pipeline rank to a neighbouring one, or to itself."""
        if source == target:
            return FREE
        return self.ways[source if target == (source + 1) % len(self.ways) else target]


@dataclass(frozen=True)
class Network:
    """Placed degrees.

    Attributes:
        replicas: the kinds of replica that differ.
        kinds: replica -> its kind, an index of `replicas`.
        slow: the kinds of which one is the slowest: each other is in nothing slower than one of these.
        types: by pipeline rank, the device types that hold it.
        reduction: by pipeline rank, seconds per byte of gradients averaged over the replicas; 0 with one replica.
        wide: the same over the replicas and all of their tensor-parallel groups.
        limits: by pipeline rank, bytes of the smallest device that holds it.
        bandwidths: by pipeline rank, bytes per second of the slowest memory.
    """

    replicas: tuple[Replica, ...]
    kinds: tuple[int, ...]
    slow: tuple[int, ...]
    types: tuple[tuple[str, ...], ...]
    reduction: tuple[float, ...]
    wide: tuple[float, ...]
    limits: tuple[float, ...]
    bandwidths: tuple[float, ...]


class Wiring:
    """The links of a cluster as one runtime uses them.

    Args:
        cluster: the devices.
        runtime: what part of the links' stated rates it reaches.
    """

    def __init__(self, cluster: Cluster, runtime: Runtime) -> None:
        self.cluster, self.runtime = cluster, runtime
        every = range(cluster.size)
        self._node = [cluster.node_of(device) for device in every]
        self._card = [cluster.nic_of(device) for device in every]
        self._kind = [cluster.type_of(device) for device in every]
        self._ways: dict[tuple[int, int], Way] = {}

    def network(self, tp: int, pp: int, dp: int, devices: Sequence[int], seconds: Mapping[str, float]) -> Network:
        """What `smpar.planner.strategy.Strategy.devices` means for the messages of its degrees.

        Args:
            seconds: device type -> what the whole model takes on it; of a tensor-parallel group, the slowest counts.
        """
        width = tp * dp
        ranks = [devices[p * width : (p + 1) * width] for p in range(pp)]
        kinds = [[self._kind[device] for device in rank] for rank in ranks]
        types = [self._types(kind, tp, seconds) for kind in kinds]
        ways = [self._boundary(here, there, tp) for here, there in _round(ranks)] if pp > 1 else [[FREE] * dp]
        every = [Replica(t, w) for t, w in zip(zip(*types, strict=True), zip(*ways, strict=True), strict=True)]
        places = {replica: index for index, replica in enumerate(dict.fromkeys(every))}
        slow = [k for r, k in places.items() if not any(o is not r and _never_faster(o, r, seconds) for o in places)]
        reduction = self.ring_seconds([[rank[t::tp] for t in range(tp)] for rank in ranks])
        return Network(
            tuple(places),
            tuple(places[replica] for replica in every),
            tuple(slow),
            tuple(tuple(dict.fromkeys(names)) for names in types),
            reduction,
            self._wide(ranks, reduction) if tp > 1 and self.runtime.averages_whole else reduction,
            tuple(min(k.memory_bytes for k in set(kind)) - self.runtime.reserve for kind in kinds),
            tuple(min(k.memory_bandwidth for k in set(kind)) for kind in kinds),
        )

    def near(self, device: str, tp: int) -> Way:
        """What an all-reduce takes among `tp` devices of that type in one node, the slowest such group.

        Latency is that of all ``2 (tp - 1)`` steps around the ring, and what asking for it takes.
        """
        if tp == 1:
            return FREE
        groups = [
            range(first + k, first + k + tp)
            for first, node in zip(self.cluster.starts, self.cluster.nodes, strict=True)
            if node.device == device
            for k in range(0, node.count - tp + 1, tp)
        ]
        links = [self._way(a, b) for group in groups for a, b in _round(group)]
        latency = max((way.latency for way in links), default=0.0) - self.runtime.message_seconds
        per_byte = max((self.ring_seconds([[group]])[0] for group in groups), default=0.0)
        return Way(per_byte, 2 * (tp - 1) * latency + self.runtime.message_seconds)

    def _wide(self, ranks: Sequence[Sequence[int]], reduction: Sequence[float]) -> tuple[float, ...]:
        """Rings through all devices of each pipeline rank; they share network cards with those through replicas."""
        return tuple(map(max, self.ring_seconds([[rank] for rank in ranks]), reduction))

    def ring_seconds(self, groups: Sequence[Sequence[Sequence[int]]]) -> tuple[float, ...]:
        """Seconds per byte summed over each of several groups of devices at once, the slowest group of each set.

        A ring of n passes each of its links ``2 (n - 1) / n`` times the bytes; one over several nodes passes each of
        their cards once in and once out, however many of its members are there (as NCCL orders its rings).

        Args:
            groups: sets of groups; all of them are at work at once.
        """
        edges = [[self._edges(group) for group in set_] for set_ in groups]
        rings: Counter[int] = Counter()
        for _, crossing in (group for set_ in edges for group in set_):
            rings.update({self._card[end] for edge in crossing for end in edge})
        return tuple(
            max(
                2 * (len(group) - 1) / len(group) * self._slowest(near, crossing, rings)
                for group, (near, crossing) in zip(set_, ends, strict=True)
            )
            for set_, ends in zip(groups, edges, strict=True)
        )

    def _types(self, kinds: Sequence[DeviceType], tp: int, seconds: Mapping[str, float]) -> list[str]:
        """By replica, the device type that a pipeline rank's stages run at the speed of."""
        if tp == 1:
            return [kind.name for kind in kinds]
        return [
            max({kind.name for kind in kinds[i : i + tp]}, key=lambda name: (seconds[name], name))
            for i in range(0, len(kinds), tp)
        ]

    def _boundary(self, here: Sequence[int], there: Sequence[int], tp: int) -> list[Way]:
        """By replica, the way from one pipeline rank to the next."""
        node, card = self._node, self._card
        crossing = [(a, b) for a, b in zip(here, there, strict=True) if node[a] != node[b]]
        out, into = Counter(card[a] for a, _ in crossing), Counter(card[b] for _, b in crossing)
        ways = []
        for a, b in zip(here[::tp], there[::tp], strict=True):
            way = self._way(a, b)
            share = 1 if node[a] == node[b] else max(out[card[a]], into[card[b]])
            ways.append(way if share == 1 else Way(way.per_byte * share, way.latency))
        return ways

    def _edges(self, group: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The links of a ring inside nodes, and between them; of equal links inside a node, one."""
        members = sorted(group)  # devices are numbered node by node
        if len(members) == 1:
            return [], []
        if self.cluster.matrix is not None:
            pairs = list(_round(members))
            near = [self.cluster.same_node(a, b) for a, b in pairs]
            return [p for p, n in zip(pairs, near, strict=True) if n], [
                p for p, n in zip(pairs, near, strict=True) if not n
            ]
        parts = [list(part) for _, part in itertools.groupby(members, key=self._node.__getitem__)]
        near_ = [(part[0], part[1]) for part in parts if len(part) > 1]
        return near_, [(a[-1], b[0]) for a, b in _round(parts)] if len(parts) > 1 else []

    def _slowest(
        self, near: Sequence[tuple[int, int]], crossing: Sequence[tuple[int, int]], rings: Mapping[int, int]
    ) -> float:
        """Seconds per byte of a ring's slowest link; a card serves its rings in turn."""
        inside = max((self._way(a, b).per_byte for a, b in near), default=0.0)
        card = self._card
        between = (self._way(a, b).per_byte * max(rings[card[a]], rings[card[b]]) for a, b in crossing)
        return max((inside, *between))

    def _way(self, a: int, b: int) -> Way:
        """Between two devices, with nobody else on it."""
        key = (a, b) if self.cluster.matrix is not None else (self._node[a], self._node[b])
        way = self._ways.get(key)
        if way is None:
            link, runtime = self.cluster.link(a, b), self.runtime
            rate = link.bandwidth
            if not self.cluster.measured:
                near = self._node[a] == self._node[b]
                rate = rate * runtime.intra if near else min(rate * runtime.nic, runtime.nic_most)
            way = self._ways[key] = Way(1.0 / rate, link.latency + runtime.message_seconds)
        return way


def _never_faster(slow: Replica, fast: Replica, seconds: Mapping[str, float]) -> bool:
    """Whether each device and way of `slow` takes as long as those of `fast`, or longer; they differ."""
    devices = all(a == b or seconds[a] > seconds[b] for a, b in zip(slow.types, fast.types, strict=True))
    pairs = zip(slow.ways, fast.ways, strict=True)
    return devices and all(a.per_byte >= b.per_byte and a.latency >= b.latency for a, b in pairs)


def _round(members: Sequence[_T]) -> Iterable[tuple[_T, _T]]:
    return zip(members, (*members[1:], members[0]), strict=True)
