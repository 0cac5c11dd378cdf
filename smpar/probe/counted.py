"""A model's profile counted from a trace, for any devices and without any: operators against the rates of each device.

operator   |FLOP| / rate of products ┐
           |bytes| / rate of memory  ┴ the larger one, and a launch; twice that backward
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smpar.planner.cluster import DeviceType
from smpar.planner.hardware import DATA_SHEET, Reached
from smpar.planner.profile import Layer, Profile, Times
from smpar.probe.model import at_size, call_of, layers_of, tensors_of, tied_of
from smpar.runtime.module_graph import open_until_even, run
from smpar.runtime.partitioning import Explored, survey
from smpar.trace.fake import FakeRunner
from smpar.trace.graph import Unit
from smpar.trace.outcomes import Outcomes

SIZES = (2, 4)
"""Samples of the two traces; not 1, at which a normalisation over the batch may refuse to train."""


def count_profile(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Sequence[DeviceType],
    step: Callable[..., Any] | None = None,
    reached: Reached = DATA_SHEET,
    done: Callable[[], None] = lambda: None,
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

    Raises:
        CommandError: the batch holds no tensor, or the model does not run at a size.
    """
    fn = step or run
    first = next((p.device for p in model.parameters()), torch.device("cpu"))
    outcomes = Outcomes(FakeRunner(torch.device("cpu") if first.type == "meta" else first))
    outcomes.on_run = done
    small, large = SIZES
    with torch.inference_mode(False), torch.enable_grad():
        whole = at_size(large, lambda: open_until_even(fn, call_of(model, args, kwargs, large), model, outcomes))
        opened, hooks = set(whole.layout.split), set(whole.layout.glue_hooks)
        part = at_size(small, lambda: survey(fn, call_of(model, args, kwargs, small), model, outcomes, opened, hooks))
    seen = (part, whole) if part.modules == whole.modules else (whole,)
    sizes = (small, large)[-len(seen) :]
    return Profile(
        tuple(_with_transient(layer, i, seen, sizes) for i, layer in enumerate(layers_of(model, whole, large))),
        tensors_of(whole, large),
        tuple(_times(device, reached, seen, sizes) for device in devices),
        tied_of(whole),
    )


def _with_transient(layer: Layer, index: int, seen: Sequence[Explored], sizes: Sequence[int]) -> Layer:
    """The tensors of the largest operator, of which a backward has the gradients, too."""
    largest = [max((w.bytes for w, _ in x.graph.units[index].work), default=0.0) for x in seen]
    growth = (largest[-1] - largest[0]) / (sizes[-1] - sizes[0]) if len(seen) > 1 else largest[0] / sizes[0]
    return Layer(layer.name, layer.parameters, layer.saved, output=layer.output, transient=max(0.0, growth))


def _times(device: DeviceType, reached: Reached, seen: Sequence[Explored], sizes: Sequence[int]) -> Times:
    by_size = [[_seconds(unit, device, reached) for unit in explored.graph.units] for explored in seen]
    parts = (tuple(tuple(unit[part] for unit in units) for units in by_size) for part in range(3))
    return Times(device.name, 1, tuple(map(float, sizes)), *parts)


def _seconds(unit: Unit, device: DeviceType, reached: Reached) -> tuple[float, float, float]:
    """Of a unit's forward, backward, and the part of that which gives gradients of weights."""
    flops, bandwidth = device.peak_flops * reached.flops, device.memory_bandwidth * reached.bytes
    each = [(work, times * work.seconds(flops, bandwidth, reached.launch)) for work, times in unit.work]
    forward = math.fsum(seconds for _, seconds in each)
    weight = math.fsum(seconds for work, seconds in each if work.weights)
    return forward, 2 * forward + 3 * unit.parameter_bytes / bandwidth, weight
