"""Compares a divided model with the undivided one: loss, gradients of its inputs and of each parameter."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from tests.tensor.family_models import Sizes, inputs_of, made


class NoLess(TorchFunctionMode):
    """Keeps float64 where a model goes over to float32, as norms and routers do, so that rounding hides nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


Call = Callable[[nn.Module, dict[str, Any]], Tensor]


def divided(model: nn.Module) -> nn.Module:
    """The model with its base models divided, and the linear that gives logits, in place."""
    from smpar.nn.families import divide_model, family_of, heads_of
    from smpar.nn.group import TensorGroup
    from smpar.nn.vocabulary import divide_head

    found = [m for m in model.modules() if family_of(m) is not None]
    assert found
    for base in found:
        divide_model(base, TensorGroup.current())
    head = heads_of(model)
    if head is not None:
        divide_head(head, TensorGroup.current())
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, as the reducer leaves them: the mean over the group of all but those of slices."""
    from smpar.slices import slicing_of

    found = {}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if slicing_of(p) is None:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        found[name] = grad
    return found


def loss_of(model: nn.Module, inputs: dict[str, Any], result: Any = None) -> Tensor:
    """Cross entropy in the model's dtype (transformers' own is in float32), and what its experts add.

    Args:
        result: of the model, where it has run.
    """
    given = {k: v for k, v in inputs.items() if k != "labels"}
    result = model(**given) if result is None else result
    logits, labels = result.logits, inputs["labels"]
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
    return loss if getattr(result, "aux_loss", None) is None else loss + 0.5 * result.aux_loss


def compare(
    name: str,
    seed: int,
    joined: bool,
    *,
    embedded: bool = False,
    call: Call = loss_of,
    alter: Callable[[nn.Module], None] = lambda model: None,
    **sizes_given: Any,
) -> nn.Module:
    """Runs on each rank of a group; returns the divided model.

    Args:
        embedded: whether inputs are embedded tokens.
        call: gives a loss of a model and its inputs.
        alter: done to both models first, before one is divided.
        sizes_given: in place of those that are drawn.
    """
    from smpar.slices import slicing_of

    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = replace(Sizes.draw(random.Random(seed), ranks), **sizes_given)
    whole = made(name, seed, sizes)
    alter(whole)
    model = divided(copy.deepcopy(whole))
    inputs = inputs_of(name, seed + (rank if joined else 0), sizes, 2, embedded)
    theirs = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in inputs.items()}
    single = torch.get_default_dtype() == torch.float32
    tolerance = 1e-4 if single else 1e-9
    with contextlib.nullcontext() if single else NoLess():
        loss, want = call(model, inputs), call(whole, theirs)
        for root in (loss, want):  # of an edge: what goes through a mode, as a tensor's does, is outside of it
            torch.autograd.backward([get_gradient_edge(root)], [torch.ones_like(root)])

    def check(got: Tensor | None, wanted: Tensor | None, what: str) -> None:
        assert got is not None and wanted is not None, what
        where = f"{name}, {sizes}, {what}"
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}")

    check(loss, want, "loss")
    for key, value in inputs.items():
        if value.requires_grad:
            check(value.grad, theirs[key].grad, key)
    got, wanted = gradients(model), gradients(whole)
    for key, p in model.named_parameters():
        slicing = slicing_of(p)
        check(got[key], wanted[key] if slicing is None else slicing.take(wanted[key], rank), key)
    return model
