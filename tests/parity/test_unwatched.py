"""Without a pipeline, steps that draw no random numbers run unwatched; all that a user can see stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp
from smpar.runtime.draws import Draws
from smpar.trace.draws import SeedMode, seed_generators

WIDTH = 6


def attend(x: Tensor, dropout: float = 0.0) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)


CASES: dict[str, tuple[Any, bool]] = {
    "linear": (lambda x: x @ x.transpose(-1, -2), False),
    "attention": (attend, False),
    "attention with dropout": (lambda x: attend(x, 0.5), True),
    "dropout": (lambda x: F.dropout(x, 0.5), True),
    "dropout in evaluation": (lambda x: F.dropout(x, 0.5, training=False), False),
    "noise after attention": (lambda x: attend(x) + torch.rand_like(x), True),
}


@pytest.mark.parametrize("name", CASES)
def test_only_steps_that_draw_are_watched(name: str, seed: int) -> None:
    """The mode on top of the stack tells; draws are those of a step that is always watched."""
    function, draws = CASES[name]
    torch.manual_seed(seed)
    x = torch.randn(2, 3, WIDTH)
    told = Draws()
    watched, results = [], []
    for _ in range(3):
        seed_generators(seed)
        with told.watching("kind", lambda: 1.0):
            watched.append(torch._C._len_torch_function_stack() > 0)
            results.append(function(x))
    assert watched == [True, draws, draws]
    seed_generators(seed)
    with SeedMode():
        expected = function(x)
    assert all(torch.equal(result, expected) for result in results)


def test_a_step_that_comes_to_draw_is_watched_from_then_on(seed: int) -> None:
    told = Draws()
    watched = []
    for draws in (False, False, True, True):
        seed_generators(seed)
        with told.watching("kind", lambda: 1.0):
            watched.append(torch._C._len_torch_function_stack() > 0)
            if draws:
                torch.rand(1)
    assert watched == [True, False, False, True]


def test_kinds_differ_in_function_arguments_and_modes() -> None:
    x, y = torch.ones(2), torch.ones(3)

    def other() -> None:
        pass

    same = Draws.kind(attend, {"x": x, "flag": True}, (True,))
    assert same == Draws.kind(attend, {"x": y, "flag": True}, (True,))
    assert same != Draws.kind(attend, {"x": x, "flag": False}, (True,))
    assert same != Draws.kind(attend, {"x": x, "flag": True}, (False,))
    assert same != Draws.kind(other, {"x": x, "flag": True}, (True,))
    with torch.no_grad():
        assert same != Draws.kind(attend, {"x": x, "flag": True}, (True,))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_users_own_backward_counts_by_its_share(microbatches: int, seed: int) -> None:
    """``loss.backward()`` in the step, on uneven microbatches: the whole batch's gradient, watched and unwatched."""
    torch.manual_seed(seed)
    module = nn.Linear(WIDTH, 1).double()
    x, y = torch.randn(7, WIDTH, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    want = torch.autograd.grad(F.mse_loss(module(x), y), list(module.parameters()))
    plain = torch.Tensor.backward
    smp.init({"microbatches": microbatches})
    try:
        model = smp.DistributedModel(module)

        @smp.step
        def train(model: Any, x: Tensor, y: Tensor, given: bool) -> None:
            loss = F.mse_loss(model(x), y)
            if given:
                loss.backward(torch.ones_like(loss))
            else:
                loss.backward()

        for given in (False, False, True, True):
            model.zero_grad()
            train(model, x, y, given)
            for p, right in zip(module.parameters(), want, strict=True):
                assert p.grad is not None and torch.allclose(p.grad, right, rtol=1e-12, atol=1e-14)
        assert torch.Tensor.backward is plain
    finally:
        smp.shutdown()
