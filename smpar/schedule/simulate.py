"""A schedule on a simulated clock: when each action starts and ends, and what that wastes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smpar.errors import ScheduleError
from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.program import Program, Task, Transfer


class Timed(NamedTuple):
    """An action and its times, in the unit of the segments' times."""

    rank: int
    action: Action
    start: float
    end: float


def times(schedule: Schedule, program: Program, transfer_seconds: Transfer = 0.0) -> list[Timed]:
    """When each action runs: as soon as its rank is free and its inputs are there; a W when its I has ended.

    Messages take `transfer_seconds`, delay no computation and not each other.

    Args:
        schedule: forwards and backwards, before lowering.
        program: what each microbatch does.
        transfer_seconds: time of a message: a constant, or a function of (bytes, sender's rank, receiver's rank).

    Returns:
        All actions, by start, then rank.

    Raises:
        ScheduleError: the schedule cannot run; `smpar.schedule.check` says why.
    """
    needs: dict[Task, list[tuple[Task, float]]] = {}
    for dependency in program.dependencies:
        delay = program.delay(dependency, transfer_seconds)
        needs.setdefault(dependency.after, []).append((dependency.before, delay))
    if program.backward:
        for segment in program.segments:
            needs[Task(Kind.W, segment.index)] = [(Task(Kind.B, segment.index), 0.0)]
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    costs = {(kind, s.index): program.cost(Task(kind, s.index)) for kind in kinds for s in program.segments}
    ends: dict[tuple[Task, int], float] = {}
    at = [0] * len(schedule.ranks)
    free = [0.0] * len(schedule.ranks)
    result: list[Timed] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                task = Task(action.kind.role, action.segment)
                before = [(ends.get((need, action.microbatch)), delay) for need, delay in needs.get(task, ())]
                ready = [end + delay for end, delay in before if end is not None]
                if len(ready) < len(before):
                    break
                start = max([free[rank], *ready])
                free[rank] = ends[task, action.microbatch] = start + costs[action.kind, action.segment]
                result.append(Timed(rank, action, start, free[rank]))
                at[rank] += 1
                moved = True
    if any(position < len(actions) for position, actions in zip(at, schedule.ranks, strict=True)):
        marks = [(rank, position) for rank, position in enumerate(at) if position < len(schedule.ranks[rank])]
        raise ScheduleError(
            "a schedule runs to its end",
            f"the marked actions wait for ever\n{schedule.table(marks, around=8)}",
            "check(schedule, programs) names the reason",
        )
    return sorted(result, key=lambda timed: (timed.start, timed.rank, timed.end))


def makespan(timeline: Sequence[Timed]) -> float:
    """Time from 0 to the last end."""
    return max((timed.end for timed in timeline), default=0.0)


def bubble(timeline: Sequence[Timed], ranks: int) -> float:
    """Idle share of all ranks' time from 0 to the last end, between 0 and 1; (S-1)/(M+S-1) for GPipe on equal stages.

    Args:
        timeline: from `times`.
        ranks: number of ranks, those without actions included.
    """
    whole = ranks * makespan(timeline)
    return 1.0 - sum(timed.end - timed.start for timed in timeline) / whole if whole else 0.0
