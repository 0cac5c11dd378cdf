"""The cuts of stages that differ, in plain Python: what `smpar.planner.stages` computes, without bounds and speed.

The C++ core must decide equally, bit for bit, so the order of additions is part of the definition: layers from left to
right; tensors by the layer at which they enter a growing interval, then by index; stages from last to first.
"""

from __future__ import annotations

from collections.abc import Sequence

from smpar.planner.chain import fold
from smpar.planner.reference import best_cuts, intervals
from smpar.planner.stages import Layers, Place, StageCuts, check, nothing_fits


def cut_stages_reference(layers: Layers, places: Sequence[Place], microbatches: int) -> StageCuts:
    """As `smpar.planner.stages.cut_stages`: same result and errors; cubic time and more."""
    check(layers, places, microbatches)

    def cost(stage: int, a: int, b: int) -> tuple[float, float] | None:
        place = places[stage]
        seconds = stage_time(layers, place, a, b)
        return (seconds, seconds) if stage_memory(layers, place, a, b) <= place.limit else None

    found = best_cuts(len(layers), len(places), microbatches, cost)
    if found is None:
        raise nothing_fits(layers, places)
    cuts, seconds = found
    ends = list(zip(places, intervals(cuts, len(layers)), strict=True))
    times, memory = ([of(layers, place, a, b) for place, (a, b) in ends] for of in (stage_time, stage_memory))
    return StageCuts.make(places, (), cuts, seconds, times, memory)


def stage_time(layers: Layers, place: Place, a: int, b: int) -> float:
    """Seconds per microbatch of layers ``[a, b)``."""
    entering = [
        tensor.nbytes
        for layer in range(a, b)
        for tensor in layers.tensors
        if tensor.source < a and layer == min((t for t in tensor.targets if t >= a), default=None)
    ]
    computing = fold(layers.times[place.device_class][a:b])
    return computing + (fold(entering) * place.seconds_per_byte + len(entering) * place.latency)


def stage_memory(layers: Layers, place: Place, a: int, b: int) -> float:
    """Bytes of layers ``[a, b)``."""
    return fold(layers.state[a:b]) + place.in_flight * fold(layers.saved[a:b]) + place.transient
