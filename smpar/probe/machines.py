"""A cluster file from measurements: equal devices make nodes, and even links make the nodes' links."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from smpar.planner.cluster import HERE, Cluster, DeviceType, Link, Matrix, Node
from smpar.planner.machines import GBIT, GIBI, GIGA, MICRO, TERA
from smpar.probe.links import Measured

_UNEVEN = 1.3  # links that should be equal and differ by more, and by more than their noise, are written one by one
NO_CARDS: Mapping[Hashable, int] = MappingProxyType({})
_SCATTER = 6.0  # median absolute deviations: two of three, to each side


@dataclass(frozen=True)
class Rank:
    """Where a rank is, and what it has: its machine's number and name, its device."""

    machine: int
    host: str
    device: DeviceType


def cluster_of(
    ranks: Sequence[Rank], links: Mapping[tuple[int, int], Measured], cards: Mapping[Hashable, int] = NO_CARDS
) -> Cluster:
    """The cluster that the measurements show.

    Neighbouring ranks with equal devices on one machine are a node. The nodes' links are medians; where links that a
    node, or a pair of nodes, should have equal differ by more than noise, a matrix of all is added.

    Args:
        ranks: all, in order.
        links: of each pair (a, b) with a < b.
        cards: number of network cards by machine; one where nothing is said.
    """
    nodes = [list(group) for _, group in itertools.groupby(range(len(ranks)), lambda r: _kind(ranks[r]))]
    names = {ranks[r].device.name: None for r in range(len(ranks))}
    types = tuple(_typical([r.device for r in ranks if r.device.name == name]) for name in names)
    between: dict[tuple[int, int], list[Measured]] = {}
    node_of = {rank: i for i, members in enumerate(nodes) for rank in members}
    for (a, b), measured in links.items():
        i, j = sorted((node_of[a], node_of[b]))
        between.setdefault((i, j), []).append(measured)
    typical = {key: _median(group) for key, group in between.items()}
    made = tuple(
        Node(
            ranks[members[0]].host,
            ranks[members[0]].device.name,
            len(members),
            typical.get((i, i), HERE),
            # A link is as fast as the slower card of both, so a card is at least as fast as any of its links.
            max((link for (a, b), link in typical.items() if a != b and i in (a, b)), key=_speed, default=HERE),
            min(cards.get(ranks[members[0]].machine, 1), len(members)),
        )
        for i, members in enumerate(nodes)
    )
    plain = Cluster(types, made, measured=True)
    split = len({ranks[members[0]].machine for members in nodes}) < len(nodes)
    if not split and not any(_uneven(group) for group in between.values()) and _explained(plain, links):
        return plain
    return Cluster(types, made, _matrix(len(ranks), links), measured=True)


def _kind(rank: Rank) -> tuple[int, str]:
    return rank.machine, rank.device.name


def _typical(devices: Sequence[DeviceType]) -> DeviceType:
    return DeviceType(
        devices[0].name,
        rounded(min(d.memory_bytes for d in devices), GIBI),
        rounded(statistics.median(d.peak_flops for d in devices), TERA),
        rounded(statistics.median(d.memory_bandwidth for d in devices), GIGA),
    )


def _median(group: Sequence[Measured]) -> Link:
    return Link(
        rounded(statistics.median(m.link.bandwidth for m in group), GBIT),
        rounded(statistics.median(m.link.latency for m in group), MICRO),
    )


def _speed(link: Link) -> float:
    return link.bandwidth


def _uneven(group: Sequence[Measured]) -> bool:
    """Whether links that should be equal are not."""
    speeds = [m.link.bandwidth for m in group]
    return max(speeds) > min(speeds) * (_UNEVEN + _SCATTER * max(m.noise for m in group))


def _explained(cluster: Cluster, links: Mapping[tuple[int, int], Measured]) -> bool:
    """Whether the slower card of both tells the links between nodes."""
    for (a, b), measured in links.items():
        told, found = cluster.link(a, b).bandwidth, measured.link.bandwidth
        if max(told, found) > min(told, found) * (_UNEVEN + _SCATTER * measured.noise):
            return False
    return True


def _matrix(size: int, links: Mapping[tuple[int, int], Measured]) -> Matrix:
    both = {**links, **{(b, a): m for (a, b), m in links.items()}}
    order = range(size)
    return Matrix(
        tuple(tuple(0.0 if a == b else rounded(both[a, b].link.bandwidth, GBIT) for b in order) for a in order),
        tuple(tuple(0.0 if a == b else rounded(both[a, b].link.latency, MICRO) for b in order) for a in order),
    )


def rounded(value: float, scale: float) -> float:
    """To four digits, as a file has it in units of ``scale``: more would be noise."""
    return float(f"{value / scale:.4g}") * scale
