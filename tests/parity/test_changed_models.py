"""A model that the user changes between steps trains on as in one process; optimizer and partition are older."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.harness import Pool

WIDTH, SAMPLES, STEPS = 6, 8, 4


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        return x * self.scale


def layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def inner(model: Layers, index: int) -> Any:
    return model.layers[index][0]  # type: ignore[index]


def part_of_another_unit(model: Layers) -> None:
    model.layers[5][0] = inner(model, 0)  # type: ignore[index]


def another_unit(model: Layers) -> None:
    model.layers[5] = model.layers[0]


def weight_of_another_unit(model: Layers) -> None:
    inner(model, 0).weight = inner(model, 5).weight


def exchanged(model: Layers) -> None:
    model.layers[0], model.layers[5] = model.layers[5], model.layers[0]


def new_unit(model: Layers) -> None:
    model.layers[4] = layer()


def new_part(model: Layers) -> None:
    model.layers[4][0] = nn.Linear(WIDTH, WIDTH).double()  # type: ignore[index]


def new_weight_for_two(model: Layers) -> None:
    inner(model, 0).weight = inner(model, 5).weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))


def new_parameter_of_glue(model: Layers) -> None:
    model.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))


def appended(model: Layers) -> None:
    model.layers.append(layer())


def removed(model: Layers) -> None:
    del model.layers[1]


def normed(model: Layers) -> None:
    parametrizations.weight_norm(inner(model, 5))


CHANGES: list[Callable[[Layers], None]] = [
    part_of_another_unit, another_unit, weight_of_another_unit, exchanged, new_unit, new_part, new_weight_for_two,
    new_parameter_of_glue, appended, removed, normed,
]  # fmt: skip


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + step)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def trained(
    model: Layers, named: Callable[[], Any], optimizer: Any, change: Callable[[Layers], None], seed: int, run: Any
) -> list[dict[str, Tensor | None]]:
    """Gradients of each step, and the parameters after it; the change comes before the third."""
    seen: list[dict[str, Tensor | None]] = []
    for step in range(STEPS):
        if step == 2:
            torch.manual_seed(seed + 1)
            change(model)
        for _, p in named():
            p.grad = None
        run(*batch(seed, step))
        optimizer.step()
        seen.append({f"{n} {what}": t for n, p in named() for what, t in (("grad", p.grad), ("", p.detach().clone()))})
    return seen


def make(seed: int) -> Layers:
    torch.manual_seed(seed)
    return Layers().double()


def alone(change: Callable[[Layers], None], seed: int) -> list[dict[str, Tensor | None]]:
    model = make(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    return trained(model, model.named_parameters, optimizer, change, seed, run)


def piped(
    change: Callable[[Layers], None], config: dict[str, Any], seed: int
) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    import smpar as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    model = smp.DistributedModel(make(seed))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(F.mse_loss(model(x), y))

    def run(x: Tensor, y: Tensor) -> None:
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        train(model, x[mine], y[mine])

    seen = trained(model.module, model.local_named_parameters, optimizer, change, seed, run)  # type: ignore[arg-type]
    return seen, model.state_dict()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("ranks", "config"),
    [(2, {}), (2, {"static_mode": False}), (2, {"pipeline": "zbv"}), (4, {})],
    ids=["planned", "program order", "zbv", "replicas"],
)
def test_changed_between_steps(
    pool: Pool, seed: int, change: Callable[[Layers], None], ranks: int, config: dict[str, Any]
) -> None:
    want = alone(change, seed)
    results = pool.run(ranks, piped, change, config, seed)
    for step, expected in enumerate(want):
        assert {name for seen, _ in results for name in seen[step]} == set(expected)
        for seen, _ in results:
            for name, got in seen[step].items():
                right = expected[name]
                assert (got is None) == (right is None), (step, name)
                if got is not None and right is not None:
                    torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-11, msg=f"step {step}, {name}")
    for _, state in results:
        for name, tensor in state.items():
            right = want[-1].get(f"{name} ")
            if right is not None:
                torch.testing.assert_close(tensor, right, rtol=1e-9, atol=1e-11, msg=name)


def one_rank_changes(seed: int) -> None:
    import smpar as smp

    smp.init({"pipeline_parallel_degree": 2})
    change = part_of_another_unit if smp.rank() else removed
    model = smp.DistributedModel(make(seed))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(F.mse_loss(model(x), y))

    train(model, *batch(seed, 0))
    change(model.module)  # type: ignore[arg-type]
    train(model, *batch(seed, 1))


def test_changed_on_one_rank_only(pool: Pool, seed: int) -> None:
    for outcome in pool.attempt(2, one_rank_changes, seed):
        assert outcome.error == "ProgramsDisagree" and "modules" in outcome.text
