"""Units' times measured on the real device, instead of counted from their operations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smpar.comm.messages import CommGroup, broadcast
from smpar.runtime.partitioning import Explored
from smpar.stage.tensor import StageTensor
from smpar.trace import tree
from smpar.trace.graph import ModuleGraph
from smpar.trace.outcome import Meta, meta_of
from smpar.trace.outcomes import Outcomes

log = logging.getLogger("smpar")

_RUNS = 3  # after one to warm up; the median counts


@dataclasses.dataclass(frozen=True)
class _Call:
    """How a trace called a unit: ``inputs`` holds a replicated tensor itself, and the metadata of any other."""

    unit: nn.Module
    key: Any
    inputs: tuple[torch.Tensor | Meta, ...]
    spec: tree.Spec


class Measurer:
    """Measures the units of traces, equal ones once, on the pipeline's first rank, which tells the others.

    ::

        with Measurer(outcomes, ...) as measurer:
            seen = survey(...)                # the trace tells each call of a unit
            graph = measurer.measure(seen)    # all ranks get the same

    Args:
        outcomes: of the traces to come.
        first: whether this rank does the measuring. All ranks of the pipeline call ``measure`` as often.
    """

    def __init__(self, outcomes: Outcomes, first: bool) -> None:
        self._outcomes = outcomes
        self._first = first
        self._calls: dict[nn.Module, list[_Call]] = {}
        self._times: dict[Any, tuple[float, float] | None] = {}
        self._counted: dict[Any, float] = {}  # seconds, of the forward

    def __enter__(self) -> Measurer:
        self._outcomes.on_call = self._called
        return self

    def __exit__(self, *_: object) -> None:
        self._outcomes.on_call = None

    def _called(self, unit: nn.Module, key: Any, leaves: list[torch.Tensor], spec: tree.Spec) -> None:
        inputs = tuple(meta_of(t) if type(t) is StageTensor else t for t in leaves)
        self._calls.setdefault(unit, []).append(_Call(unit, key, inputs, spec))

    def measure(self, seen: Explored) -> ModuleGraph:
        """The graph of the trace that ran since the last call, with measured times.

        Glue that follows a unit has no time of its own to measure: its counted time is scaled like the units'.
        """
        calls, self._calls = self._calls, {}
        # Traces that failed before this one have told calls too: the last are its own.
        called = [calls[m][-u.calls :] for m, u in zip(seen.modules, seen.graph.units, strict=True)]
        traced = {c.key: self._outcomes.cost(c.key) for cs in called for c in cs}
        new = list({c.key: c for cs in called for c in cs if c.key not in self._times}.values())
        found = [time_call(c.unit, c.inputs, c.spec) for c in new] if self._first else None
        for call, times in zip(new, broadcast(found, CommGroup.PP_GROUP, src=0), strict=True):
            self._times[call.key] = times
            self._counted[call.key] = traced[call.key].seconds
        scale = self._scale()
        units = []
        for unit, cs in zip(seen.graph.units, called, strict=True):
            forward = scale * max(0.0, unit.forward_seconds - sum(traced[c.key].seconds for c in cs))
            backward = 2 * forward
            for c in cs:
                seconds = scale * self._counted[c.key]
                f, b = self._times[c.key] or (seconds, 2 * seconds)
                forward, backward = forward + f, backward + b
            units.append(dataclasses.replace(unit, forward_seconds=forward, backward_seconds=backward))
        for call in new:
            if (times := self._times[call.key]) is not None:  # programs take a backward for two forwards
                self._outcomes.set_cost(call.key, dataclasses.replace(traced[call.key], seconds=sum(times) / 3))
        return dataclasses.replace(seen.graph, units=tuple(units), measured=True)

    def _scale(self) -> float:
        """Measured seconds per counted second, of the median unit: one that is slow for its own reasons says little."""
        ratios = [
            sum(times) / (3 * self._counted[key])
            for key, times in self._times.items()
            if times is not None and self._counted[key] > 0
        ]
        return statistics.median(ratios) if ratios else 1.0


def time_call(unit: nn.Module, inputs: tuple[torch.Tensor | Meta, ...], spec: tree.Spec) -> tuple[float, float] | None:
    """Seconds of the forward and of the backward of one call, on random inputs; nothing of it stays in the unit.

    Returns:
        None if the unit does not run on such inputs.
    """
    given = [_random(i) if isinstance(i, Meta) else i for i in inputs]
    wanted = [t for t in (*given, *unit.parameters()) if t.requires_grad]
    forwards, backwards = [], []
    try:
        with _undone(unit, given):
            for _ in range(1 + _RUNS):
                args, kwargs = tree.unflatten(spec, [g.clone() if g.requires_grad else g for g in given])
                forward, result = _timed(functools.partial(unit, *args, **kwargs))
                outputs = [t for t in tree.tensors(result) if t.grad_fn is not None]
                grads = [torch.ones_like(t) for t in outputs]
                backward = 0.0
                if outputs and wanted:
                    gradients = functools.partial(torch.autograd.grad, outputs, wanted, grads, allow_unused=True)
                    backward, _ = _timed(gradients)
                forwards.append(forward)
                backwards.append(backward)
    except Exception as error:  # whatever the module does on numbers that mean nothing
        log.info("smpar: %s is not measured: %s", type(unit).__name__, error)
        return None
    return statistics.median(forwards[1:]), statistics.median(backwards[1:])


def _random(meta: Meta) -> torch.Tensor:
    """A tensor like the one a trace saw: normal numbers; zeros for whole numbers, which are valid indices; all true."""
    tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        tensor.normal_()
    else:
        tensor.fill_(meta.dtype is torch.bool)
    return tensor.requires_grad_(meta.requires_grad)


def _timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    _wait_for_device()
    start = time.perf_counter()
    result = fn()
    _wait_for_device()
    return time.perf_counter() - start, result


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _undone(unit: nn.Module, given: list[torch.Tensor]) -> Iterator[None]:
    """Put back the unit's buffers, attributes, gradients and the random state afterwards."""
    snapshot = tree.Snapshot()
    for module in unit.modules():
        snapshot.add(module)
    kept = [(t, t.detach().clone()) for t in unit.buffers()]
    kept += [(t, t.detach().clone()) for t in given if not t.requires_grad]
    devices = sorted({t.device.index for t in (*unit.parameters(), *given) if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        snapshot.restore()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
