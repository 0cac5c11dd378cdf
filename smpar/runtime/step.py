"""``@smpar.step``: runs a training step's function once per microbatch over the pipeline."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from smpar.errors import BatchError, NestedStep, NoSuchArgument
from smpar.observe.metrics import report_step
from smpar.runtime.agreement import Called, agree
from smpar.runtime.core import Runtime, runtime
from smpar.runtime.draws import Draws
from smpar.runtime.pipeline import Look
from smpar.runtime.plan_file import compare_samples
from smpar.stage.run import whole
from smpar.stage.split import Batch, merge, split
from smpar.trace import tree
from smpar.trace.draws import mix, seed_generators, sharded

F = TypeVar("F", bound=Callable[..., Any])


@overload
def step(fn: F) -> F: ...
@overload
def step(
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[F], F]: ...
def step(
    fn: Any = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorate the function that does forward and backward of one batch (SMP's ``smp.step``).

    The function runs once per microbatch. Tensors among its arguments are split along their batch axis; what
    it returns comes back as ``StepOutput``, on every rank of the pipeline. ``model(...)`` and
    ``model.backward(loss)`` are called inside; clipping and ``optimizer.step()`` after it, outside.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: argument name -> batch axis, 0 where not given.
        detach_outputs: whether returned tensors are detached.

    Raises:
        NoSuchArgument: an argument name that the function does not have.
        BatchError: fewer samples than microbatches.
        RanksDisagree: the ranks of a pipeline got different batches, or those of a tensor-parallel group batches that
            do not fit.
    """
    if fn is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    names, open_ended = _parameter_names(fn)
    whole, axes = list(non_split_inputs or ()), dict(input_split_axes or {})
    for name in (*whole, *axes):
        if name not in names and not open_ended:
            raise NoSuchArgument(f"{getattr(fn, '__name__', 'the step')}({', '.join(names)}) has no argument {name!r}")

    @functools.wraps(fn)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        now = runtime()
        if now.in_step:
            raise NestedStep(f"{getattr(fn, '__name__', 'a step')} was called inside a step")
        model = now.maybe_model
        if model is not None:
            model.replicas.meet()
        given = {**dict(zip(_positions(names, len(args)), args, strict=True)), **kwargs}
        try:
            batch = split(names, args, kwargs, now.config.microbatches, whole, axes)
        except BatchError:
            with now.world.guard():
                _agree(now, fn, given, None)  # else the other ranks would wait, if their batch is a good one
            raise
        with now.world.guard():
            number, start = now.step, time.monotonic_ns()
            with now.spans.step(number):
                results = _run(now, fn, given, batch)
            if now.spans.counting:
                elapsed = time.monotonic_ns() - start
                report_step(now.spans, now.world, number, results, batch, _samples(now, batch), elapsed)
        if detach_outputs:
            results = [tree.map_tensors(torch.Tensor.detach, result) for result in results]
        return merge(results, batch.weights)

    return stepped


def _parameter_names(fn: Callable[..., Any]) -> tuple[list[str], bool]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return [], True
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _positions(names: Sequence[str], count: int) -> list[str]:
    return [names[i] if i < len(names) else f"number {i + 1}" for i in range(count)]


def _samples(now: Runtime, batch: Batch) -> int | None:
    """Number of samples that this rank's replica takes in a step."""
    own = batch.samples
    return own * now.world.axis_size("tp") if own is not None and now.joined else own


def _agree(now: Runtime, fn: Callable[..., Any], arguments: Mapping[str, Any], look: Look | None) -> tuple[int, bool]:
    """A seed and whether all programs are known, as the replica's ranks agree; see `agree`."""
    drawn = int(torch.randint(0, 1 << 62, (1,), device="cpu"))
    if now.world.axis_size("mp") == 1:
        return drawn, True
    name = getattr(fn, "__qualname__", str(fn))
    with now.spans.phase("agree"):
        known, circumstances, digest = (look.known, look.circumstances, look.digest) if look else (False, dict, 0)
        return agree(now.world, Called(now.step, name, arguments, circumstances, digest, known), drawn, now.joined)


def _look(now: Runtime, fn: Callable[..., Any], batch: Batch, arguments: Mapping[str, Any]) -> Look | None:
    if now.stages > 1:
        pipeline = now.model.pipeline
        assert pipeline is not None
        return pipeline.look(fn, batch, arguments)
    model = now.maybe_model
    if model is None or now.world.axis_size("mp") == 1:
        return None
    around = model.circumstances
    return Look(arguments, (), (), True, around.described, around.digest(around.state()))


def _run(now: Runtime, fn: Callable[..., Any], arguments: Mapping[str, Any], batch: Batch) -> list[Any]:
    model = now.maybe_model
    average = model is None or model.average_grads
    shares = batch.weights if average else (1.0,) * len(batch.weights)
    pipeline = now.model.pipeline if now.stages > 1 else None
    samples = _samples(now, batch)
    if now.config.plan is not None and samples is not None:
        compare_samples(now.config.plan, samples)
    look = _look(now, fn, batch, arguments)
    seed, known = _agree(now, fn, arguments, look)
    if model is not None:
        model.replicas.start_step()
    random = torch.get_rng_state()
    now.in_step = True
    try:
        with sharded(now.shard):
            if pipeline is None or look is None:
                results = _without_pipeline(now, fn, arguments, batch, shares, seed)
            else:
                results = pipeline.run(fn, batch, shares, seed, look, known)
    finally:
        now.in_step = False
        torch.set_rng_state(random)
    if model is not None:
        model.replicas.end_step()
    now.step += 1
    return results


def _without_pipeline(
    now: Runtime,
    fn: Callable[..., Any],
    arguments: Mapping[str, Any],
    batch: Batch,
    shares: Sequence[float],
    seed: int,
) -> list[Any]:
    """One stage: microbatches one after another, each with its backward; gradients are averaged meanwhile."""
    results: list[Any] = []
    model = now.maybe_model
    reducer = model.reducer if model is not None and not model.reducer.idle else None
    now.backward_ran = False
    draws = model.draws if model is not None else Draws()
    kind = draws.kind(fn, arguments, model.trained.modes() if model is not None else None)

    def loss_backward() -> float:
        now.backward_ran = True
        return now.microbatch if now.microbatch is not None else 1.0

    with contextlib.ExitStack() as stack:
        if model is not None and reducer is not None:
            stack.enter_context(reducer.step(model.trained.parameters(), fn))
        for i, (args, kwargs) in enumerate(batch.calls):
            seed_generators(mix(seed, now.world.axis_rank("rdp"), i))
            now.microbatch = shares[i]
            last = reducer is not None and i + 1 == len(batch.calls)
            try:
                if reducer is not None and last:
                    reducer.before(0)
                with draws.watching(kind, loss_backward), now.spans.microbatch(i):
                    results.append(tree.map_tensors(whole, fn(*args, **kwargs)))
                if reducer is not None and last:
                    reducer.after(0)
            finally:
                now.microbatch = None
        if reducer is not None:
            with now.spans.phase("reduce gradients"):
                reducer.finish(now.backward_ran)
    return results
