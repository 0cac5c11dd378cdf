"""Runs a program in one process and over a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import smpar as smp
from tests.programs.programs import Program, build, data

STEPS, SAMPLES, MICROBATCHES = 2, 7, 3  # seven samples: microbatches are uneven
TOLERANCE = 1e-10

Gradients = dict[str, Tensor | None]
Seen = list[tuple[list[list[Tensor]], Gradients]]  # by step: results by microbatch, gradients


def _gradients(named: Any) -> Gradients:
    return {n: None if p.grad is None else p.grad.clone() for n, p in named}


def alone(program: Program) -> Seen:
    """In plain PyTorch, microbatch by microbatch."""
    model, seen = build(program), []
    for step in range(STEPS):
        model.zero_grad()
        results = []
        for parts in zip(*(t.tensor_split(MICROBATCHES) for t in data(program, step, SAMPLES)), strict=True):
            losses, returned = model(*parts)
            torch.autograd.backward([loss * (len(parts[0]) / SAMPLES) for loss in losses])
            results.append([t.detach().clone() for t in (*losses, *returned)])
        seen.append((results, _gradients(model.named_parameters())))
    return seen


def piped(program: Program) -> Seen:
    """Under smpar, which is initialised."""
    module, seen = build(program), []
    model = smp.DistributedModel(module)
    for unit, made in zip(program.units, module.units, strict=True):
        smp.set_partition(made, unit.home)

    @smp.step
    def step_function(model: Any, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        losses, returned = model(*inputs)
        model.backward(losses)
        return losses, returned

    for step in range(STEPS):
        for p in model.parameters():
            p.grad = None
        losses, returned = step_function(model, *data(program, step, SAMPLES))
        results = [[out.outputs[i] for out in (*losses, *returned)] for i in range(MICROBATCHES)]
        seen.append((results, _gradients(model.local_named_parameters())))
    return seen


def run(config: dict[str, Any], program: Program) -> list[str]:
    """Runs the program over the pipeline; what differs from one process, in words."""
    smp.init({"microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0, **config})
    return differences(piped(program), alone(program))


def differences(got: Seen, want: Seen) -> list[str]:
    """What differs in results, or in gradients of parameters that this rank has."""
    found = []
    for step, ((results, gradients), (right, expected)) in enumerate(zip(got, want, strict=True)):
        for i, (a, b) in enumerate(zip(results, right, strict=True)):
            found += [
                f"step {step}, microbatch {i}, result {k}: off by {float((x - y).abs().max()):.1e}"
                for k, (x, y) in enumerate(zip(a, b, strict=True))
                if not torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)
            ]
        for name, gradient in gradients.items():
            other = expected[name]
            if (gradient is None) != (other is None):
                # one process gives zeros where nothing but a detached part depends on a parameter
                if not all(g is None or not g.any() for g in (gradient, other)):
                    found.append(f"step {step}: gradient of {name} is {'missing' if gradient is None else 'there'}")
            elif gradient is not None and not torch.allclose(gradient, other, rtol=TOLERANCE, atol=TOLERANCE):
                found.append(f"step {step}: gradient of {name} off by {float((gradient - other).abs().max()):.1e}")
    return found
