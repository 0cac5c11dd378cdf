"""List scheduling: run the program's tasks on a simulated clock and write down who did what.

    repeat: take the rank that can start something first, at time t
            of its tasks that are ready at t choose forward or backward, then the first of that kind
            release the tasks that waited for it

A rank admits microbatches in order and only while fewer than `active` are in flight there, so the oldest unfinished
microbatch can always go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.program import Program, Task, Transfer

Key = tuple[float, ...]
"""Ready tasks of one kind start in ascending order of this."""

Rule = Callable[[int, int, float, int], Key]
"""Key of a task from its microbatch, its place in program order (descending for backwards, so that it grows with
time), the longest path of times from it to the end, and the number of ranks."""


def oldest(microbatch: int, place: int, path: float, ranks: int) -> Key:
    """The oldest microbatch first."""
    return (microbatch, place)


def longest(microbatch: int, place: int, path: float, ranks: int) -> Key:
    """The task with most still to come first."""
    return (-path, microbatch, place)


def grouped(microbatch: int, place: int, path: float, ranks: int) -> Key:
    """As many microbatches as there are ranks go through each place together (arXiv 2104.04473, section 2.2)."""
    return (microbatch // ranks, place, microbatch)


class Policy(NamedTuple):
    """How a free rank chooses: which kind if both are ready ("turn": not the kind of its last action), then which."""

    prefer: Literal["backward", "turn", "forward"]
    forward: Rule
    backward: Rule


POLICIES = (
    Policy("backward", oldest, longest),
    Policy("turn", oldest, oldest),
    Policy("turn", grouped, longest),
    Policy("forward", oldest, oldest),
    Policy("turn", oldest, longest),
)
"""All keep the cap, so none needs more memory than allowed; which is fastest depends on the program. On 128 random
cases the best of these five was within 0.5 % on average of the best of 48 combinations; the first alone, 6 %."""

DRAIN_POLICIES = (
    Policy("forward", oldest, oldest),
    Policy("forward", longest, longest),
    Policy("forward", grouped, grouped),
)

_GAIN = 0.01
"""A later policy must be so much faster than an earlier one: the first, backward first, frees memory soonest."""


def greedy(
    name: str,
    program: Program,
    microbatches: int,
    active: int,
    transfer: Transfer,
    drain: bool = False,
    split: bool = False,
) -> Schedule:
    """The fastest of one list schedule per policy.

    Args:
        name: of the resulting schedule.
        program: what one microbatch does.
        microbatches: how many.
        active: cap on the microbatches in flight on a rank.
        transfer: time of a message.
        drain: a rank's backwards wait for all its forwards, of all microbatches.
        split: also try every policy with the backwards split of all segments that have a weights' part.
    """
    graphs = [_graph(program, transfer, frozenset())]
    parted = frozenset(segment.index for segment in program.segments if segment.weight > 0)
    if split and program.backward and parted:
        graphs.append(_graph(program, transfer, parted))
    best_end, best = float("inf"), Schedule(name, ((),) * program.size)
    for graph in graphs:
        for policy in DRAIN_POLICIES if drain else POLICIES:
            end, ranks = _run(graph, microbatches, active, policy, drain)
            if end < best_end * (1 - _GAIN):
                best_end, best = end, Schedule(name, ranks)
    return best


@dataclass(frozen=True)
class _Graph:
    """The program's tasks as numbers, forwards, backwards (B or I), W's: what the inner loop reads."""

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
    first_weight: int


def _graph(program: Program, transfer: Transfer, split: Set[int]) -> _Graph:
    """The program's graph, with the backwards of the segments in `split` as I and W."""
    tasks = [
        task._replace(kind=Kind.I) if task.kind is Kind.B and task.segment in split else task for task in program.tasks
    ]
    tasks += [Task(Kind.W, segment) for segment in sorted(split)]
    number = {Task(task.kind.role, task.segment): i for i, task in enumerate(tasks)}
    rank = [program.segment_ranks[task.segment] for task in tasks]
    cost = [program.cost(task) for task in tasks]
    after: list[list[tuple[int, float]]] = [[] for _ in tasks]
    waits = [0] * len(tasks)
    for dependency in program.dependencies:
        before, then = number[dependency.before], number[dependency.after]
        after[before].append((then, program.delay(dependency, transfer)))
        waits[then] += 1
    for segment in split:
        after[number[Task(Kind.B, segment)]].append((number[Task(Kind.W, segment)], 0.0))
        waits[number[Task(Kind.W, segment)]] += 1
    path = [0.0] * len(tasks)
    # Forwards depend on earlier forwards only, backwards on later backwards and on forwards: a topological order.
    half = len(program.segments)
    weights = len(program.tasks)
    for task in [*range(weights, len(tasks)), *range(half, weights), *reversed(range(half))]:
        path[task] = cost[task] + max((delay + path[then] for then, delay in after[task]), default=0.0)
    first = {r: i for i, r in reversed(list(enumerate(program.segment_ranks)))}
    opens = [task.kind is Kind.F and first[rank[i]] == i for i, task in enumerate(tasks)]
    of_rank, forwards = [0] * program.size, [0] * program.size
    for task_rank, task in zip(rank, tasks, strict=True):
        of_rank[task_rank] += 1
        forwards[task_rank] += task.kind is Kind.F
    return _Graph(program.size, tuple(tasks), rank, cost, waits, after, path, opens, of_rank, forwards, weights)


_Entry = tuple[Key, int, int]
"""A task that can start: (key, microbatch, task)."""


@dataclass
class _Rank:
    """One rank on the simulated clock.

    `coming` holds tasks by the time at which they become ready, `ready` those that are, forwards and backwards apart;
    `fill` W's that can start, which run when nothing else can; `doors` the times at which microbatches not yet admitted
    could begin; `held` backwards that a drain holds back.
    """

    forwards_left: int
    first_backward: int
    free: float = 0.0
    coming: list[tuple[float, _Entry]] = field(default_factory=list)
    ready: tuple[list[_Entry], list[_Entry]] = field(default_factory=lambda: ([], []))
    fill: list[_Entry] = field(default_factory=list)
    doors: dict[int, float] = field(default_factory=dict)
    held: list[tuple[float, _Entry]] = field(default_factory=list)
    next_microbatch: int = 0
    in_flight: int = 0
    left: dict[int, int] = field(default_factory=dict)
    last_backward: bool = False
    actions: list[Action] = field(default_factory=list)

    def start(self) -> float:
        """When it can start its next task; infinity if none is in sight."""
        if self.ready[0] or self.ready[1] or self.fill:
            return self.free
        return max(self.free, self.coming[0][0]) if self.coming else float("inf")

    def choose(self, time: float, prefer: str) -> _Entry:
        """Take the task to start at `time`, the rank's `start()`."""
        while self.coming and self.coming[0][0] <= time:
            entry = heapq.heappop(self.coming)[1]
            heapq.heappush(self.ready[entry[2] >= self.first_backward], entry)
        if not self.ready[0] and not self.ready[1]:
            return heapq.heappop(self.fill)
        backward = prefer == "backward" or (prefer == "turn" and not self.last_backward)
        return heapq.heappop(self.ready[backward] or self.ready[not backward])


def _keys(graph: _Graph, microbatches: int, policy: Policy) -> list[list[Key]]:
    """Microbatch -> task -> key."""
    forward, backward = policy.forward, policy.backward
    return [
        [
            forward(microbatch, task.segment, path, graph.size)
            if task.kind is Kind.F
            else backward(microbatch, -task.segment, path, graph.size)
            for task, path in zip(graph.tasks, graph.path, strict=True)
        ]
        for microbatch in range(microbatches)
    ]


def _run(
    graph: _Graph, microbatches: int, active: int, policy: Policy, drain: bool
) -> tuple[float, tuple[tuple[Action, ...], ...]]:
    """One list schedule: its end and its actions."""
    count, first_backward = len(graph.tasks), sum(graph.forwards_of_rank)
    ranks = [_Rank(n * microbatches, first_backward) for n in graph.forwards_of_rank]
    opening = {graph.rank[task]: task for task in range(count) if graph.opens[task]}
    keys = _keys(graph, microbatches, policy)
    waits = [list(graph.waits) for _ in range(microbatches)]
    since = [[0.0] * count for _ in range(microbatches)]

    def admit(number: int) -> None:
        rank, task = ranks[number], opening[number]
        while rank.in_flight < active and rank.next_microbatch in rank.doors:
            microbatch = rank.next_microbatch
            time = rank.doors.pop(microbatch)
            heapq.heappush(rank.coming, (time, (keys[microbatch][task], microbatch, task)))
            rank.in_flight += 1
            rank.next_microbatch += 1

    def release(microbatch: int, task: int, time: float) -> None:
        rank = ranks[graph.rank[task]]
        entry = (time, (keys[microbatch][task], microbatch, task))
        if task >= graph.first_weight:
            heapq.heappush(rank.fill, entry[1])
        elif graph.opens[task]:
            rank.doors[microbatch] = time
            admit(graph.rank[task])
        elif drain and task >= first_backward and rank.forwards_left:
            rank.held.append(entry)
        else:
            heapq.heappush(rank.coming, entry)

    for microbatch in range(microbatches):
        for task in range(count):
            if graph.waits[task] == 0:
                release(microbatch, task, 0.0)

    for _ in range(microbatches * count):
        starts = [rank.start() for rank in ranks]
        time = min(starts)
        number = starts.index(time)
        rank = ranks[number]
        _, microbatch, task = rank.choose(time, policy.prefer)
        rank.free = time + graph.cost[task]
        if task < graph.first_weight:
            rank.last_backward = task >= first_backward
        rank.actions.append(Action(graph.tasks[task].kind, graph.tasks[task].segment, microbatch))
        if task < first_backward:
            rank.forwards_left -= 1
            if not rank.forwards_left:
                for entry in rank.held:
                    heapq.heappush(rank.coming, entry)
                rank.held.clear()
        left = rank.left.get(microbatch, graph.of_rank[number]) - 1
        rank.left[microbatch] = left
        if left == 0:
            rank.in_flight -= 1
            admit(number)
        for then, delay in graph.after[task]:
            ready_at = since[microbatch][then] = max(since[microbatch][then], rank.free + delay)
            waits[microbatch][then] -= 1
            if waits[microbatch][then] == 0:
                release(microbatch, then, ready_at)
    return max(rank.free for rank in ranks), tuple(tuple(rank.actions) for rank in ranks)
