"""Models of transformers, divided over a tensor-parallel group, equal the undivided ones."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.harness import Pool
from tests.tensor.family_models import NAMED, PLANNED, Sizes, inputs_of, made

MODES = {
    f"{optimize}-{'joined' if not prescaled else 'prescaled'}": {"optimize": optimize, "prescaled_batch": prescaled}
    for optimize in ("speed", "memory")
    for prescaled in (False, True)
}


def divided(model: nn.Module) -> nn.Module:
    """The model with its base models divided, in place."""
    from smpar.nn.families import divide_model, family_of
    from smpar.nn.group import TensorGroup

    found = [m for m in model.modules() if family_of(m) is not None]
    assert found
    for base in found:
        divide_model(base, TensorGroup.current())
    return model


def gradients(model: nn.Module, mean: bool) -> dict[str, Tensor]:
    """By name, as the reducer leaves them: the mean over the group of all but those of slices."""
    from smpar.slices import slicing_of

    found = {}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if mean and slicing_of(p) is None:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        found[name] = grad
    return found


def compare(name: str, seed: int, ranks: int, embedded: bool, joined: bool) -> None:
    """Loss, and gradients of parameters and inputs, of a divided model and of the undivided one."""
    from smpar.slices import slicing_of

    rank, draw = dist.get_rank(), random.Random(seed)
    sizes = Sizes.draw(draw, ranks)
    whole = made(name, seed, sizes)
    model = divided(copy.deepcopy(whole))
    inputs = inputs_of(name, seed + (rank if joined else 0), sizes, 2, embedded)
    theirs = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in inputs.items()}
    loss, want = model(**inputs).loss, whole(**theirs).loss
    loss.backward()
    want.backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if loss.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}

    def check(got: Tensor, wanted: Tensor, what: str) -> None:
        torch.testing.assert_close(got, wanted, **tolerance, msg=lambda m: f"{name}, {sizes}, {what}: {m}")

    check(loss, want, "loss")
    for key, value in inputs.items():
        if value.requires_grad:
            check(value.grad, theirs[key].grad, key)
    got, wanted = gradients(model, mean=True), gradients(whole, mean=True)
    assert any(slicing_of(p) is not None for p in model.parameters())
    for key, p in model.named_parameters():
        slicing = slicing_of(p)
        check(got[key], wanted[key] if slicing is None else slicing.take(wanted[key], rank), key)


def compare_all(names: list[str], seed: int, ranks: int, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Runs in the worker processes."""
    import smpar as smp

    smp.init({"tensor_parallel_degree": ranks, **config})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for name in names:
            for embedded in (False, True):
                compare(name, seed, ranks, embedded, not config["prescaled_batch"])
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_families_equal_the_undivided_model(pool: Pool, seed: int, ranks: int, mode: str) -> None:
    pool.run(ranks, compare_all, list(NAMED), seed, ranks, MODES[mode], torch.float64, timeout=120.0)
