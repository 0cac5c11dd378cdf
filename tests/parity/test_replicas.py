"""Pipelines times data-parallel replicas, in every placement: the gradients of one process over the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Pool

STEPS, SAMPLES, WIDTH = 3, 12, 8


class Tied(nn.Module):
    """First and last layer share their weight; one parameter is used by every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.extra if extra else x


def batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + step)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Tied().double()


def alone(seed: int, accumulate: int) -> list[dict[str, Tensor | None]]:
    model = make(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[dict[str, Tensor | None]] = []
    for step in range(STEPS):
        if step % accumulate == 0:
            optimizer.zero_grad()
        x, y = batch(step, seed)
        F.mse_loss(model(x, step % 2 == 1), y).backward()
        seen.append(copy.deepcopy({n: p.grad for n, p in model.named_parameters()}))
        if (step + 1) % accumulate == 0:
            optimizer.step()
    return seen


def replicated(degree: int, placement: str, seed: int, accumulate: int) -> list[dict[str, Tensor | None]]:
    import smpar as smp

    smp.init({"pipeline_parallel_degree": degree, "microbatches": 3, "placement_strategy": placement, "ddp": True})
    model = smp.DistributedModel(make(seed + smp.dp_rank()))  # replica 0's parameters count
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, extra: bool) -> Tensor:
        loss = F.mse_loss(model(x, extra), y)
        model.backward(loss)
        return loss

    seen: list[dict[str, Tensor | None]] = []
    for step in range(STEPS):
        if step % accumulate == 0:
            optimizer.zero_grad()
        x, y = (t.chunk(smp.dp_size())[smp.dp_rank()] for t in batch(step, seed))
        train(model, x, y, step % 2 == 1)
        seen.append(copy.deepcopy({n: p.grad for n, p in model.local_named_parameters()}))
        if (step + 1) % accumulate == 0:
            optimizer.step()
    return seen


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("degree", "placement"),
    [(2, "DPT"), (2, "TPD"), (2, "PDT"), (1, "cluster"), (1, "spread")],
)
def test_replicas_have_the_gradients_of_one_process(
    pool: Pool, seed: int, degree: int, placement: str, accumulate: int
) -> None:
    want = alone(seed, accumulate)
    ranks = pool.run(4, replicated, degree, placement, seed, accumulate)
    for step, expected in enumerate(want):
        names = {name for rank in ranks for name in rank[step]}
        assert names == set(expected)
        for rank in ranks:
            for name, gradient in rank[step].items():
                right = expected[name]
                assert (gradient is None) == (right is None), (step, name)
                if gradient is not None and right is not None:
                    assert torch.allclose(gradient, right, rtol=1e-9, atol=1e-11), (step, name)
