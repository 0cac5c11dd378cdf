"""What a partition is predicted to cost: times and bytes of its stages, and the schedule's bubble."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from smpar.runtime.partitioning import STATE, link_seconds
from smpar.schedule import Kind, Program, Schedule, bubble, makespan, times
from smpar.trace.graph import nbytes

if TYPE_CHECKING:
    from smpar.runtime.partitioning import Partitioned
    from smpar.stage.record import MicrobatchProgram


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        units: names of its units, in call order; those never called come last.
        parameters, parameter_bytes: held there; one that is tied over stages counts on each.
        tied: whether one of them is held elsewhere too.
        seconds: of one microbatch's forward and backward; None if not predicted.
        memory: bytes of parameters, gradients, two moments of an optimizer, and activations of the microbatches in
            flight; None if not predicted.
    """

    units: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    tied: bool
    seconds: float | None
    memory: float | None


def predict_stages(model: nn.Module, partitioned: Partitioned, in_flight: tuple[int, ...]) -> list[Stage]:
    """Predict each stage of a partition.

    Args:
        in_flight: by stage, the most microbatches whose activations are kept at a time.
    """
    layout, graph = partitioned.layout, partitioned.graph
    traced = any(u.calls for u in graph.units)
    stages = []
    for stage in range(len(layout.ranks)):
        called = [u for u, s in zip(graph.units, partitioned.stage_of_unit, strict=True) if s == stage]
        known = {u.name for u in called}
        rest = [layout.names[m] for m, s in layout.units.items() if s == stage and layout.names[m] not in known]
        held = [p for p in model.parameters() if stage in layout.holders.get(id(p), ())]
        state = sum(nbytes(p) * (STATE if p.requires_grad else 1) for p in held)
        saved = in_flight[stage] * sum(u.saved_bytes for u in called)
        stages.append(
            Stage(
                tuple([*(u.name for u in called), *rest]),
                sum(p.numel() for p in held),
                sum(nbytes(p) for p in held),
                any(len(layout.holders[id(p)]) > 1 for p in held),
                sum(u.seconds for u in called) if traced else None,
                float(state + saved) if traced else None,
            )
        )
    return stages


def most_in_flight(schedule: Schedule, program: Program) -> tuple[int, ...]:
    """By stage, the most microbatches whose activations it keeps at once; without backwards each ends at once."""
    most, now = [0] * program.stages, [0] * program.stages
    ends = (Kind.B, Kind.W) if program.backward else (Kind.F,)
    for _, _, action in schedule:
        stage = program.segments[action.segment].stage
        if action.kind is Kind.F:
            now[stage] += 1
            most[stage] = max(most[stage], now[stage])
        if action.kind in ends:
            now[stage] -= 1
    return tuple(most)


def step_shape(programs: Sequence[MicrobatchProgram]) -> Program:
    """The program that stands for a step's microbatches: all do the same, though some may lack a backward."""
    return dataclasses.replace(programs[0].shape, backward=any(p.shape.backward for p in programs))


def predict_step(schedule: Schedule, program: Program) -> tuple[float, float]:
    """Seconds of a step's microbatches, transfers included, and the idle part of its stages, 0 to 1."""
    timeline = times(schedule, program, transfer)
    return makespan(timeline), bubble(timeline, len(schedule.ranks))


def transfer(size: int, source: int, target: int) -> float:
    """Seconds of a message of ``size`` bytes, between any two ranks."""
    return link_seconds(size)
