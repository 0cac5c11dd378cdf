"""List scheduling: run the program's tasks on a simulated clock and write down who did what.

    repeat: take the rank that can start something first, at time t
            of its tasks that are ready at t start the one with the least priority tuple
            release the tasks that waited for it

A rank admits microbatches in order and only while fewer than `active` are in flight there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.program import Program, Task, Transfer

Key = tuple[float, ...]
"""Ready tasks start in ascending order of this."""

RULES: dict[str, Callable[[int, int, float], Key]] = {
    "oldest": lambda microbatch, segment, path: (microbatch, segment),
    "longest": lambda microbatch, segment, path: (-path, microbatch, segment),
    "deepest": lambda microbatch, segment, path: (-segment, microbatch),
}
"""Which ready forward first, from (microbatch, segment, longest path of times from it to the end):
the oldest microbatch's; the one with most still to come; the one latest in the program."""


def greedy(
    name: str, program: Program, microbatches: int, active: int, transfer: Transfer, drain: bool = False
) -> Schedule:
    """The fastest of one list schedule per rule.

    Args:
        name: of the resulting schedule.
        program: what one microbatch does.
        microbatches: how many.
        active: cap on the microbatches in flight on a rank.
        transfer: time of a message.
        drain: a rank's backwards wait for all its forwards, of all microbatches.
    """
    graph = _graph(program, transfer)
    best: tuple[float, Schedule] | None = None
    for rule in RULES.values():
        end, ranks = _run(graph, microbatches, active, rule, drain)
        # Sums of floats in another order differ in their last bits: that is a tie.
        if best is None or end < best[0] * (1 - 1e-9):
            best = end, Schedule(name, ranks)
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class _Graph:
    """The program's tasks as numbers: what the inner loop reads."""

    size: int
    tasks: tuple[Task, ...]
    rank: list[int]
    cost: list[float]
    waits: list[int]
    after: list[list[tuple[int, float]]]
    path: list[float]
    opens: list[bool]
    of_rank: list[int]
    forwards_of_rank: list[int]


def _graph(program: Program, transfer: Transfer) -> _Graph:
    tasks = program.tasks
    number = {task: i for i, task in enumerate(tasks)}
    rank = [program.segment_ranks[task.segment] for task in tasks]
    cost = [program.cost(task) for task in tasks]
    after: list[list[tuple[int, float]]] = [[] for _ in tasks]
    waits = [0] * len(tasks)
    for dependency in program.dependencies:
        before, then = number[dependency.before], number[dependency.after]
        after[before].append((then, program.delay(dependency, transfer)))
        waits[then] += 1
    path = [0.0] * len(tasks)
    # Forwards depend on earlier forwards only, backwards on later backwards and on forwards: a topological order.
    half = len(program.segments)
    for task in [*range(half, len(tasks)), *reversed(range(half))]:
        path[task] = cost[task] + max((delay + path[then] for then, delay in after[task]), default=0.0)
    first = {r: i for i, r in reversed(list(enumerate(program.segment_ranks)))}
    opens = [task.kind is Kind.F and first[rank[i]] == i for i, task in enumerate(tasks)]
    of_rank, forwards = [0] * program.size, [0] * program.size
    for task_rank, task in zip(rank, tasks, strict=True):
        of_rank[task_rank] += 1
        forwards[task_rank] += task.kind is Kind.F
    return _Graph(program.size, tasks, rank, cost, waits, after, path, opens, of_rank, forwards)


@dataclass
class _Rank:
    """One rank on the simulated clock.

    `coming` holds tasks by the time they become ready, `ready` by priority, and `doors` the times at which
    microbatches not yet begun here could begin.
    """

    free: float = 0.0
    coming: list[tuple[float, Key, int, int]] = field(default_factory=list)
    ready: list[tuple[Key, int, int]] = field(default_factory=list)
    doors: dict[int, float] = field(default_factory=dict)
    held: list[tuple[float, Key, int, int]] = field(default_factory=list)
    next_microbatch: int = 0
    in_flight: int = 0
    forwards_left: int = 0
    left: dict[int, int] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)


def _run(
    graph: _Graph, microbatches: int, active: int, rule: Callable[[int, int, float], Key], drain: bool
) -> tuple[float, tuple[tuple[Action, ...], ...]]:
    """One list schedule: its end and its actions."""
    tasks, task_rank, count = graph.tasks, graph.rank, len(graph.tasks)
    ranks = [_Rank(forwards_left=n * microbatches) for n in graph.forwards_of_rank]
    waits = [list(graph.waits) for _ in range(microbatches)]
    since = [[0.0] * count for _ in range(microbatches)]

    def key(microbatch: int, task: int) -> Key:
        if tasks[task].kind is Kind.B:
            return (0.0, microbatch, -graph.path[task], -tasks[task].segment)
        return (1.0, *rule(microbatch, tasks[task].segment, graph.path[task]))

    def release(microbatch: int, task: int, time: float) -> None:
        rank = ranks[task_rank[task]]
        if graph.opens[task]:
            rank.doors[microbatch] = time
            admit(rank, task)
            return
        entry = (time, key(microbatch, task), microbatch, task)
        if drain and tasks[task].kind is Kind.B and rank.forwards_left:
            rank.held.append(entry)
        else:
            heapq.heappush(rank.coming, entry)

    def admit(rank: _Rank, task: int) -> None:
        microbatch = rank.next_microbatch
        while rank.in_flight < active and microbatch in rank.doors:
            heapq.heappush(rank.coming, (rank.doors.pop(microbatch), key(microbatch, task), microbatch, task))
            rank.in_flight += 1
            microbatch += 1
        rank.next_microbatch = microbatch

    opening = {task_rank[task]: task for task in range(count) if graph.opens[task]}
    for microbatch in range(microbatches):
        for task in range(count):
            if graph.waits[task] == 0:
                release(microbatch, task, 0.0)

    for _ in range(microbatches * count):
        time, chosen = float("inf"), -1
        for number, rank in enumerate(ranks):
            if rank.ready or rank.coming:
                start = rank.free if rank.ready else max(rank.free, rank.coming[0][0])
                if start < time:
                    time, chosen = start, number
        rank = ranks[chosen]
        while rank.coming and rank.coming[0][0] <= time:
            _, priority, microbatch, task = heapq.heappop(rank.coming)
            heapq.heappush(rank.ready, (priority, microbatch, task))
        _, microbatch, task = heapq.heappop(rank.ready)
        rank.free = time + graph.cost[task]
        rank.actions.append(Action(tasks[task].kind, tasks[task].segment, microbatch))
        if tasks[task].kind is Kind.F:
            rank.forwards_left -= 1
            if not rank.forwards_left:
                for entry in rank.held:
                    heapq.heappush(rank.coming, entry)
                rank.held.clear()
        left = rank.left.get(microbatch, graph.of_rank[chosen]) - 1
        rank.left[microbatch] = left
        if left == 0:
            rank.in_flight -= 1
            admit(rank, opening[chosen])
        for then, delay in graph.after[task]:
            ready_at = since[microbatch][then] = max(since[microbatch][then], rank.free + delay)
            waits[microbatch][then] -= 1
            if waits[microbatch][then] == 0:
                release(microbatch, then, ready_at)
    return max(rank.free for rank in ranks), tuple(tuple(rank.actions) for rank in ranks)
