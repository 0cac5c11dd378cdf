"""Counted costs: seconds, bytes and weights' parts of layers small enough to count by hand."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from smpar.planner.cluster import DeviceType
from smpar.planner.hardware import Reached
from smpar.probe.counted import SIZES, count_profile
from smpar.probe.model import profile_model
from tests.cli.entries import BLOCKS, Tower, tower

EXACT = Reached(1.0, 1.0, 0.0)


def layers_of(draw: random.Random, count: int) -> nn.Sequential:
    widths = [draw.randint(20, 40) for _ in range(count + 1)]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def test_products_take_their_flops_where_memory_is_fast(seed: int) -> None:
    model = layers_of(random.Random(seed), 30)
    first: nn.Linear = model[0]  # type: ignore[assignment]
    peak, bandwidth = 1e6, 1e15
    profile = count_profile(model, [torch.randn(3, first.in_features)], {}, [DeviceType("d", 1, peak, bandwidth)],
                            reached=EXACT)  # fmt: skip
    (times,) = profile.times
    assert times.microbatches == tuple(map(float, SIZES)) and profile.size == 30
    for i, layer in enumerate(model):
        elements = layer.weight.numel()
        for row, size in enumerate(SIZES):
            forward = 2 * size * elements / peak
            assert times.forward[row][i] == pytest.approx(forward, rel=1e-6)
            assert times.backward[row][i] == pytest.approx(2 * forward, rel=1e-4)
            assert times.weight[row][i] == pytest.approx(forward, rel=1e-6)
        assert profile.layers[i].parameters == elements
        assert profile.layers[i].saved == 4 * layer.in_features  # its input, and no parameter
        assert profile.layers[i].output == 4 * layer.out_features


def test_products_take_their_bytes_where_memory_is_slow(seed: int) -> None:
    model = layers_of(random.Random(seed), 30)
    first: nn.Linear = model[0]  # type: ignore[assignment]
    launch, bandwidth = 1e-3, 1e6
    profile = count_profile(model, [torch.randn(3, first.in_features)], {}, [DeviceType("d", 1, 1e18, bandwidth)],
                            reached=Reached(1.0, 0.5, launch))  # fmt: skip
    for i, layer in enumerate(model):
        moved = 4 * (layer.weight.numel() + SIZES[0] * (layer.in_features + layer.out_features))
        assert profile.times[0].forward[0][i] == pytest.approx(moved / (0.5 * bandwidth) + launch)


def test_devices_differ_by_their_rates_only(seed: int) -> None:
    devices = [DeviceType("slow", 1, 1e9, 1e8), DeviceType("fast", 1, 4e9, 4e8)]
    model, batch, step = tower()
    slow, fast = count_profile(model, batch, {}, devices, step, EXACT).times
    for a, b in zip(slow.forward[1], fast.forward[1], strict=True):
        assert a == pytest.approx(4 * b)


def test_a_model_on_no_device_counts_the_same(seed: int) -> None:
    model, batch, step = tower()
    with torch.device("meta"):
        meta = Tower()
    device = [DeviceType("d", 1, 1e9, 1e9)]
    assert count_profile(meta, batch, {}, device, step) == count_profile(model, batch, {}, device, step)


def test_layers_and_flow_are_those_of_a_measured_profile(seed: int) -> None:
    model, batch, step = tower()
    counted = count_profile(model, batch, {}, [DeviceType("d", 1, 1e9, 1e9)], step)
    measured = profile_model(model, batch, {}, [SIZES[1]], torch.device("cpu"), step)
    assert [x.name for x in counted.layers] == ["embed", *(f"blocks.{i}" for i in range(BLOCKS)), "head"]
    assert counted.tensors == measured.tensors and counted.tied == measured.tied
    for a, b in zip(counted.layers, measured.layers, strict=True):
        assert (a.name, a.parameters, a.saved, a.output) == (b.name, b.parameters, b.saved, b.output)


class Squared(nn.Module):
    """A product with a parameter, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.bmm(h, h)


def test_only_products_with_parameters_may_wait() -> None:
    peak = 1e3
    (times,) = count_profile(Squared(), [torch.randn(3, 8, 8)], {}, [DeviceType("d", 1, peak, 1e15)], None, EXACT).times
    of_one = 2 * SIZES[0] * 8 * 8 * 8 / peak
    assert sum(times.forward[0]) == pytest.approx(2 * of_one) and sum(times.weight[0]) == pytest.approx(of_one)
