"""What a right schedule is, said a second time: an order that must hold between actions has no cycle."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from smpar.schedule import Action, Kind, Program, Schedule


def must_precede(program: Program, microbatch: int, there: Collection[Action] = ()) -> Iterator[tuple[Action, Action]]:
    """(earlier, later) for all pairs of one microbatch that have an order; backwards with an I `there` are split."""

    def rank(segment: int) -> int:
        stage = program.segments[segment].stage
        return program.ranks[stage] if program.ranks else stage

    def forward(segment: int) -> Action:
        return Action(Kind.F, segment, microbatch)

    def backward(segment: int) -> Action:
        part = Action(Kind.I, segment, microbatch)
        return part if part in there else Action(Kind.B, segment, microbatch)

    count = len(program.segments)
    for a in range(count):
        if backward(a).kind is Kind.I:
            yield backward(a), Action(Kind.W, a, microbatch)
        for b in range(count):
            if rank(a) == rank(b) and a < b:
                yield forward(a), forward(b)
            if rank(a) == rank(b) and program.backward:
                yield forward(a), backward(b)
    for flow in program.flows:
        if flow.forward and rank(flow.source) != rank(flow.target):
            yield forward(flow.source), forward(flow.target)
        if flow.producer != flow.target:
            yield forward(flow.producer), forward(flow.target)
            if flow.backward and program.backward:
                yield backward(flow.target), backward(flow.producer)


def is_right(schedule: Schedule, programs: Sequence[Program], active: int | None = None) -> bool:
    """Whether the schedule has all actions once, in their ranks, deadlocks nowhere and keeps the cap."""
    program = programs[0]
    there = {action for actions in schedule.ranks for action in actions}
    wanted = [set[Action]() for _ in range(max(program.ranks) + 1 if program.ranks else program.stages)]
    for microbatch, each in enumerate(programs):
        for segment in each.segments:
            rank = each.ranks[segment.stage] if each.ranks else segment.stage
            wanted[rank].add(Action(Kind.F, segment.index, microbatch))
            if each.backward:
                split = segment.weight > 0 and Action(Kind.I, segment.index, microbatch) in there
                kinds = (Kind.I, Kind.W) if split else (Kind.B,)
                wanted[rank].update(Action(kind, segment.index, microbatch) for kind in kinds)
    if len(schedule.ranks) != len(wanted):
        return False
    for actions, want in zip(schedule.ranks, wanted, strict=True):
        if len(actions) != len(want) or set(actions) != want:
            return False
    sorter: TopologicalSorter[Action] = TopologicalSorter()
    for microbatch, each in enumerate(programs):
        for earlier, later in must_precede(each, microbatch, there):
            sorter.add(later, earlier)
    for actions in schedule.ranks:
        for earlier, later in pairwise(actions):
            sorter.add(later, earlier)
    try:
        sorter.prepare()
    except CycleError:
        return False
    return active is None or all(peak <= active for peak in peaks(schedule))


def peaks(schedule: Schedule) -> list[int]:
    """Most microbatches between their first and last action, by rank."""
    result = []
    for actions in schedule.ranks:
        spans: dict[int, list[int]] = {}
        for position, action in enumerate(actions):
            spans.setdefault(action.microbatch, []).append(position)
        counts = [sum(s[0] <= p <= s[-1] for s in spans.values()) for p in range(len(actions))]
        result.append(max(counts, default=0))
    return result
