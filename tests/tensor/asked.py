"""Starts smpar, compares a divided model with the undivided one, names its twins. For worker processes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Call = Callable[[Any, torch.Generator], Tensor]  # (model, generator) -> loss of a drawn batch


def outermost_twins(model: nn.Module, path: str = "") -> dict[str, str]:
    """The kind of each twin by name, without those inside others."""
    from smpar.nn import DistributedModule

    if isinstance(model, DistributedModule):
        return {
            path: next(
                c.__name__
                for c in type(model).__mro__
                if c.__module__.startswith("smpar.") and "Distr" not in c.__name__
            )
        }
    found = {}
    for name, child in model.named_children():
        found |= outermost_twins(child, f"{path}.{name}".lstrip("."))
    return found


def check_divided(model: nn.Module, whole: nn.Module, call: Call, seed: int, joined: bool) -> nn.Module:
    """Wrap a model; its loss and gradients must be those of its plain copy."""
    import smpar as smp
    from smpar.slices import slicing_of

    wrapped = smp.DistributedModel(model)
    given = seed + (dist.get_rank() if joined else 0)
    loss = call(wrapped, torch.Generator().manual_seed(given))
    want = call(whole, torch.Generator().manual_seed(given))
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12)
    truth = dict(whole.named_parameters())
    for p in truth.values():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    for name, p in wrapped.module.named_parameters():
        slicing, grad = slicing_of(p), truth[name].grad
        want = grad if slicing is None else slicing.take(grad, smp.tp_rank())
        torch.testing.assert_close(p.grad, want, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    return wrapped.module


@contextlib.contextmanager
def started(**config: Any) -> Iterator[list[str]]:
    """smpar on the ranks of a call, in float64; what it warns of."""
    import smpar as smp

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smpar").addHandler(handler)
    torch.set_default_dtype(torch.float64)
    try:
        smp.init({"tensor_parallel_degree": int(os.environ["WORLD_SIZE"]), "prescaled_batch": True, **config})
        yield said
    finally:
        torch.set_default_dtype(torch.float32)
        logging.getLogger("smpar").removeHandler(handler)
