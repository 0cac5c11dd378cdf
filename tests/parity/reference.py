"""What a single process makes of a case, in plain PyTorch, and the comparison with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.cases import Batch, Case


@dataclass
class Trained:
    """A training's traces, in one process or seen from one rank.

    Attributes:
        losses, evals: of each train and eval phase; ``norms`` before clipping.
        state: whole state dict at the end.
        learned: names of the parameters (of this rank) that had a gradient in the last train phase.
        copies: this rank's parameters at the end, by name.
        seen: dtypes that the model noted in its forward.
        saved: state dicts of model, optimizer and scheduler at the end.
    """

    losses: list[float] = field(default_factory=list)
    evals: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    learned: set[str] = field(default_factory=set)
    copies: dict[str, Tensor] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)


def cut(batch: Batch, count: int) -> list[Batch]:
    """Microbatches along dim 0; sizes differ by at most one, larger ones first."""
    pieces = [torch.tensor_split(value, count) for value in (*batch.args, *batch.kwargs.values(), batch.target)]
    n = len(batch.args)
    return [Batch(p[:n], p[-1], dict(zip(batch.kwargs, p[n:-1], strict=True))) for p in zip(*pieces, strict=True)]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def train_alone(case: Case) -> Trained:
    """Trains in this process, by the whole batch or by microbatches as the case says."""
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    done = Trained()

    def one_pass(batch: Batch, learn: bool) -> float:
        mean = 0.0
        parts = [batch] if case.reference == "whole" else cut(batch, case.microbatches)
        total = sum(case.weight(part.target) for part in parts)
        for part in parts:
            with torch.autocast("cpu", case.autocast or torch.bfloat16, enabled=case.autocast is not None):
                loss = case.loss(model(*part.args, **part.kwargs), part.target)
            share = case.weight(part.target) / total
            if share == 0.0:
                continue  # no valid token: the mean is NaN
            if learn:
                (loss * (share / case.accumulate)).backward()
            mean += float(loss.detach()) * share
        return mean

    step = 0
    for number, phase in enumerate(case.phases):
        if phase == "eval":
            assert case.eval_batch is not None
            with evaluating(model):
                done.evals.append(one_pass(case.eval_batch(number), learn=False))
            continue
        optimizer.zero_grad(set_to_none=True)
        calls = [case.batch(step * case.accumulate + k) for k in range(case.accumulate)]
        done.losses.append(sum(one_pass(batch, learn=True) for batch in calls) / case.accumulate)
        done.learned = {name for name, p in model.named_parameters() if p.grad is not None}
        if case.clip is not None:
            done.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        if scheduler:
            scheduler.step()
        step += 1
    done.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    done.seen = [str(dtype) for dtype in getattr(model, "seen", [])]
    return done


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter, tied ones too -> its first name, which ``named_parameters()`` gives."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def gap(a: Any, b: Any) -> float:
    """|a - b| / (1 + max |b|); infinite for NaN and for shapes that differ."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    d = float((a - b).abs().max() / (1.0 + b.abs().max()))
    return math.inf if math.isnan(d) else d


def differences(got: Trained, want: Trained, tolerance: float) -> list[str]:
    """What differs by more than ``tolerance``, in words; empty if nothing does."""
    found = []
    for what in ("losses", "evals", "norms"):
        a, b = getattr(got, what), getattr(want, what)
        if len(a) != len(b) or any(gap(x, y) > tolerance for x, y in zip(a, b, strict=True)):
            found.append(f"{what}: {a}, not {b}")
    if got.state.keys() != want.state.keys():
        found.append(f"keys of the state dict: {sorted(got.state.keys() ^ want.state.keys())} on one side only")
    for name in got.state.keys() & want.state.keys():
        if (d := gap(got.state[name], want.state[name])) > tolerance:
            found.append(f"state {name}: off by {d:.1e}")
    return found
