"""Trains a case under smpar, as a user would write it; these functions run in the worker processes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

import smpar as smp
from tests.parity.cases import CASES, Batch, Case
from tests.parity.reference import Trained, evaluating

Saved = dict[str, Any]


def train(
    name: str,
    degree: int,
    options: dict[str, Any],
    phases: tuple[str, ...] | None = None,
    saved: Saved | None = None,
    done_steps: int = 0,
) -> Trained:
    """Trains ``CASES[name]`` on ``degree`` stages, the same calls on every rank; returns what this rank saw.

    ``options`` are further keys of smp.init. With ``saved`` it goes on after ``done_steps`` steps: state dicts are
    loaded before the first step, so before the partition.
    """
    case = CASES[name]
    smp.init({"pipeline_parallel_degree": degree, "microbatches": case.microbatches, "ddp": True, **options})
    torch.manual_seed(1234)
    model = smp.DistributedModel(case.model(), average_grads_across_microbatches=not case.by_tokens)
    optimizer = smp.DistributedOptimizer(case.optimizer(model))
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if scheduler:
            scheduler.load_state_dict(saved["scheduler"])
    learn, evaluate = _token_steps(case) if case.by_tokens else _sample_steps(case)

    done, step = Trained(), done_steps
    for number, phase in enumerate(phases or case.phases):
        if phase == "eval":
            assert case.eval_batch is not None
            with evaluating(model):
                done.evals.append(evaluate(model, case.eval_batch(number)))
            assert all(p.grad is None or step > done_steps for p in model.local_parameters()), (
                "evaluation left gradients"
            )
            continue
        optimizer.zero_grad(set_to_none=True)
        calls = [case.batch(step * case.accumulate + k) for k in range(case.accumulate)]
        done.losses.append(sum(learn(model, batch) for batch in calls) / case.accumulate)
        done.learned = {n for n, p in model.local_named_parameters() if p.grad is not None}
        if case.clip is not None:
            done.norms.append(float(smp.clip_grad_norm_(model, case.clip)))
        optimizer.step()
        if scheduler:
            scheduler.step()
        step += 1
    done.state = {n: v.detach().clone() for n, v in model.state_dict().items()}
    done.copies = {n: p.detach().clone() for n, p in model.local_named_parameters()}
    done.seen = [str(dtype) for dtype in getattr(model.module, "seen", [])]
    done.saved = {
        "model": done.state,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler else None,
    }
    return done


def _autocast(case: Case) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=case.autocast) if case.autocast else contextlib.nullcontext()


def _sample_steps(case: Case) -> tuple[Any, Any]:
    """(learn, evaluate): the mean over samples, which smpar weighs."""

    @smp.step
    def forward_backward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor) -> Tensor:
        with _autocast(case):
            loss = case.loss(model(*args, **kwargs), target)
        model.backward(loss / case.accumulate)
        return loss

    @smp.step
    def forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor) -> Tensor:
        with _autocast(case):
            return case.loss(model(*args, **kwargs), target)

    def learn(model: Any, batch: Batch) -> float:
        return float(forward_backward(model, batch.args, batch.kwargs, batch.target).reduce_mean())

    def evaluate(model: Any, batch: Batch) -> float:
        return float(forward(model, batch.args, batch.kwargs, batch.target).reduce_mean())

    return learn, evaluate


def _token_steps(case: Case) -> tuple[Any, Any]:
    """(learn, None): the mean over tokens, which the user weighs; smpar sums the gradients."""

    @smp.step
    def forward_backward(model: Any, args: tuple[Any, ...], target: Tensor, total: float) -> Tensor:
        loss = case.loss(model(*args), target)
        weight = case.weight(target)
        if weight == 0.0:  # the loss is NaN; the target is in every rank's hands, so all take this branch
            return torch.zeros_like(loss)
        share = loss * (weight / total)
        model.backward(share)
        return share

    def learn(model: Any, batch: Batch) -> float:
        return float(forward_backward(model, batch.args, batch.target, case.weight(batch.target)).reduce_sum())

    return learn, None


def one_step_with_outputs(name: str, degree: int, options: dict[str, Any]) -> tuple[float, Tensor, list[Tensor]]:
    """One step whose function returns a pair: (mean loss, joined logits, logits by microbatch)."""
    case = CASES[name]
    smp.init({"pipeline_parallel_degree": degree, "microbatches": case.microbatches, "ddp": True, **options})
    model = smp.DistributedModel(case.model())

    @smp.step
    def forward_backward(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = model(ids, labels=labels)
        model.backward(loss)
        return loss, logits

    batch = case.batch(0)
    loss, logits = forward_backward(model, batch.args[0], batch.target)
    return float(loss.reduce_mean()), logits.concat(), list(logits.outputs)


def autocast_around_the_call(name: str, degree: int) -> tuple[float, list[str]]:
    """One step of an autocast case where autocast encloses the step function's call, not its body."""
    case = CASES[name]
    smp.init({"pipeline_parallel_degree": degree, "microbatches": case.microbatches, "ddp": True})
    model = smp.DistributedModel(case.model())

    @smp.step
    def forward_backward(model: Any, x: Tensor, target: Tensor) -> Tensor:
        loss = case.loss(model(x), target)
        model.backward(loss)
        return loss

    batch = case.batch(0)
    with _autocast(case):
        loss = forward_backward(model, batch.args[0], batch.target)
    return float(loss.reduce_mean()), [str(dtype) for dtype in model.module.seen]


def losses_under_dropout(degree: int, seed: int) -> list[list[float]]:
    """Loss of each microbatch in two steps on eight equal samples without an update: only the masks differ."""
    case = CASES["dropout_partition_invariance"]
    smp.init({"pipeline_parallel_degree": degree, "microbatches": case.microbatches, "ddp": True})
    torch.manual_seed(seed)
    model = smp.DistributedModel(case.model())

    @smp.step
    def forward_backward(model: Any, x: Tensor, target: Tensor) -> Tensor:
        loss = case.loss(model(x), target)
        model.backward(loss)
        return loss

    batch = case.batch(0)
    x, target = batch.args[0][:1].repeat(8, 1), batch.target[:1].repeat(8, 1)
    return [[float(loss) for loss in forward_backward(model, x, target).outputs] for _ in range(2)]
