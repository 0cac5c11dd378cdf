"""Replicas may get unlike batches at their first step; their pipelines are cut alike nevertheless.

            first batch      its own best cut   cut of all replicas
replica 0   short sequences      a b c d|e f        a b c d|e f
replica 1   long sequences       a b|c d e f        a b c d|e f
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Pool

WIDTH, SAMPLES, LAYERS = 6, 4, 8


class Attending(nn.Module):
    """Its first layers' cost grows with the square of the length; layers can be left out.

    The scale, which no module runs, is read behind those that are left out: on another stage in each replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() if i < 3 else nn.Linear(WIDTH, WIDTH) for i in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, without: tuple[int, ...]) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x * self.scale if i in without else x + torch.tanh(layer(x))
        return x


class Attention(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Attending().double()


def inputs(seed: int, replica: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + replica)
    return torch.randn(SAMPLES, length, WIDTH, dtype=torch.float64, generator=generator)


def replicated(
    config: dict[str, Any], options: dict[str, Any], lengths: list[int], without: list[tuple[int, ...]], seed: int
) -> dict[str, Tensor | None]:
    import smpar as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    model = smp.DistributedModel(make(seed), bucket_cap_mb=1e-4, **options)
    replica = smp.dp_rank()

    @smp.step
    def train(model: Any, x: Tensor, without: tuple[int, ...]) -> None:
        model.backward(F.mse_loss(model(x, without), torch.zeros_like(x)))

    for _ in range(2):
        model.zero_grad()
        train(model, inputs(seed, replica, lengths[replica]), without[replica])
    return {n: p.grad for n, p in model.local_named_parameters()}


def alone(lengths: list[int], without: list[tuple[int, ...]], seed: int) -> dict[str, Tensor | None]:
    model = make(seed)
    for replica, (length, out) in enumerate(zip(lengths, without, strict=True)):
        x = inputs(seed, replica, length)
        (F.mse_loss(model(x, out), torch.zeros_like(x)) / len(lengths)).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("config", [{}, {"pipeline": "zbv"}], ids=["1f1b", "zbv"])
@pytest.mark.parametrize(
    ("lengths", "without"),
    [([4, 300], [(), ()]), ([300, 4], [(), ()]), ([5, 5], [(0, 1, 2, 3), (4, 5, 6)])],
    ids=["long second", "long first", "other layers"],
)
@pytest.mark.parametrize("measured", [False, True], ids=["counted", "measured"])
def test_all_replicas_are_cut_as_the_first(
    pool: Pool,
    seed: int,
    config: dict[str, Any],
    lengths: list[int],
    without: list[tuple[int, ...]],
    measured: bool,
) -> None:
    want = alone(lengths, without, seed)
    ranks = pool.run(4, replicated, config, {"trace_execution_times": measured}, lengths, without, seed)
    assert {name for rank in ranks for name in rank} == set(want)
    held = [frozenset(rank) for rank in ranks]
    assert sorted(held.count(names) for names in set(held)) == [2, 2]  # a stage holds the same in both replicas
    for rank in ranks:
        for name, gradient in rank.items():
            right = want[name]
            assert (gradient is None) == (right is None), name
            if gradient is not None and right is not None:
                assert torch.allclose(gradient, right, rtol=1e-9, atol=1e-12), name
