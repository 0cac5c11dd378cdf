"""Models and training loops that the tests of what is seen share."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smpar as smp


class Block(nn.Module):
    def __init__(self, dim: int, rounds: int = 1) -> None:
        super().__init__()
        self.up, self.down, self.rounds = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = x + self.down(F.gelu(self.up(x)))
        return x


class Tied(nn.Module):
    """Embedding, blocks and a head that shares the embedding's weight; one module is never called."""

    def __init__(self, blocks: int = 4, dim: int = 16, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm, self.spare = nn.LayerNorm(dim), nn.Linear(3, 3)
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def batch(seed: int, samples: int = 12, words: int = 11) -> Tensor:
    return torch.randint(words, (samples, 5), generator=torch.Generator().manual_seed(seed))


@smp.step
def train(model: Any, ids: Tensor) -> Any:
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    model.backward(loss)
    return logits, loss


@smp.step
def train_by_value(model: Any, ids: Tensor) -> Tensor:
    """Reads the loss while it runs, so that no schedule fits."""
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    if loss > 0:
        model.backward(loss)
    return loss


def start(degree: int, **config: Any) -> Any:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 4, "ddp": True, **config})
    torch.manual_seed(0)
    return smp.DistributedModel(Tied())


def reports(degree: int, seed: int, config: dict[str, Any]) -> dict[str, Any]:
    """What report and timetable say before and after a step; what was printed; what the rank really holds."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        model = start(degree, **config)
        before = smp.report()
        train(model, batch(seed))
        after = smp.report()
    return {
        "before": before,
        "after": after,
        "printed": out.getvalue(),
        "drawing": smp.timetable(width=60),
        "svg": smp.timetable(svg=True),
        "held": sum(p.numel() for p in model.local_parameters()),
        "stage": smp.pp_rank(),
    }


def drawing_by_value(degree: int, seed: int) -> tuple[str, str]:
    model = start(degree)
    train_by_value(model, batch(seed))
    return smp.report(), smp.timetable()


def metrics(degree: int, seed: int, steps: int) -> tuple[str, list[float]]:
    """What three steps print with metrics on and one with them off; the mean losses."""
    model = start(degree)
    smp.metrics(True)
    out, losses = io.StringIO(), []
    with contextlib.redirect_stdout(out):
        for i in range(steps):
            losses.append(float(train(model, batch(seed + i, samples=10))[1].reduce_mean()))
        smp.metrics(False)
        train(model, batch(seed))
    return out.getvalue(), losses


def traced(degree: int, seed: int, steps: int, folder: str, fault: int = -1) -> int:
    """Trains with a trace; the last rank raises after step ``fault``. Returns the number of sends of this rank."""
    import os

    os.environ["SMPAR_TRACE"] = folder
    try:
        model = start(degree)
    finally:
        del os.environ["SMPAR_TRACE"]
    try:
        for i in range(steps):
            train(model, batch(seed + i))
            if i == fault and smp.rank() == smp.size() - 1:
                raise ValueError(f"fault of the test in {Path(folder).name}")
        return sum(model.pipeline.channels._sent)
    finally:
        smp.shutdown()


class Slow(nn.Module):
    """Takes much longer than its operations tell. Has no parts, so that it stays one unit."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim)

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for i in range(400_000):
            total += i
        return F.linear(x, self.weight)


def cut_with_slow_unit(measured: bool, seed: int) -> dict[str, Any]:
    """Stages of eight units of equal operations, of which the second is slow."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "memory_weight": 0.0})
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(8)
    module = nn.Sequential(nn.Linear(8, 8), Slow(8), *(nn.Linear(8, 8) for _ in range(6)), norm)
    assert norm.running_mean is not None
    mean, statistics = norm.running_mean, norm.running_mean.clone()
    model: Any = smp.DistributedModel(module, trace_execution_times=measured)
    before: dict[str, Any] = {}

    def partitioned(model: Any, optimizer: Any) -> None:
        before["mean"] = torch.equal(mean, statistics)
        before["grads"] = all(p.grad is None for p in module.parameters())

    model.register_post_partition_hook(partitioned)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    loss = step(model, torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))).reduce_mean()
    found = model.pipeline.partitioned
    return {
        "stages": found.stage_of_unit,
        "measured": found.graph.measured,
        "seconds": [u.seconds for u in found.graph.units],
        "loss": float(loss),
        **before,
    }
