"""What the planner's simulator says that an emulation takes."""

from __future__ import annotations

from smpar.emulate.emulation import Emulation, Step
from smpar.planner.pipeline import Timeline
from smpar.schedule import Kind, Timed


def predicted(emulation: Emulation) -> Step:
    """The step, simulated: each replica's pipeline, then the reductions between them and the optimizer.

    Raises:
        ScheduleNameError: there is no schedule of that name.
        ScheduleError: it does not go with the stages' ranks.
        NativeMissing: smpar was not installed, only found.
    """
    kinds = {id(timeline): _timed(timeline) for timeline in emulation.timelines}
    actions = tuple(kinds[id(timeline)] for timeline in emulation.timelines)
    done = [_free(emulation, replica, timed) for replica, timed in enumerate(actions)]
    for rank, step in enumerate(emulation.optimizer or (0.0,) * emulation.size):
        reduced = 0.0
        for stage in emulation.reduced(rank):
            reduced = max(reduced, emulation.complete[stage]) + emulation.reduction[stage]
        for ends in done:
            ends[rank] = max(ends[rank], reduced) + step
    return Step(tuple(tuple(ends) for ends in done), actions)


def _timed(timeline: Timeline) -> tuple[Timed, ...]:
    assert timeline.timetable is not None
    return tuple(timeline.timetable.timed())


def _free(emulation: Emulation, replica: int, timeline: tuple[Timed, ...]) -> list[float]:
    """By rank, when it has done all actions and started all messages."""
    pipeline = emulation.pipelines[replica]
    free = [0.0] * emulation.size
    for timed in timeline:
        free[timed.rank] = max(free[timed.rank], timed.end)
    for rank, actions in enumerate(emulation.orders[replica].ranks):
        last = actions[-1]
        receiver = last.segment + (1 if last.kind is Kind.F else -1)
        sends = last.kind is not Kind.W and 0 <= receiver < emulation.stages and pipeline.ranks[receiver] != rank
        free[rank] += pipeline.host * sends
    return free
