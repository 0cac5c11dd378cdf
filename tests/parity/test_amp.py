"""Loss scaling over the stages: an overflow that one rank alone sees skips the step on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Pool

STEPS, OVERFLOW = 4, 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    return (x * float("inf") if step == OVERFLOW else x), y


def alone(seed: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    torch.manual_seed(seed)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    states, scales = [], []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        states.append({n: t.clone() for n, t in model.state_dict().items()})
        scales.append(scaler.get_scale())
    return states, scales


def pipelined(degree: int, seed: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    import smpar as smp

    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2})
    torch.manual_seed(seed)
    model = smp.DistributedModel(Stack())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        model.backward(scaler.scale(loss))
        return loss

    states, scales = [], []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        train(model, x, y)
        if step % 2:
            scaler.unscale_(optimizer)
        if step == OVERFLOW:  # only the first stage shall see it
            for p in model.local_parameters():
                if smp.pp_rank() > 0 and p.grad is not None:
                    p.grad.zero_()
        scaler.step(optimizer)
        scaler.update()
        states.append({n: t.clone() for n, t in model.state_dict().items()})
        scales.append(scaler.get_scale())
    return states, scales


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, seed: int, degree: int) -> None:
    states, scales = alone(seed)
    for got_states, got_scales in pool.run(degree, pipelined, degree, seed):
        assert got_scales == scales
        for got, want in zip(got_states, states, strict=True):
            for name in want:
                torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
