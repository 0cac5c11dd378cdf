"""What a schedule keeps: bytes that a rank holds from a forward to the end of its backward.

actions of a rank   0F0  0F1  0I0  0W0  0B1
held                 1    2    2    2    1      peak 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smpar.schedule.actions import Kind, Schedule
from smpar.schedule.program import Program
from smpar.schedule.simulate import Timed


class Step(NamedTuple):
    """From `time` on, so much is held, until the next step."""

    time: float
    held: int


def memory(schedule: Schedule, program: Program) -> tuple[int, ...]:
    """For each rank, the most that it holds at once.

    A segment's `saved` bytes are held from the start of its forward to the end of its B or W; in a program without
    backward, to the end of the forward. Where no segment saves anything, each counts 1: microbatch-segments.

    Args:
        schedule: forwards and backwards, before lowering.
        program: what each microbatch does.
    """
    sizes = _sizes(program)
    peaks = []
    for actions in schedule.ranks:
        now = peak = 0
        for action in actions:
            now += sizes[action.segment] * (action.kind is Kind.F)
            peak = max(peak, now)
            now -= sizes[action.segment] * _frees(action.kind, program)
        peaks.append(peak)
    return tuple(peaks)


def held(timeline: Sequence[Timed], program: Program) -> tuple[tuple[Step, ...], ...]:
    """For each rank, what it holds over time: the steps of a curve that starts at 0 and ends at 0.

    Args:
        timeline: from `smpar.schedule.times`.
        program: what each microbatch does.

    Returns:
        One step per time at which the amount changes, by time; sizes as for `memory`.
    """
    sizes = _sizes(program)
    curves: list[list[Step]] = [[] for _ in range(program.size)]
    for timed in sorted(timeline, key=lambda timed: (timed.start, timed.end)):
        curve, size = curves[timed.rank], sizes[timed.action.segment]
        if timed.action.kind is Kind.F:
            _step(curve, timed.start, size)
        if _frees(timed.action.kind, program):
            _step(curve, timed.end, -size)
    return tuple(map(tuple, curves))


def counts_segments(program: Program) -> bool:
    """Whether `memory` and `held` count microbatch-segments rather than bytes."""
    return not any(segment.saved for segment in program.segments)


def _sizes(program: Program) -> list[int]:
    return [1 if counts_segments(program) else segment.saved for segment in program.segments]


def _frees(kind: Kind, program: Program) -> bool:
    return kind in (Kind.B, Kind.W) or (kind is Kind.F and not program.backward)


def _step(curve: list[Step], time: float, change: int) -> None:
    before = curve[-1].held if curve else 0
    if curve and curve[-1].time == time:
        curve.pop()
    curve.append(Step(time, before + change))
