"""A model's profile, measured on the present device: layers, the tensors between them, seconds by microbatch size.

model ──trace──▶ units (the layers) ──trace again at each size──▶ calls ──time──▶ Profile
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from smpar.errors import CommandError
from smpar.planner.profile import Profile, Times
from smpar.probe.devices import device_name
from smpar.probe.divided import alike, counterparts, divided_copies, divided_copy, divided_of, unlike
from smpar.probe.traces import at_size, call_of, layers_of, tensors_of, tied_of
from smpar.probe.whole import whole_seconds
from smpar.runtime.measure import Measurer
from smpar.runtime.measure import Times as Measured
from smpar.runtime.module_graph import open_until_even, run
from smpar.runtime.partitioning import Explored, survey
from smpar.trace import tree
from smpar.trace.fake import FakeRunner
from smpar.trace.outcomes import Outcomes

_ENOUGH = 0.2  # seconds of timing one call
_ENOUGH_WHOLE = 1.0  # and the whole model


def profile_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Sequence[int],
    device: torch.device,
    step: Callable[..., Any] | None = None,
    done: Callable[[], None] = lambda: None,
    degrees: Sequence[int] = (1,),
) -> Profile:
    """Measure a model on a device, where it stays.

    Layers are the units of `smpar.module_graph`, found at the largest size, whose bytes count, too. Times are of each
    unit alone, on random inputs, scaled so that they add up to the whole model's; equal units are measured once.

    Args:
        model: in the mode (``train`` or ``eval``) that matters.
        args, kwargs: a batch; the tensors whose first axis is as long as the first tensor's are cut or repeated to
            each size, all others are left alone.
        sizes: samples of a microbatch.
        device: of the measurement.
        step: ``step(model, *args, **kwargs)`` calls the model and the loss; None calls the model.
        done: called after each size.
        degrees: tensor-parallel degrees to measure at, too, if the model is marked for that and can be divided: of one
            rank alone, with copies in memory where the others would send something.

    Raises:
        CommandError: the model is on the meta device, the batch holds no tensor, or the model does not run at a size.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise CommandError("microbatch sizes are whole numbers of at least 1", f"{list(sizes)}", "give 1,2,4")
    if any(p.is_meta for p in model.parameters()):
        raise CommandError(
            "times are measured on real parameters", "some on the meta device", "make the model on a CPU"
        )
    model.to(device)
    args, kwargs = tree.map_tensors(lambda t: t.to(device), (tuple(args), dict(kwargs)))
    fn, largest = step or run, sizes[-1]
    outcomes = Outcomes(FakeRunner(device))
    with torch.inference_mode(False), torch.enable_grad():
        first = call_of(model, args, kwargs, largest)
        even = at_size(largest, lambda: open_until_even(fn, first, model, outcomes))
        copies, undivided = divided_copies(model, degrees)
        opened = alike(model, even.layout.split, copies.values())
        hooks = alike(model, even.layout.glue_hooks, copies.values())

        def measure(tp: int, version: nn.Module) -> tuple[Explored, Times]:
            there = counterparts(model, opened, version), counterparts(model, hooks, version)
            rows: list[list[Measured]] = []
            seen: Explored | None = None
            with Measurer(outcomes, lambda work: work(), split=True, enough=_ENOUGH) as measurer:
                for size in reversed(sizes):
                    call = call_of(version, args, kwargs, size)
                    now = at_size(size, lambda c=call: survey(fn, c, version, outcomes, *map(set, there)))  # type: ignore[misc]
                    seen = seen or now
                    if now.modules != seen.modules:
                        raise CommandError(
                            "a model runs the same modules at every microbatch size",
                            f"others at {size} than at {largest} samples",
                            f"leave {size} out of the sizes",
                        )
                    alone = whole_seconds(fn, call, version, device, _ENOUGH_WHOLE)
                    rows.insert(0, _adding_up(measurer.times(now), alone))
                    done()
            assert seen is not None
            return seen, _times(device, tp, sizes, rows)

        seen, times = measure(1, model)
        layers, tied = layers_of(model, seen, largest), tied_of(seen)
        profile = Profile(layers, tensors_of(seen, largest), (times,), tied)
        for tp in copies:
            version = divided_copy(model, tp, meta=False)
            assert version is not None
            other, times = measure(tp, version)
            if undivided := unlike(seen, other):
                continue
            made = layers_of(version, other, largest)
            profile = replace(
                profile,
                times=(*profile.times, times),
                divided=(*profile.divided, divided_of(tp, version, other, largest, profile, made)),
            )
    return replace(profile, undivided="" if profile.divided else undivided)


def _times(device: torch.device, tp: int, sizes: Sequence[int], rows: Sequence[Sequence[Measured]]) -> Times:
    parts = (tuple(tuple(getattr(t, part) for t in row) for row in rows) for part in ("forward", "backward", "weight"))
    return Times(device_name(device), tp, tuple(map(float, sizes)), *parts)


def _adding_up(row: Sequence[Measured], whole: tuple[float, float]) -> list[Measured]:
    """Times of units scaled to the whole model's: between them lie glue, cold caches and the sums of gradients."""
    forward, backward = sum(t.forward for t in row), sum(t.backward for t in row)
    more = [w / part if w > 0.0 and part > 0.0 else 1.0 for w, part in zip(whole, (forward, backward), strict=True)]
    return [Measured(t.forward * more[0], t.backward * more[1], t.weight * more[1]) for t in row]
