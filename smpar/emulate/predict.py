"""What the simulator says that an emulation takes."""

from __future__ import annotations

from smpar.emulate.emulation import Emulation, Step
from smpar.schedule import Kind, Program, Schedule, Task, Timed, lower, message_of
from smpar.schedule.lower import Message


def predicted(emulation: Emulation) -> Step:
    """The step, simulated.

    A message starts when the action that makes it has ended, on a channel per directed pair of ranks that carries one
    message at a time, first in, first out; an action starts when its rank is free and its messages are there.

    Raises:
        ScheduleNameError: there is no schedule of that name.
        ScheduleError: it does not go with the numbers.
    """
    timelines = tuple(_timeline(emulation, replica) for replica in range(emulation.replicas))
    ready = [_last_backward(timeline) for timeline in timelines]
    done = [[0.0] * emulation.size for _ in timelines]
    for ends, timeline in zip(done, timelines, strict=True):
        for timed in timeline:
            ends[timed.rank] = max(ends[timed.rank], timed.end)
    for rank in range(emulation.size):
        free = 0.0
        for stage in emulation.reduced(rank):
            free = max(free, *(last[stage] for last in ready)) + emulation.reduction[stage]
        for ends in done:
            ends[rank] = max(ends[rank], free) + emulation.optimizer_of(rank)
    return Step(tuple(tuple(ends) for ends in done), timelines)


def _last_backward(timeline: tuple[Timed, ...]) -> dict[int, float]:
    """Stage -> when its weights have all gradients."""
    last: dict[int, float] = {}
    for timed in timeline:
        if timed.action.kind is not Kind.F:
            last[timed.action.segment] = max(last.get(timed.action.segment, 0.0), timed.end)
    return last


def _timeline(emulation: Emulation, replica: int) -> tuple[Timed, ...]:
    program: Program = emulation.programs[replica]
    schedule: Schedule = emulation.orders[replica]
    lowered = lower(schedule, [program] * emulation.microbatches).ranks
    at = [0] * len(lowered)
    free = [0.0] * len(lowered)
    ready = [0.0] * len(lowered)  # when what the rank has received for its next action is there
    channel: dict[tuple[int, int], float] = {}
    arrival: dict[tuple[int, Message], float] = {}
    timeline = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lowered):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind.is_send:
                    link = emulation.link(replica, action.flow, action.kind)
                    start = max(free[rank], channel.get((rank, action.peer), 0.0))
                    channel[rank, action.peer] = start + link.wire
                    arrival[action.peer, message_of(action)] = start + link.wire + link.latency
                elif action.kind.is_message:
                    if (rank, message_of(action)) not in arrival:
                        break
                    ready[rank] = max(ready[rank], arrival[rank, message_of(action)])
                else:
                    start = max(free[rank], ready[rank])
                    free[rank] = start + program.cost(Task(action.kind, action.segment))
                    ready[rank] = 0.0
                    timeline.append(Timed(rank, action, start, free[rank]))
                at[rank] += 1
                moved = True
    return tuple(sorted(timeline, key=lambda timed: (timed.start, timed.rank, timed.end)))
