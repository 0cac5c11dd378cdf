"""The machines: device types, nodes of equal devices, the links inside and between them.

    node 0: p3.8xlarge              node 1: p3.8xlarge              node 2: g4dn.12xlarge
    ┌─ 0 ═ 1 ═ 2 ═ 3 ─┐ intra       ┌─ 4 ═ 5 ═ 6 ═ 7 ─┐             ┌─ 8 ═ 9 ═ 10 ═ 11 ─┐
    └───── nic ───────┘             └───── nic ───────┘             └─────── nic ───────┘
            └────────────── the slower of two nics ───────────────────────────┘

Devices are numbered through the nodes in order, as torchrun numbers ranks. As a file, YAML or JSON, with units in the
names of the keys::

    devices:
      V100: {memory_gib: 15.78, peak_tflops: 125, memory_gbytes_per_s: 900}
    nodes:
      - name: p3.8xlarge
        device: V100
        count: 4                  # devices in the node
        repeat: 3                 # as many nodes like this; 1 if left out
        intra_gbit_per_s: 200     # from a device to another one of the node, one way; not needed for one device
        intra_latency_us: 10      # 0 if left out
        inter_gbit_per_s: 10      # of one network card, one way; not needed for one node
        inter_latency_us: 30
        nics: 1                   # network cards of the node, each shared by as many devices; 1 if left out
    links:                        # instead of the nodes' links: from each device (row) to each device (column)
      gbit_per_s: [[0, 200], [200, 0]]
      latency_us: [[0, 10], [10, 0]]
    measured: true                # links are as measured, not as in a data sheet; false if left out
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from smpar.errors import ClusterError
from smpar.planner.machines import (
    GBIT,
    GIBI,
    GIGA,
    HERE,
    MICRO,
    TERA,
    DeviceType,
    Link,
    Matrix,
    Node,
    check_link,
    check_matrix,
    part,
    read_matrix,
    read_nodes,
    read_type,
    write_node,
)
from smpar.planner.reading import MANY, items, nearest, number, record, whole, written

__all__ = ["HERE", "Cluster", "DeviceType", "Link", "Matrix", "Node", "ready"]

READY = Path(__file__).with_name("clusters")
_DEVICE = "devices: {V100: {memory_gib: 15.78, peak_tflops: 125, memory_gbytes_per_s: 900}}"


@dataclass(frozen=True)
class Cluster:
    """All machines of a job.

    Attributes:
        types: device types, each name once.
        nodes: in the order of their ranks.
        matrix: links of all pairs, where the nodes' own do not tell enough.
        measured: whether links are as measured, with all losses, and not as in a data sheet.

    Raises:
        ClusterError: the parts contradict each other, or a number means nothing.
    """

    types: tuple[DeviceType, ...]
    nodes: tuple[Node, ...]
    matrix: Matrix | None = None
    measured: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check(self)

    # -- devices and links

    @cached_property
    def size(self) -> int:
        """Number of devices."""
        return sum(node.count for node in self.nodes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first device of each node."""
        return tuple(sum(node.count for node in self.nodes[:i]) for i in range(len(self.nodes)))

    @cached_property
    def _node_indices(self) -> tuple[int, ...]:
        return tuple(i for i, node in enumerate(self.nodes) for _ in range(node.count))

    @cached_property
    def _nics(self) -> tuple[int, ...]:
        before, found = 0, []
        for node in self.nodes:
            found += [before + i * node.nics // node.count for i in range(node.count)]
            before += node.nics
        return tuple(found)

    @cached_property
    def _types(self) -> dict[str, DeviceType]:
        return {t.name: t for t in self.types}

    def node_of(self, device: int) -> int:
        """The index of the node that a device is in."""
        return self._node_indices[device]

    def type_of(self, device: int) -> DeviceType:
        """What kind of device it is."""
        return self._types[self.nodes[self._node_indices[device]].device]

    def nic_of(self, device: int) -> int:
        """The network card that a device reaches other nodes by, counted through the cluster."""
        return self._nics[device]

    def same_node(self, a: int, b: int) -> bool:
        """Whether two devices are in one node."""
        return self._node_indices[a] == self._node_indices[b]

    def link(self, a: int, b: int) -> Link:
        """The link from device ``a`` to device ``b``, with nobody else on it.

        The matrix' own if there is one; else the node's inside a node, and the slower card of both between nodes.
        """
        if a == b:
            return HERE
        if self.matrix is not None:
            return Link(self.matrix.bandwidth[a][b], self.matrix.latency[a][b])
        i, j = self._node_indices[a], self._node_indices[b]
        if i == j:
            return self.nodes[i].intra
        one, other = self.nodes[i].nic, self.nodes[j].nic
        if one == other:
            return one
        return Link(min(one.bandwidth, other.bandwidth), max(one.latency, other.latency))

    # -- parts and sums

    def subset(self, devices: Iterable[int]) -> Cluster:
        """The cluster of these devices alone, in their order in this one.

        Raises:
            ClusterError: there is none, or no such device.
        """
        chosen = sorted(set(devices))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size:
            raise ClusterError(
                "a part of a cluster has at least one device, and all are in the cluster",
                f"devices {chosen[:8]} of {self.size}",
                f"choose from 0 to {self.size - 1}",
            )
        inside: dict[int, list[int]] = {}
        for device in chosen:
            inside.setdefault(self.node_of(device), []).append(device)
        nodes = [
            replace(self.nodes[i], count=len(here), nics=len({self.nic_of(d) for d in here}))
            for i, here in inside.items()
        ]
        matrix = self.matrix
        if matrix is not None:
            matrix = Matrix(part(matrix.bandwidth, chosen), part(matrix.latency, chosen))
        types = tuple(t for t in self.types if any(node.device == t.name for node in nodes))
        return replace(self, types=types, nodes=tuple(nodes), matrix=matrix)

    @classmethod
    def joined(cls, clusters: Sequence[Cluster]) -> Cluster:
        """Their nodes in one cluster, joined by their network cards.

        Raises:
            ClusterError: two of them mean different devices by one name, or one has a matrix of links.
        """
        if len(clusters) == 1:
            return clusters[0]
        types: dict[str, DeviceType] = {}
        for cluster in clusters:
            if cluster.matrix is not None:
                raise ClusterError(
                    "clusters with a matrix of links are not joined: nobody knows the links between them",
                    f"a matrix of {cluster.size} devices",
                    "give its nodes intra_ and inter_gbit_per_s instead of `links`",
                )
            for t in cluster.types:
                if types.setdefault(t.name, t) != t:
                    raise ClusterError(
                        "a name means one type of device", f"{types[t.name]} and {t}", f"rename one {t.name!r}"
                    )
        nodes = tuple(node for cluster in clusters for node in cluster.nodes)
        return cls(tuple(types.values()), nodes, measured=all(c.measured for c in clusters))

    def __str__(self) -> str:
        """Nodes by kind: ``4 x p3.8xlarge (4 V100)``."""
        kinds: dict[tuple[str, int, str], int] = {}
        for node in self.nodes:
            key = (node.name, node.count, node.device)
            kinds[key] = kinds.get(key, 0) + 1
        return " + ".join(f"{n} x {name} ({count} {device})" for (name, count, device), n in kinds.items())

    # -- files

    def to_dict(self) -> dict[str, Any]:
        """As a file has it; `from_dict` reads it back."""
        made: dict[str, Any] = {
            "devices": {
                t.name: {
                    "memory_gib": written(t.memory_bytes, GIBI),
                    "peak_tflops": written(t.peak_flops, TERA),
                    "memory_gbytes_per_s": written(t.memory_bandwidth, GIGA),
                }
                for t in self.types
            },
            "nodes": [],
        }
        for i, node in enumerate(self.nodes):
            if i and node == self.nodes[i - 1]:
                made["nodes"][-1]["repeat"] = made["nodes"][-1].get("repeat", 1) + 1
            else:
                made["nodes"].append(write_node(node))
        if self.matrix is not None:
            made["links"] = {
                "gbit_per_s": [[written(x, GBIT) for x in row] for row in self.matrix.bandwidth],
                "latency_us": [[written(x, MICRO) for x in row] for row in self.matrix.latency],
            }
        if self.measured:
            made["measured"] = True
        return made

    def save(self, path: str | Path) -> None:
        """Write it, as JSON if the name ends so, else as YAML."""
        if Path(path).suffix == ".json":
            text = json.dumps(self.to_dict(), indent=1) + "\n"
        else:
            text = yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=118)
        Path(path).write_text(text)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Cluster:
        """Read what a file has.

        Raises:
            ClusterError: an unknown key, a missing one, a number that means nothing, a matrix that is not square.
        """
        top = record(given, "a cluster", ("devices", "nodes", "links", "measured"), ("devices", "nodes"))
        devices = top["devices"]
        if not isinstance(devices, Mapping) or not devices:
            raise ClusterError("`devices` describes each device type by its name", repr(devices), _DEVICE)
        types = tuple(read_type(str(name), t) for name, t in devices.items())
        matrix = read_matrix(top["links"]) if top.get("links") is not None else None
        nodes: list[Node] = []
        for i, n in enumerate(items(top["nodes"], "`nodes`")):
            nodes += read_nodes(n, f"nodes[{i}]", sum(node.count for node in nodes), matrix)
        measured = top.get("measured", False)
        if not isinstance(measured, bool):
            raise ClusterError("`measured` is true or false", repr(measured), "leave it out for a data sheet's numbers")
        return cls(types, tuple(nodes), matrix, measured=measured)

    @classmethod
    def from_file(cls, source: str | Path, nodes: int | None = None) -> Cluster:
        """Read a file, or ready ones: ``8xh100``, ``p3.8xlarge*3``, ``p3.8xlarge*3 + mine.yaml``.

        Args:
            source: a path, or names of ready files and paths with ``*`` before a number of times and ``+`` between.
            nodes: how many times the nodes of a single file are there.

        Raises:
            ClusterError: no such file; and as `from_dict` and `joined`.
        """
        whole_path = Path(source).is_file()
        terms = [(str(source), 1)] if whole_path else [_term(term) for term in str(source).split("+")]
        if nodes is not None:
            if len(terms) > 1:
                raise ClusterError(
                    "`nodes` repeats a single file", f"{source} and nodes = {nodes}", "write how often: p3.8xlarge*3"
                )
            terms = [(terms[0][0], terms[0][1] * whole(nodes, "`nodes`"))]
        return cls.joined([read for name, times in terms for read in [_read(name)] * times])


def ready() -> list[str]:
    """Names of the ready files."""
    return sorted(path.stem for path in READY.glob("*.yaml"))


# ---- reading ---------------------------------------------------------------------------------------------------


def _term(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\s*(.+?)\s*(?:\*\s*(\S+))?\s*", text)
    if found is None or (found[2] is not None and not (found[2].isdecimal() and 0 < int(found[2]) <= MANY)):
        raise ClusterError("a term of a cluster is NAME or NAME*NUMBER", repr(text), "write p3.8xlarge*3+g4dn.12xlarge")
    return found[1], int(found[2] or 1)


def _read(name: str) -> Cluster:
    path = Path(name)
    if not path.is_file() and "/" not in name:
        path = READY / f"{name}.yaml"
    if not path.is_file():
        raise ClusterError("a cluster is a file or the name of a ready one", repr(name), nearest(name, ready()))
    try:
        text = path.read_text()
        given = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ClusterError(
            "a cluster file is YAML, or JSON if its name says so", f"{path}: {error}", "correct it there"
        ) from None
    return Cluster.from_dict(given)


# ---- checks ----------------------------------------------------------------------------------------------------


def _check(cluster: Cluster) -> None:
    names = [t.name for t in cluster.types]
    for t in cluster.types:
        for name in ("memory_bytes", "peak_flops", "memory_bandwidth"):
            number(getattr(t, name), f"{name} of device {t.name!r}")
        if names.count(t.name) > 1:
            raise ClusterError("device types have different names", f"{t.name!r} twice", "rename one")
    if not cluster.nodes:
        raise ClusterError("a cluster has at least one node", "none", "add one with a device and a count")
    if cluster.size > MANY:
        raise ClusterError(f"a cluster has at most {MANY} devices", f"{cluster.size}", "give a smaller count or repeat")
    for i, node in enumerate(cluster.nodes):
        where = f"nodes[{i}] ({node.name})"
        whole(node.count, f"count of {where}")
        whole(node.nics, f"nics of {where}")
        if node.device not in names:
            raise ClusterError("nodes hold device types that are described", f"{node.device!r} in {where}",
                               nearest(node.device, names) if names else "describe it under `devices`")  # fmt: skip
        if node.nics > node.count:
            raise ClusterError(
                "each network card has a device", f"{node.nics} for {node.count} in {where}", "give nics up to count"
            )
        needs = cluster.matrix is None
        check_link(node.intra, f"intra_gbit_per_s of {where}", needs and node.count > 1)
        check_link(node.nic, f"inter_gbit_per_s of {where}", needs and len(cluster.nodes) > 1)
    if cluster.matrix is not None:
        check_matrix(cluster.matrix, cluster.size)
