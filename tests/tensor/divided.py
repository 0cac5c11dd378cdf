"""Runs a divided layer on a tensor-parallel group, and the undivided one beside it. For worker processes."""

from __future__ import annotations

import importlib
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 2  # samples of a rank


@dataclass
class Case:
    """A layer to be made, its undivided form, and its inputs.

    Attributes:
        make: gives the layer; tensor parallelism is initialized.
        truth: (whole weights, *inputs) -> what an undivided layer gives.
        inputs: (rows of the whole group, generator) -> the inputs; those that are tensors with this many rows belong to
            samples.
    """

    make: Callable[[], nn.Module]
    truth: Callable[..., Tensor]
    inputs: Callable[[int], list[Any]]
    call: Callable[..., Tensor] = field(default=lambda layer, *inputs: layer(*inputs))


@dataclass
class Errors:
    """The largest difference from the undivided layer, and the collectives of a forward."""

    output: float
    inputs: float
    parameters: dict[str, float]
    forward: dict[str, int]
    backward: dict[str, int]

    @property
    def largest(self) -> float:
        return max(self.output, self.inputs, *self.parameters.values(), 0.0)


def whole_values(layer: nn.Module) -> dict[str, Tensor]:
    """Random values for the whole of each parameter, the same on all ranks; the layer gets its slices."""
    from smpar.slices import slicing_of

    values: dict[str, Tensor] = {}
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            slicing = slicing_of(parameter)
            shape = parameter.shape if slicing is None else slicing.whole_shape(parameter.shape)
            values[name] = torch.randn(shape) * 0.3
            parameter.copy_(values[name] if slicing is None else slicing.take(values[name], rank))
    return values


def errors_of(case: Case, config: dict[str, Any], dtype: torch.dtype = torch.float64) -> Errors:
    """Forward and backward of the case, with all ranks of the world as one group. Expects the same seed everywhere."""
    from smpar.nn import collectives
    from smpar.slices import slicing_of

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    joined = not config["prescaled_batch"]
    rows = ROWS * ranks
    layer = case.make().to(dtype)
    weights = {k: v.to(dtype).double().requires_grad_() for k, v in whole_values(layer).items()}
    inputs = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in case.inputs(rows)]

    def mine(value: Any) -> Any:
        return value.chunk(ranks)[rank] if joined and isinstance(value, Tensor) and value.shape[0] == rows else value

    given = [_leaf(mine(value)) for value in inputs]
    with collectives.counting() as forward:
        result = case.call(layer, *given)
    whole = [_leaf(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v) for v in inputs]
    want = case.truth(weights, *whole)
    towards = torch.randn(want.shape)
    (want * towards).sum().backward()
    with collectives.counting() as backward:
        (result * mine(towards).to(result.dtype)).sum().backward()
    share = ranks if joined else 1  # parameters see the mean of the ranks' losses
    found = Errors(_distance(result, mine(want)), 0.0, {}, dict(forward), dict(backward))
    for ours, theirs in zip(given, whole, strict=True):
        if isinstance(ours, Tensor) and ours.requires_grad:
            found.inputs = max(found.inputs, _distance(ours.grad, mine(theirs.grad)))
    for name, parameter in layer.named_parameters():
        slicing, grad, right = slicing_of(parameter), parameter.grad, weights[name].grad
        assert grad is not None and right is not None, name
        if slicing is None:
            torch.distributed.all_reduce(grad)
            grad /= ranks
        else:
            right = slicing.take(right, rank)
        found.parameters[name] = _distance(grad, right / share)
    return found


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_(value.dim() < 4)  # masks have four dims, and no gradient
    return value


def _distance(ours: Tensor | None, theirs: Tensor) -> float:
    """Relative to the largest value, as float32 rounds; infinite if there is a NaN."""
    assert ours is not None
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    ours, theirs = ours.detach().double(), theirs.detach().double()
    distance = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)
    return float(distance.nan_to_num(nan=math.inf))


def run_cases(cases: str, seed: int, config: dict[str, Any], dtype: str = "float64") -> dict[str, Errors]:
    """All cases of a table, by name: ``module:function``, which gets a random generator and the number of ranks."""
    import smpar as smp

    ranks = int(os.environ["WORLD_SIZE"])
    smp.init({"tensor_parallel_degree": ranks, **config})
    module, _, function = cases.partition(":")
    table: dict[str, Case] = getattr(importlib.import_module(module), function)(random.Random(seed), ranks)
    found: dict[str, Errors] = {}
    torch.set_default_dtype(torch.float64)
    try:
        for name, case in table.items():
            torch.manual_seed(seed)
            found[name] = errors_of(case, config, getattr(torch, dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    return found
