"""The parts of a cluster, and how a file has them; `smpar.planner.cluster` documents the file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smpar.errors import ClusterError
from smpar.planner.reading import items, number, record, whole, written

GIBI, TERA, GIGA, GBIT, MICRO = 2.0**30, 1e12, 1e9, 1.25e8, 1e-6

_TYPE_KEYS = {"memory_gib": GIBI, "peak_tflops": TERA, "memory_gbytes_per_s": GIGA}
_NODE_KEYS = ("name", "device", "count", "repeat", "nics", "intra_gbit_per_s", "intra_latency_us", "inter_gbit_per_s",
              "inter_latency_us")  # fmt: skip


@dataclass(frozen=True)
class DeviceType:
    """A kind of device: memory in bytes, FLOP/s at the precision of training, bytes/s to and from its memory."""

    name: str
    memory_bytes: float
    peak_flops: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Link:
    """A way from one device to another: bytes/s, and seconds before the first byte."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Of a transfer that has the link for itself."""
        return self.latency + nbytes / self.bandwidth


HERE = Link(math.inf)  # from a device to itself; also the link of a node that has nobody to reach by it


@dataclass(frozen=True)
class Node:
    """Equal devices in one box.

    Attributes:
        name: of its kind, or of the machine.
        device: name of the device type.
        count: number of devices.
        intra: from any of its devices to any other; `HERE` if there is one only.
        nic: a network card; `HERE` if the cluster is one node.
        nics: number of such cards; the devices are spread over them in even blocks.
    """

    name: str
    device: str
    count: int
    intra: Link = HERE
    nic: Link = HERE
    nics: int = 1


@dataclass(frozen=True)
class Matrix:
    """Links between all devices: ``bandwidth[a][b]`` in bytes/s and ``latency[a][b]`` in seconds, from a to b."""

    bandwidth: tuple[tuple[float, ...], ...]
    latency: tuple[tuple[float, ...], ...]


def read_type(name: str, given: Any) -> DeviceType:
    known = record(given, f"device {name!r}", tuple(_TYPE_KEYS), tuple(_TYPE_KEYS))
    return DeviceType(name, *(number(known[k], f"{k} of {name!r}", scale) for k, scale in _TYPE_KEYS.items()))


def read_nodes(given: Any, where: str, start: int, matrix: Matrix | None) -> list[Node]:
    """As many nodes as ``repeat`` says; ``start`` is the first one's first device."""
    known = record(given, where, _NODE_KEYS, ("device", "count"))
    count, repeat = whole(known["count"], f"{where}.count"), whole(known.get("repeat", 1), f"{where}.repeat")
    intra, nic = _link(known, "intra", where), _link(known, "inter", where)
    device = str(known["device"])
    name, nics = str(known.get("name", device)), whole(known.get("nics", 1), f"{where}.nics")
    made = []
    for i in range(repeat):
        inside = range(start + i * count, start + (i + 1) * count)
        made.append(
            Node(name, device, count, intra or _fastest(matrix, inside, True),
                 nic or _fastest(matrix, inside, False), nics)
        )  # fmt: skip
    return made


def _link(given: Mapping[str, Any], kind: str, where: str) -> Link | None:
    bandwidth, latency = f"{kind}_gbit_per_s", f"{kind}_latency_us"
    if given.get(bandwidth) is None:
        if given.get(latency) is not None:
            raise ClusterError("a link has a bandwidth", f"{where} has {latency} only", f"add {bandwidth} to {where}")
        return None
    return Link(
        number(given[bandwidth], f"{where}.{bandwidth}", GBIT),
        number(given.get(latency, 0.0), f"{where}.{latency}", MICRO, above=False),
    )


def _fastest(matrix: Matrix | None, inside: range, intra: bool) -> Link:
    """What a node's links, or its network card, can do at least, as the matrix tells; `HERE` if it does not."""
    if matrix is None:
        return HERE
    size = len(matrix.bandwidth)
    pairs = [(a, b) for a in inside for b in range(size) if a != b and a < size and (b in inside) == intra]
    if not pairs:
        return HERE
    return Link(max(matrix.bandwidth[a][b] for a, b in pairs), min(matrix.latency[a][b] for a, b in pairs))


def read_matrix(given: Any) -> Matrix:
    known = record(given, "`links`", ("gbit_per_s", "latency_us"), ("gbit_per_s",))
    bandwidth = _table(known["gbit_per_s"], "links.gbit_per_s", GBIT, above=True)
    latency = tuple((0.0,) * len(row) for row in bandwidth)
    if known.get("latency_us") is not None:
        latency = _table(known["latency_us"], "links.latency_us", MICRO, above=False)
    matrix = Matrix(bandwidth, latency)
    check_matrix(matrix, len(bandwidth))
    return matrix


def _table(given: Any, where: str, scale: float, above: bool) -> tuple[tuple[float, ...], ...]:
    """Rows of numbers; the diagonal may be anything, and becomes 0."""
    return tuple(
        tuple(0.0 if i == j else number(x, f"{where}[{i}][{j}]", scale, above) for j, x in enumerate(items(row, where)))
        for i, row in enumerate(items(given, where))
    )


def write_node(node: Node) -> dict[str, Any]:
    made: dict[str, Any] = {"name": node.name, "device": node.device, "count": node.count}
    for kind, link in (("intra", node.intra), ("inter", node.nic)):
        if link != HERE:
            made[f"{kind}_gbit_per_s"] = written(link.bandwidth, GBIT)
            made[f"{kind}_latency_us"] = written(link.latency, MICRO)
    if node.nics > 1:
        made["nics"] = node.nics
    return made


def part(table: tuple[tuple[float, ...], ...], chosen: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(table[a][b] for b in chosen) for a in chosen)


def check_link(link: Link, where: str, needed: bool) -> None:
    if link == HERE:
        if needed:
            raise ClusterError(
                "devices of a node, and nodes, have a bandwidth between them", f"no {where}", "add it, or `links`"
            )
        return
    number(link.bandwidth, where)
    number(link.latency, where.replace("gbit_per_s", "latency_us"), above=False)


def check_matrix(matrix: Matrix, size: int) -> None:
    for name, table in (("gbit_per_s", matrix.bandwidth), ("latency_us", matrix.latency)):
        lengths = sorted({len(row) for row in table})
        if len(table) != size or lengths != [size]:
            raise ClusterError(
                f"links.{name} is square: a row and a column for each device",
                f"{len(table)} rows of {' and '.join(map(str, lengths))} numbers for {size} devices",
                f"give {size} rows of {size} numbers; those on the diagonal do not count",
            )
        for a, row in enumerate(table):
            for b, value in enumerate(row):
                if a != b:
                    number(value, f"links.{name}[{a}][{b}]", above=name == "gbit_per_s")
