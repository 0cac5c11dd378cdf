"""A cluster: what a file says, which link joins which devices, and what a wrong file is told."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from smpar.errors import ClusterError
from smpar.planner.cluster import HERE, Cluster, Link, Matrix, ready

V100 = {"memory_gib": 16, "peak_tflops": 125, "memory_gbytes_per_s": 900}
T4 = {"memory_gib": 14, "peak_tflops": 65, "memory_gbytes_per_s": 300}


def mixed() -> dict[str, Any]:
    """Devices 0 1 2 | 3 4 5 | 6 7 8 9 in three nodes; the last has two network cards, for 6 7 and 8 9."""
    return {
        "devices": {"V100": dict(V100), "T4": dict(T4)},
        "nodes": [
            {"name": "big", "device": "V100", "count": 3, "repeat": 2, "intra_gbit_per_s": 200, "intra_latency_us": 10,
             "inter_gbit_per_s": 10, "inter_latency_us": 50},
            {"name": "small", "device": "T4", "count": 4, "intra_gbit_per_s": 60, "inter_gbit_per_s": 25,
             "inter_latency_us": 20, "nics": 2},
        ],
    }  # fmt: skip


def table(size: int, value: float) -> list[list[float]]:
    return [[0.0 if a == b else value for b in range(size)] for a in range(size)]


def test_devices_are_counted_through_the_nodes() -> None:
    cluster = Cluster.from_dict(mixed())
    assert cluster.size == 10 and cluster.starts == (0, 3, 6)
    assert [cluster.node_of(d) for d in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert [cluster.type_of(d).name for d in range(10)] == ["V100"] * 6 + ["T4"] * 4
    assert [cluster.nic_of(d) for d in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert cluster.same_node(3, 5) and not cluster.same_node(2, 3)
    assert str(cluster) == "2 x big (3 V100) + 1 x small (4 T4)"


def test_units_of_a_file() -> None:
    v100 = Cluster.from_dict(mixed()).type_of(0)
    assert (v100.memory_bytes, v100.peak_flops, v100.memory_bandwidth) == (16 * 2**30, 125e12, 900e9)
    link = Cluster.from_dict(mixed()).link(0, 3)
    assert link.bandwidth == 10e9 / 8 and math.isclose(link.latency, 50e-6)
    assert math.isclose(link.seconds(1.25e9), 1.0 + 50e-6)


def test_a_link_is_the_nodes_own_or_the_slower_card() -> None:
    cluster = Cluster.from_dict(mixed())
    inside, thin, thick = cluster.nodes[0].intra, cluster.nodes[0].nic, cluster.nodes[2].nic
    assert cluster.link(0, 2) == inside and cluster.link(6, 9) == cluster.nodes[2].intra
    assert cluster.link(2, 3) == thin
    assert cluster.link(0, 9) == cluster.link(9, 0) == Link(thin.bandwidth, thin.latency)
    assert thick.bandwidth > thin.bandwidth and thick.latency < thin.latency
    assert cluster.link(4, 4) == HERE and cluster.link(4, 4).seconds(1e12) == 0.0


def test_a_matrix_speaks_for_every_pair(seed: int) -> None:
    rng = random.Random(seed)
    given = mixed()
    for node in given["nodes"]:
        for key in [k for k in node if k.startswith(("intra", "inter"))]:
            del node[key]
    gbit = [[rng.uniform(1, 100) for _ in range(10)] for _ in range(10)]
    given["links"] = {"gbit_per_s": gbit, "latency_us": table(10, 5.0)}
    cluster = Cluster.from_dict(given)
    assert all(cluster.link(a, b).bandwidth == gbit[a][b] * 1.25e8 for a in range(10) for b in range(10) if a != b)
    inside = [gbit[a][b] for a in (3, 4, 5) for b in (3, 4, 5) if a != b]
    outside = [gbit[a][b] for a in (3, 4, 5) for b in (0, 1, 2, 6, 7, 8, 9)]
    assert cluster.nodes[1].intra.bandwidth == max(inside) * 1.25e8, "a node can do what its best pair can"
    assert cluster.nodes[1].nic.bandwidth == max(outside) * 1.25e8
    part = cluster.subset([8, 1, 4])
    assert [[part.link(a, b) for b in range(3)] for a in range(3)] == [
        [cluster.link(a, b) for b in (1, 4, 8)] for a in (1, 4, 8)
    ]


def test_a_part_keeps_devices_links_and_cards() -> None:
    cluster = Cluster.from_dict(mixed())
    part = cluster.subset([0, 1, 6, 8])
    assert str(part) == "1 x big (2 V100) + 1 x small (2 T4)"
    assert part.link(0, 2) == cluster.link(0, 6) and part.nodes[1].nics == 2
    assert cluster.subset([7]).types == (cluster.types[1],)
    assert cluster.subset(range(10)) == cluster


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_is_written_is_read_back(suffix: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for name in ready():
        cluster = Cluster.from_file(name, nodes=rng.randint(1, 4))
        cluster.save(tmp_path / f"{name}.{suffix}")
        assert Cluster.from_file(tmp_path / f"{name}.{suffix}") == cluster
    given = mixed()
    given["measured"] = True
    given["nodes"][0]["inter_gbit_per_s"] = round(rng.uniform(1, 100), 4)
    given["links"] = {key: [[round(rng.uniform(1, 99), 4) for _ in range(10)] for _ in range(10)]
                      for key in ("gbit_per_s", "latency_us")}  # fmt: skip
    cluster = Cluster.from_dict(given)
    cluster.save(tmp_path / f"matrix.{suffix}")
    assert Cluster.from_file(tmp_path / f"matrix.{suffix}") == cluster and cluster.measured


def test_ready_files() -> None:
    assert ready() == ["8xa100", "8xh100", "g4dn.12xlarge", "p3.16xlarge", "p3.8xlarge", "p4d"]
    three = Cluster.from_file("p3.8xlarge", nodes=3)
    assert str(three) == "3 x p3.8xlarge (4 V100)" and three.size == 12 and three == Cluster.from_file("p3.8xlarge*3")
    both = Cluster.from_file("p3.8xlarge*3 + g4dn.12xlarge")
    assert str(both) == "3 x p3.8xlarge (4 V100) + 1 x g4dn.12xlarge (4 T4)"
    assert both.link(0, 15).bandwidth == 10e9 / 8
    h100 = Cluster.from_file("8xh100", nodes=2)
    assert len({h100.nic_of(d) for d in range(16)}) == 16, "a card each"


def test_own_files_are_joined_with_ready_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps(mixed()))  # JSON is YAML
    with pytest.raises(ClusterError, match="a name means one type of device"):
        Cluster.from_file(f"{tmp_path}/mine.yaml*2+p3.8xlarge")
    assert Cluster.from_file(f"{tmp_path}/mine.yaml*2+p4d").size == 28


def test_a_number_may_be_written_without_a_dot(tmp_path: Path) -> None:
    device = "{memory_gib: 8, peak_tflops: 5e-2, memory_gbytes_per_s: 1e1}"
    (tmp_path / "one.yaml").write_text(f"{{devices: {{cpu: {device}}}, nodes: [{{device: cpu, count: 1}}]}}")
    cluster = Cluster.from_file(tmp_path / "one.yaml")
    assert cluster.types[0].peak_flops == 5e10 and cluster.types[0].memory_bandwidth == 1e10


def without(path: str) -> dict[str, Any]:
    return changed(path, None)


def changed(path: str, value: Any) -> dict[str, Any]:
    """`mixed` with one value put at ``key.key``, or taken away."""
    given: Any = mixed()
    top, keys = given, [int(k) if k.isdecimal() else k for k in path.split(".")]
    for key in keys[:-1]:
        given = given[key]
    if value is None:
        del given[keys[-1]]
    else:
        given[keys[-1]] = value
    return top


def ragged() -> list[list[float]]:
    rows = table(10, 10.0)
    rows[4].pop()
    return rows


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (changed("nodes.0.count", 0), "nodes[0].count is a whole number of at least 1"),
        (changed("nodes.1.count", -4), "-4 (int)"),
        (changed("nodes.0.count", 2.5), "2.5 (float)"),
        (changed("nodes.0.repeat", 0), "nodes[0].repeat"),
        (changed("nodes", []), "`nodes` is a list of at least one"),
        (changed("nodes.0.device", "V10"), "did you mean 'V100'?"),
        (changed("nodes.0.intra_gbits_per_s", 1), "did you mean 'intra_gbit_per_s'?"),
        (changed("device", {}), "did you mean 'devices'?"),
        (changed("devices", {}), "describes each device type"),
        (changed("devices.T4.memory_gb", 14), "did you mean 'memory_gib'?"),
        (without("devices.T4.peak_tflops"), "add 'peak_tflops'"),
        (changed("devices.T4.peak_tflops", float("nan")), "peak_tflops of 'T4' is a finite number"),
        (changed("devices.T4.memory_gib", "much"), "'much' (str)"),
        (changed("nodes.0.inter_gbit_per_s", 0), "nodes[0].inter_gbit_per_s is a finite number, above 0"),
        (changed("nodes.0.intra_gbit_per_s", float("inf")), "inf (float)"),
        (changed("nodes.0.inter_latency_us", -1), "nodes[0].inter_latency_us is a finite number, 0 or more"),
        (without("nodes.0.intra_gbit_per_s"), "intra_latency_us only"),
        (without("nodes.1.intra_gbit_per_s"), "no intra_gbit_per_s of nodes[2] (small)"),
        (changed("nodes.1.nics", 5), "each network card has a device"),
        (changed("links", {"gbit_per_s": ragged()}), "10 rows of 9 and 10 numbers"),
        (changed("links", {"gbit_per_s": table(10, 1.0)[:9]}), "9 rows of 10 numbers"),
        (changed("links", {"gbit_per_s": table(9, 1.0)}), "9 rows of 9 numbers for 10 devices"),
        (changed("links", {"gbit_per_s": table(10, 1.0), "latency_us": table(9, 1.0)}), "links.latency_us is square"),
        (changed("links", {"gbit_per_s": table(10, 0.0)}), "links.gbit_per_s[0][1] is a finite number, above 0"),
        (changed("links", {"latency_us": table(10, 1.0)}), "no 'gbit_per_s'"),
        (changed("measured", "yes"), "`measured` is true or false"),
    ],
)  # fmt: skip
def test_wrong_files(given: dict[str, Any], found: str) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.from_dict(given)
    assert found in str(error.value) and error.value.fix


def test_wrong_sources(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("nodes: [")
    for source, found in [
        ("p3.8xlage", "did you mean 'p3.8xlarge'?"),
        ("p3.8xlarge*0", "NAME*NUMBER"),
        ("p3.8xlarge*x", "NAME*NUMBER"),
        ("p3.8xlarge+", "NAME*NUMBER"),
        ("../cluster", "known are"),
        (f"{tmp_path}/broken.yaml", "a cluster file is YAML"),
    ]:
        with pytest.raises(ClusterError) as error:
            Cluster.from_file(source)
        assert found in str(error.value)
    with pytest.raises(ClusterError, match="repeats a single file"):
        Cluster.from_file("p4d+8xh100", nodes=2)


def test_parts_made_in_code_are_checked_too() -> None:
    good = Cluster.from_dict(mixed())
    with pytest.raises(ClusterError, match="different names"):
        Cluster(good.types + good.types[:1], good.nodes)
    with pytest.raises(ClusterError, match="at least one node"):
        Cluster(good.types, ())
    rows = tuple(tuple(row) for row in table(10, 1.0))
    with pytest.raises(ClusterError, match="square"):
        Cluster(good.types, good.nodes, Matrix(rows[:3], rows))
    for devices in ([], [10], [-1, 0]):
        with pytest.raises(ClusterError, match="a part of a cluster"):
            good.subset(devices)
    square = Cluster(good.types, good.nodes, Matrix(rows, rows))
    with pytest.raises(ClusterError, match="not joined"):
        Cluster.joined([square, good])
