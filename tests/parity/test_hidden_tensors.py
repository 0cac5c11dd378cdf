"""A module leaves a tensor in an object that is no container, and something else reads it there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import Pool

WIDTH = 5


class Box:
    """Opaque: no dataclass, no container."""

    def __init__(self) -> None:
        self.value: Any = None
        self.note: Any = None


class Layer(nn.Module):
    def __init__(self, writes: bool, reads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.writes, self.reads = writes, reads

    def forward(self, x: Tensor, box: Box) -> Tensor:
        x = torch.tanh(self.linear(x))
        box.note = x  # overwritten by each, read by none
        if self.reads and box.value is not None:
            x = x + box.value
        if self.writes:
            box.value = x
        return x


class Layers(nn.Module):
    """``reader``: the index of the layer that reads, or None: glue does, or nobody."""

    def __init__(self, reader: int | None, glue: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i == 0, i == reader) for i in range(4))
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        box = Box()
        for layer in self.layers:
            x = layer(x, box)
        return x + box.value if self.glue else x


def make(reader: int | None, glue: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Layers(reader, glue).double()


def loss_of(model: nn.Module, seed: int) -> float:
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return float(model(x).square().mean().detach())


def trained(reader: int | None, glue: bool, pinned: bool, seed: int) -> float:
    import smpar as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    module = make(reader, glue, seed)
    if pinned:
        for i, layer in enumerate(module.layers):  # type: ignore[arg-type]
            smp.set_partition(layer, i // 2)
    model = smp.DistributedModel(module)

    @smp.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return float(train(model, x).reduce_mean())


@pytest.mark.parametrize("pinned", [False, True], ids=["own partition", "by hand"])
@pytest.mark.parametrize(("reader", "glue"), [(3, False), (None, True)], ids=["another module", "glue"])
def test_reading_it_is_an_error(pool: Pool, seed: int, reader: int | None, glue: bool, pinned: bool) -> None:
    outcomes = pool.attempt(2, trained, reader, glue, pinned, seed)
    assert all(o.kind == "error" for o in outcomes)
    assert any("HiddenTensor" in o.text or "TooFewUnits" in o.text for o in outcomes)
    if pinned:
        assert any("Box.value, which layers.0 (Layer) sets" in o.text for o in outcomes)


@pytest.mark.parametrize("pinned", [False, True], ids=["own partition", "by hand"])
def test_nobody_reads_it(pool: Pool, seed: int, pinned: bool) -> None:
    want = loss_of(make(None, False, seed), seed)
    assert pool.run(2, trained, None, False, pinned, seed) == pytest.approx([want] * 2)
