"""Tensors written in place after they were sent to another stage: the other stage gets them as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Pool

WIDTH, ROWS = 64, 512  # large enough for a transfer to be under way when the write comes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Shift(nn.Module):
    """Keeps nothing of its input for backward, so that torch allows the write."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Rewrites(nn.Module):
    """``h`` goes to the far stage, then changes at home: directly, through a view, or inside a module."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.near, self.far, self.back = Layer(), Shift(), Layer()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.near(x) * 1
        there = self.far(h)
        if self.how == "glue":
            h.mul_(3)
        elif self.how == "view":
            h.view(-1)[::2].mul_(3)
        else:
            h = self.relu(h)
        return self.back(h) + there


def steps(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)) for _ in range(3)]  # type: ignore[misc]


def make(how: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Rewrites(how).double()


def alone(how: str, seed: int) -> list[dict[str, Tensor]]:
    model, seen = make(how, seed), []
    for x, y in steps(seed):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return seen


def pipelined(how: str, seed: int, static: bool) -> list[dict[str, Tensor]]:
    import smpar as smp

    smp.init({
        "pipeline_parallel_degree": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0,
        "static_mode": static,
    })  # fmt: skip
    model = smp.DistributedModel(make(how, seed))
    smp.set_partition(model.module.far, 1)

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    seen = []
    for x, y in steps(seed):
        for p in model.parameters():
            p.grad = None
        train(model, x, y)
        seen.append({n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None})
    return seen


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("how", ["glue", "view", "module"])
def test_the_other_stage_gets_a_tensor_as_it_was(pool: Pool, seed: int, how: str, static: bool) -> None:
    want = alone(how, seed)
    for rank in pool.run(2, pipelined, how, seed, static):
        for got, expected in zip(rank, want, strict=True):
            assert got
            for name, gradient in got.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-11)
