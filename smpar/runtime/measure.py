"""Units' times measured on the real device, instead of counted from their operations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smpar.runtime.partitioning import Explored
from smpar.stage.tensor import StageTensor
from smpar.trace import tree
from smpar.trace.graph import ModuleGraph
from smpar.trace.outcome import Meta, meta_of
from smpar.trace.outcomes import Outcomes

log = logging.getLogger("smpar")

_RUNS = 3  # at least, after one to warm up; the median counts
_MOST = 50  # runs in one pass
_PASSES = 4  # over all calls, if there is time: what else the machine does then spreads over them


@dataclasses.dataclass(frozen=True)
class _Call:
    """How a trace called a unit: ``inputs`` holds a replicated tensor itself, and the metadata of any other."""

    unit: nn.Module
    key: Any
    inputs: tuple[torch.Tensor | Meta, ...]
    spec: tree.Spec


class Times(NamedTuple):
    """Seconds of a unit's forward and backward; ``weight`` is the part of the backward for gradients of parameters."""

    forward: float
    backward: float
    weight: float = 0.0


class Measurer:
    """Measures the units of traces, equal ones once.

    ::

        with Measurer(outcomes, ...) as measurer:
            seen = survey(...)                # the trace tells each call of a unit
            graph = measurer.measure(seen)    # all ranks get the same

    Args:
        outcomes: of the traces to come.
        once: runs the work it is given on one rank, and tells its result to all that measure together.
        split: whether to measure the gradients of parameters by themselves, too.
        enough: seconds of measuring one call, unless that takes too many runs.
    """

    def __init__(
        self,
        outcomes: Outcomes,
        once: Callable[[Callable[[], Any]], Any],
        split: bool = False,
        enough: float = 0.0,
    ) -> None:
        self._outcomes = outcomes
        self._once = once
        self._split, self._enough = split, enough
        self._calls: dict[nn.Module, list[_Call]] = {}
        self._times: dict[Any, Times | None] = {}
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
        """The graph of the trace that ran since the last call, with measured times."""
        units = [
            dataclasses.replace(unit, forward_seconds=times.forward, backward_seconds=times.backward)
            for unit, times in zip(seen.graph.units, self.times(seen), strict=True)
        ]
        return dataclasses.replace(seen.graph, units=tuple(units), measured=True)

    def times(self, seen: Explored) -> list[Times]:
        """The times of each unit in the trace that ran since the last call, all its calls together.

        Glue that follows a unit has no time of its own to measure: its counted time is scaled like the units'.
        """
        calls, self._calls = self._calls, {}
        # Traces that failed before this one have told calls too: the last are its own.
        called = [calls[m][-u.calls :] for m, u in zip(seen.modules, seen.graph.units, strict=True)]
        traced = {c.key: self._outcomes.cost(c.key) for cs in called for c in cs}
        new = list({c.key: c for cs in called for c in cs if c.key not in self._times}.values())
        for call, times in zip(new, self._once(functools.partial(self._time, new)), strict=True):
            self._times[call.key] = times
            self._counted[call.key] = traced[call.key].seconds
        scale = self._scale()
        found = []
        for unit, cs in zip(seen.graph.units, called, strict=True):
            forward = scale * max(0.0, unit.forward_seconds - sum(traced[c.key].seconds for c in cs))
            backward, weight = 2 * forward, 0.0
            for c in cs:
                seconds = scale * self._counted[c.key]
                of_call = self._times[c.key] or Times(seconds, 2 * seconds)
                forward, backward = forward + of_call.forward, backward + of_call.backward
                weight += of_call.weight
            found.append(Times(forward, backward, weight))
        for call in new:
            if (measured := self._times[call.key]) is not None:  # programs take a backward for two forwards
                seconds = (measured.forward + measured.backward) / 3
                self._outcomes.set_cost(call.key, dataclasses.replace(traced[call.key], seconds=seconds))
        return found

    def _time(self, calls: Sequence[_Call]) -> list[Times | None]:
        runs: list[list[Times]] = [[] for _ in calls]
        for _ in range(_PASSES if self._enough else 1):
            for of_call, c in zip(runs, calls, strict=True):
                of_call += time_call(c.unit, c.inputs, c.spec, self._split, self._enough / _PASSES)
        return [Times(*map(statistics.median, zip(*r, strict=True))) if r else None for r in runs]

    def _scale(self) -> float:
        """Measured seconds per counted second, of the median unit: one that is slow for its own reasons says little."""
        ratios = [
            (times.forward + times.backward) / (3 * self._counted[key])
            for key, times in self._times.items()
            if times is not None and self._counted[key] > 0
        ]
        return statistics.median(ratios) if ratios else 1.0


def time_call(
    unit: nn.Module,
    inputs: tuple[torch.Tensor | Meta, ...],
    spec: tree.Spec,
    split: bool = False,
    enough: float = 0.0,
) -> list[Times]:
    """Seconds of the forward and of the backward of one call, on random inputs; nothing of it stays in the unit.

    Args:
        unit, inputs, spec: the call.
        split: whether to time a backward without the parameters, too.
        enough: seconds to spend at least, in runs that are not too many.

    Returns:
        of each run but the first; nothing if the unit does not run on such inputs.
    """
    devices = {t.device for t in (*unit.parameters(), *inputs)}
    try:
        with torch.random.fork_rng(sorted(d.index for d in devices if d.type == "cuda")):
            return _runs(unit, [_random(i) if isinstance(i, Meta) else i for i in inputs], spec, split, enough)
    except Exception as error:  # whatever the module does on numbers that mean nothing
        log.info("smpar: %s is not measured: %s", type(unit).__name__, error)
        return []


def _runs(unit: nn.Module, given: list[torch.Tensor], spec: tree.Spec, split: bool, enough: float) -> list[Times]:
    sources = [t for t in given if t.requires_grad]
    wanted = [*sources, *(p for p in unit.parameters() if p.requires_grad)]
    runs: list[Times] = []
    arguments = tree.Snapshot()  # a cache of keys and values would grow from run to run
    for const in tree.constants(spec):
        if const.opaque and not isinstance(const.value, nn.Module):
            arguments.add(const.value)

    def run(wanted: Sequence[torch.Tensor]) -> tuple[float, float]:
        try:
            return _run(unit, given, spec, wanted)
        finally:
            arguments.restore()

    with undone(unit, given):
        start = time.perf_counter()
        while len(runs) <= _RUNS or (len(runs) <= _MOST and time.perf_counter() - start < enough):
            forward, backward = run(wanted)
            through = run(sources)[1] if split and len(wanted) > len(sources) else backward
            runs.append(Times(forward, backward, max(0.0, backward - through)))
    return runs[1:]


def _run(
    unit: nn.Module, given: Sequence[torch.Tensor], spec: tree.Spec, wanted: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Seconds of a forward, and of a backward that gives the gradients of ``wanted``."""
    args, kwargs = tree.unflatten(spec, [g.clone() if g.requires_grad else g for g in given])
    forward, result = timed(functools.partial(unit, *args, **kwargs))
    outputs = [t for t in tree.tensors(result) if t.grad_fn is not None]
    if not outputs or not wanted:
        return forward, 0.0
    grads = [torch.ones_like(t) for t in outputs]
    backward, _ = timed(functools.partial(torch.autograd.grad, outputs, wanted, grads, allow_unused=True))
    return forward, backward


def _random(meta: Meta) -> torch.Tensor:
    """A tensor like the one a trace saw: normal numbers; zeros for whole numbers, which are valid indices; all true."""
    tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        tensor.normal_()
    else:
        tensor.fill_(meta.dtype is torch.bool)
    return tensor.requires_grad_(meta.requires_grad)


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, with all that it leaves to the device; and its result."""
    _wait_for_device()
    start = time.perf_counter()
    result = fn()
    _wait_for_device()
    return time.perf_counter() - start, result


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextlib.contextmanager
def undone(unit: nn.Module, given: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Put back the unit's buffers, attributes and gradients, and what the call writes into, afterwards."""
    snapshot = tree.Snapshot()
    for module in unit.modules():
        snapshot.add(module)
    kept = [(t, t.detach().clone()) for t in unit.buffers()]
    kept += [(t, t.detach().clone()) for t in given if not t.requires_grad]
    try:
        yield
    finally:
        snapshot.restore()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
