"""A model's profile counted from a trace, for any devices and without any: operators against the rates of each device.

operator   |FLOP| / rate of products ┐
           |bytes| / rate of memory  ┴ the larger one, and a launch; twice that backward

Of tensor parallelism, each degree is a trace of its own, of the model as one rank has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smpar.errors import CommandError
from smpar.planner.cluster import DeviceType
from smpar.planner.hardware import DATA_SHEET, Reached
from smpar.planner.profile import Layer, Profile, Times
from smpar.probe.divided import alike, counterparts, divided_copies, divided_of, unlike
from smpar.probe.traces import at_size, call_of, layers_of, tensors_of, tied_of
from smpar.runtime.module_graph import open_until_even, run
from smpar.runtime.partitioning import Explored, survey
from smpar.trace.fake import FakeRunner
from smpar.trace.graph import Unit
from smpar.trace.outcomes import Outcomes

SIZES = (2, 4)
"""Samples of the two traces; not 1, at which a normalisation over the batch may refuse to train."""


@dataclass(frozen=True)
class _Traced:
    """A model, whole or as a rank of a tensor-parallel group has it, at one or two numbers of samples."""

    tp: int
    model: nn.Module
    seen: tuple[Explored, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return SIZES[-len(self.seen) :]

    @property
    def layers(self) -> tuple[Layer, ...]:
        layers = layers_of(self.model, self.seen[-1], SIZES[-1])
        return tuple(replace(layer, transient=self._transient(i)) for i, layer in enumerate(layers))

    def _transient(self, index: int) -> float:
        """The tensors of the largest operator, of which a backward has the gradients, too."""
        largest = [max((w.bytes for w, _ in x.graph.units[index].work), default=0.0) for x in self.seen]
        sizes = self.sizes
        growth = (largest[-1] - largest[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else largest[0] / sizes[0]
        return max(0.0, growth)

    def times(self, device: DeviceType, reached: Reached) -> Times:
        by_size = [[_seconds(unit, device, reached) for unit in explored.graph.units] for explored in self.seen]
        parts = (tuple(tuple(unit[part] for unit in units) for units in by_size) for part in range(3))
        return Times(device.name, self.tp, tuple(map(float, self.sizes)), *parts)


def count_profile(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Sequence[DeviceType],
    step: Callable[..., Any] | None = None,
    reached: Reached = DATA_SHEET,
    done: Callable[[], None] = lambda: None,
    degrees: Sequence[int] = (1,),
) -> Profile:
    """Count a model's costs on device types; nothing is computed, and the model may be on the meta device.

    Layers are the units of `smpar.module_graph`. Two microbatch sizes are traced, so that what does not grow with the
    microbatch is told apart. A backward takes twice its forward; of a product with a parameter, half of that gives the
    parameter's gradient and may wait. Each microbatch also adds its gradients to those before: two reads, one write.
    Counted times serve to compare plans; `smpar profile` measures.

    Args:
        model: in the mode (``train`` or ``eval``) that matters; its precision is the one that counts.
        args, kwargs: a batch; the tensors whose first axis is as long as the first tensor's are cut or repeated to
            two microbatch sizes, all others are left alone.
        devices: their ``peak_flops`` are those of the model's precision.
        step: ``step(model, *args, **kwargs)`` calls the model and the loss; None calls the model.
        reached: what kernels reach of the devices' rates.
        done: called after each call that was traced.
        degrees: tensor-parallel degrees to trace the model at, too, if it is marked for that and can be divided.

    Raises:
        CommandError: the batch holds no tensor, or the model does not run at a size.
    """
    fn = step or run
    first = next((p.device for p in model.parameters()), torch.device("cpu"))
    outcomes = Outcomes(FakeRunner(torch.device("cpu") if first.type == "meta" else first))
    outcomes.on_run = done

    def trace(tp: int, version: nn.Module, opened: set[nn.Module], hooks: set[nn.Module]) -> _Traced:
        calls = {size: call_of(version, args, kwargs, size) for size in SIZES}
        seen = tuple(
            at_size(size, lambda c=call: survey(fn, c, version, outcomes, set(opened), set(hooks)))  # type: ignore[misc]
            for size, call in calls.items()
        )
        return _Traced(tp, version, seen if seen[0].modules == seen[-1].modules else seen[-1:])

    with torch.inference_mode(False), torch.enable_grad():
        call = call_of(model, args, kwargs, SIZES[-1])
        even = at_size(SIZES[-1], lambda: open_until_even(fn, call, model, outcomes))
        copies, undivided = divided_copies(model, degrees)
        opened = alike(model, even.layout.split, copies.values())
        hooks = alike(model, even.layout.glue_hooks, copies.values())
        whole = trace(1, model, opened, hooks)
        versions = [whole]
        for tp, version in copies.items():
            there = counterparts(model, opened, version), counterparts(model, hooks, version)
            try:
                traced = trace(tp, version, *there)
                undivided = unlike(whole.seen[-1], traced.seen[-1])
            except CommandError as error:
                undivided = error.values
            if not undivided:
                versions.append(traced)
    layers = whole.layers
    times = tuple(version.times(device, reached) for version in versions for device in devices)
    profile = Profile(layers, tensors_of(whole.seen[-1], SIZES[-1]), times, tied_of(whole.seen[-1]))
    divided = tuple(
        divided_of(v.tp, v.model, v.seen[-1], SIZES[-1], profile, v.layers) for v in versions if v is not whole
    )
    return replace(profile, divided=divided, undivided="" if divided else undivided)


def _seconds(unit: Unit, device: DeviceType, reached: Reached) -> tuple[float, float, float]:
    """Of a unit's forward, backward, and the part of that which gives gradients of weights; without collectives."""
    flops, bandwidth = device.peak_flops * reached.flops, device.memory_bandwidth * reached.bytes
    each = [(w, times * w.seconds(flops, bandwidth, reached.launch)) for w, times in unit.work if not w.told]
    forward = math.fsum(seconds for _, seconds in each)
    weight = math.fsum(seconds for work, seconds in each if work.weights)
    return forward, 2 * forward + 3 * unit.parameter_bytes / bandwidth, weight
