"""A step inside ``disable_saved_tensors_hooks`` trains as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import Pool

WIDTH = 5


class Layers(nn.Module):
    def __init__(self, refuse: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.refuse = refuse

    def forward(self, x: Tensor) -> Tensor:
        if self.refuse:
            with torch.autograd.graph.disable_saved_tensors_hooks("not in the model"):
                return self.run(x)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make(refuse: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Layers(refuse).double()


def gradients(config: dict[str, Any], inside: bool, seed: int) -> dict[str, Tensor]:
    import smpar as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    model = smp.DistributedModel(make(inside, seed))

    @smp.step
    def train(model: Any, x: Tensor) -> None:
        model.backward(model(x).square().mean())

    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if inside:
        train(model, x)
    else:
        with torch.autograd.graph.disable_saved_tensors_hooks("not in this step"):
            train(model, x)
    return {n: p.grad for n, p in model.local_named_parameters() if p.grad is not None}


@pytest.mark.parametrize("inside", [False, True], ids=["around the step", "in the model"])
@pytest.mark.parametrize("config", [{}, {"static_mode": False}, {"pipeline": "zb"}], ids=["planned", "order", "zb"])
def test_gradients(pool: Pool, seed: int, config: dict[str, Any], inside: bool) -> None:
    model = make(False, seed)
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    found = {name: grad for rank in pool.run(2, gradients, config, inside, seed) for name, grad in rank.items()}
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-10, atol=1e-12)
