"""Clusters that are not even, and GPTs for them, with times by a roofline, to compare plans on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benches._kernels import HALF, Work, attention, kept, modelled
from smpar.planner.cluster import Cluster, DeviceType, Link
from smpar.planner.cost import CostModel
from smpar.planner.hardware import Kernels, Runtime
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times

SIZES = (1.0, 64.0)
HOST = 5e-4
"""Seconds that the host takes for a block's forward: about forty launches and their Python."""


@dataclass(frozen=True)
class Gpt:
    """Sizes of a GPT whose first and last layers share a weight."""

    blocks: int
    width: int
    heads: int
    length: int = 1024
    vocabulary: int = 50304

    def profile(self, cluster: Cluster, runtime: Runtime, degrees: Sequence[int] = (1, 2, 4, 8)) -> Profile:
        """Its profile on the device types of a cluster.

        Args:
            degrees: of tensor parallelism, where nodes are so wide.
        """
        kernels = Kernels()
        hidden, table = float(self.length * self.width), float(self.vocabulary * self.width)
        logits = float(self.length * self.vocabulary)
        block = attention(self.length, self.length, self.width, self.heads, score=5)
        product = 2.0 * logits * self.width
        works = [
            Work(0.0, 4 * hidden, saved=kept(hidden), whole_saved=kept(hidden), divided=True),
            *(block,) * self.blocks,
            Work(
                product, 2 * logits, saved=kernels.logit_bytes * logits, weighted=product, divided=True, logits=logits
            ),
        ]
        names = ["embed", *(f"h.{i}" for i in range(self.blocks)), "head"]
        parameters = [table + hidden, *(12.0 * self.width**2 + 13 * self.width,) * self.blocks, table]
        layers = tuple(
            Layer(name, count, work.saved, 0.0, work.whole_saved, HALF * hidden)
            for name, count, work in zip(names, parameters, works, strict=True)
        )
        tensors = tuple(Tensor(i, (i + 1,), hidden) for i in range(len(layers) - 1))
        times = tuple(
            _times(works, device, tp, _intra(cluster, device) * runtime.intra, kernels)
            for device in cluster.types
            for tp in degrees
            if tp <= max(node.count for node in cluster.nodes if node.device == device.name)
        )
        return Profile(layers, tensors, times, (Tied((0, len(layers) - 1), table),))


@dataclass(frozen=True)
class Case:
    """A model to be trained on a cluster."""

    name: str
    cluster: Cluster
    gpt: Gpt
    global_batch: int

    def model(self, runtime: Runtime) -> CostModel:
        """Its cost model."""
        return CostModel(self.gpt.profile(self.cluster, runtime), self.cluster, runtime)


def cases() -> list[Case]:
    """Uneven ones: device types, network cards, both."""
    read = Cluster.from_file
    p3 = read("p3.8xlarge")
    cards = Cluster.joined([_carded(p3, gbit) for gbit in (100, 25, 10, 10)])
    return [
        Case("2 p4d + 2 p3.16xlarge", read("p4d*2 + p3.16xlarge*2"), Gpt(48, 1600, 25), 128),
        Case("4 V100 nodes, cards 100 25 10 10", cards, Gpt(24, 1024, 16), 32),
        Case("8xA100 + 4 g4dn.12xlarge", read("8xa100 + g4dn.12xlarge*4"), Gpt(36, 1280, 20), 96),
        Case("8xH100 + p4d + 2 p3.16xlarge", read("8xh100 + p4d + p3.16xlarge*2"), Gpt(48, 2048, 16), 128),
    ]


def thousand() -> Case:
    """1024 devices of three types, a model of 100 layers."""
    cluster = Cluster.from_file("8xh100*32 + p4d*48 + p3.16xlarge*48")
    return Case("1024: 32 8xH100 + 48 p4d + 48 p3.16xlarge", cluster, Gpt(98, 4096, 32, 2048), 1024)


def _carded(cluster: Cluster, gbit: float) -> Cluster:
    nodes = tuple(replace(n, nic=Link(gbit * 1e9 / 8, n.nic.latency)) for n in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _intra(cluster: Cluster, device: DeviceType) -> float:
    return min(node.intra.bandwidth for node in cluster.nodes if node.device == device.name)


def _times(works: Sequence[Work], device: DeviceType, tp: int, intra: float, kernels: Kernels) -> Times:
    lines = [modelled(work, HOST if work.collectives else HOST / 5, device, tp, intra, kernels) for work in works]
    return Times(
        device.name,
        tp,
        SIZES,
        *(tuple(tuple(line.at(m) for line in way) for m in SIZES) for way in zip(*lines, strict=True)),
    )
