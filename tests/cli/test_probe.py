"""`smpar probe` on several ranks writes one file, in which the links are those that were there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from smpar.cli import probe as module
from smpar.cli.main import main
from smpar.comm import channels
from smpar.comm.world import current
from smpar.planner.cluster import Cluster
from smpar.runtime.core import init
from tests.harness import Pool


def run_probe(path: str) -> int:
    return main(["probe", "-o", path])


def test_two_ranks_write_one_file(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    assert pool.run(2, run_probe, str(path)) == [0, 0]
    cluster = Cluster.from_file(path)
    assert cluster.size == 2 and len(cluster.nodes) == 1 and cluster.measured and cluster.matrix is None
    device = cluster.type_of(0)
    assert device.name == "cpu"
    assert 1e8 < device.memory_bytes < 1e14 and 1e8 < device.peak_flops < 1e14 and 1e7 < device.memory_bandwidth < 1e13
    assert 1e7 < cluster.link(0, 1).bandwidth < 1e12 and 0 <= cluster.link(0, 1).latency < 0.1


class Throttled:
    """Channels in which some pairs have so many bytes/s."""

    SPEED = 1e7

    def __init__(self, inner: channels.Channels, rank: int, slow: set[tuple[int, int]]) -> None:
        self._inner, self._rank, self._slow = inner, rank, slow

    def send(self, dst: int, tensor: torch.Tensor) -> None:
        if (min(dst, self._rank), max(dst, self._rank)) in self._slow:
            time.sleep(tensor.nbytes / self.SPEED)
        self._inner.send(dst, tensor)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def probe_throttled(size: int, slow: set[tuple[int, int]], machines: int) -> Cluster:
    plain = module.open_channels
    module.open_channels = lambda world, device: Throttled(plain(world, device), world.rank, slow)  # type: ignore[assignment, arg-type, return-value]
    try:
        init({"pipeline_parallel_degree": size})
        current().instance_id = current().rank * machines // size
        return module.probe(current(), torch.float32, (1 << 10, 1 << 16, 1 << 20))
    finally:
        module.open_channels = plain


def test_a_slow_link_is_seen_on_all_ranks(pool: Pool) -> None:
    found = pool.run(3, probe_throttled, 3, {(0, 2)}, 1)
    assert found[0] == found[1] == found[2]
    cluster: Cluster = found[0]
    assert cluster.matrix is not None
    assert cluster.link(0, 2).bandwidth == cluster.link(2, 0).bandwidth == pytest.approx(1e7, rel=0.3)
    assert min(cluster.link(0, 1).bandwidth, cluster.link(1, 2).bandwidth) > 2e7


def test_streams_that_do_not_slow_each_other_down_have_cards_of_their_own(pool: Pool) -> None:
    cluster: Cluster = pool.run(4, probe_throttled, 4, {(0, 2), (0, 3), (1, 2), (1, 3)}, 2)[0]
    assert [(node.count, node.nics) for node in cluster.nodes] == [(2, 2), (2, 2)]
    assert cluster.link(1, 2).bandwidth == pytest.approx(1e7, rel=0.3)


def test_alone_it_measures_the_device(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(1, run_probe, str(tmp_path / "one.json")) == [0]
    assert Cluster.from_file(tmp_path / "one.json").size == 1
