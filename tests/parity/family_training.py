"""Trains a family for three steps, in one process and under smpar, and compares losses and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.parity import families
from tests.parity.families import Inputs
from tests.parity.more_families import MORE, RANDOM
from tests.parity.reference import first_names

ALL = families.ALL | MORE | RANDOM
STEPS, RATE = 3, 0.05
LOSS_TOLERANCE, GRADIENT_TOLERANCE, NOISE = 1e-5, 1e-4, 1e-3


@dataclass
class Steps:
    """By step: the loss, and the gradient of every parameter (of this rank), None where it had none."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def _gradients(named: Any) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}


def train_alone(name: str, microbatches: int) -> Steps:
    """A loop over microbatches, as a single process accumulates gradients."""
    family, done = ALL[name], Steps()
    model = family.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        inputs, target = family.inputs(step)
        optimizer.zero_grad(set_to_none=True)
        mean = 0.0
        for i, part in enumerate(target.chunk(microbatches)):
            piece = {key: value.chunk(microbatches)[i] for key, value in inputs.items()}
            loss = family.loss(model(**piece), part) / microbatches
            loss.backward()
            mean += float(loss.detach())
        done.losses.append(mean)
        done.gradients.append(_gradients(model.named_parameters()))
        optimizer.step()
    done.state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return done


def train(name: str, degree: int, microbatches: int, options: dict[str, Any]) -> Steps:
    """The same under smpar; returns what this rank saw. Runs in the worker processes."""
    import smpar as smp

    family, done = ALL[name], Steps()
    smp.init({"pipeline_parallel_degree": degree, "microbatches": microbatches, "ddp": True, **options})
    model = smp.DistributedModel(family.model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))

    @smp.step
    def forward_backward(model: Any, inputs: Inputs, target: Tensor) -> Tensor:
        loss = family.loss(model(**inputs), target)
        model.backward(loss)
        return loss

    for step in range(STEPS):
        inputs, target = family.inputs(step)
        optimizer.zero_grad(set_to_none=True)
        done.losses.append(float(forward_backward(model, inputs, target).reduce_mean()))
        done.gradients.append(_gradients(model.local_named_parameters()))
        optimizer.step()
    done.state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return done


def differences(name: str, ranks: list[Steps], want: Steps) -> list[str]:
    """What differs, in words.

    A gradient may be off by GRADIENT_TOLERANCE of its largest element. Some are zero but for rounding (the bias of
    attention's keys), so NOISE of the model's largest gradient counts as the least size.
    """
    found: list[str] = []
    first = first_names(ALL[name].model())
    for rank, got in enumerate(ranks):
        for step, (seen, right) in enumerate(zip(got.losses, want.losses, strict=True)):
            if not abs(seen - right) <= LOSS_TOLERANCE * abs(right):
                found.append(f"rank {rank}, step {step}: loss {seen}, not {right}")
        found += _state_differences(rank, got, want)
    for step, expected in enumerate(want.gradients):
        noise = NOISE * max(float(g.abs().max()) for g in expected.values() if g is not None)
        missing = set(expected)
        for rank, got in enumerate(ranks):
            for local, gradient in got.gradients[step].items():
                b = expected[first[local]]
                missing.discard(first[local])
                if gradient is None or b is None:
                    if gradient is not b:
                        found.append(f"rank {rank}, step {step}: only one side has a gradient of {local}")
                    continue
                allowed = GRADIENT_TOLERANCE * (float(b.abs().max()) + noise)
                if not (error := float((gradient - b).abs().max())) <= allowed:
                    found.append(f"rank {rank}, step {step}: gradient of {local} off by {error:.1e} > {allowed:.1e}")
        if missing:
            found.append(f"step {step}: on no rank: {sorted(missing)}")
    return found


def _state_differences(rank: int, got: Steps, want: Steps) -> list[str]:
    """Of the whole state dict after the last step; counts and other integers must be equal."""
    if got.state.keys() != want.state.keys():
        return [f"rank {rank}: keys of the state dict differ: {sorted(got.state.keys() ^ want.state.keys())}"]
    found = []
    for key, b in want.state.items():
        a = got.state[key]
        close = torch.allclose(a, b, rtol=1e-4, atol=1e-5) if b.is_floating_point() else torch.equal(a, b)
        if not close:
            found.append(f"rank {rank}: state {key} differs")
    return found
