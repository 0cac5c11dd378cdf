"""A chain with split backwards on a simulated clock: idle time is filled with W's, for which nobody waits.

    a rank is free    something is ready     ▶ the one of the forwards and backwards that its rule prefers
                      nothing, but W's wait  ▶ the oldest W, unless something else is due soon
                      else                   ▶ idle until something is due

A forward begins only if there is memory for it and for one of each later segment of its rank; microbatches pass each
segment in order. So the oldest one always finds its memory, and nothing waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from smpar.schedule.actions import Action, Kind
from smpar.schedule.program import Program, Task, Transfer

_EPS = 1e-9
"""Memory is a sum of fractions, a time one of floats."""

_NEVER = float("inf")


class Rule(NamedTuple):
    """How a free rank chooses; of several forwards, or several backwards, always the latest stage's.

    Attributes:
        ahead: place among ranks -> most forwards of its first segment whose backward has not begun.
        turn: after a backward prefer a forward; else a backward whenever one is ready.
        patience: idle rather than run a W if a forward or backward is due in less than this share of the W's time.
        delay: what a message is thought to take at least, as a share of the mean time of forwards and whole backwards.
    """

    ahead: tuple[int, ...]
    turn: bool
    patience: float
    delay: float = 0.0


@dataclass(frozen=True)
class Chain:
    """A chain as its clock sees it; ranks are counted in order of their first segment.

    Attributes:
        program: a chain.
        transfer: time of a message.
    """

    program: Program
    transfer: Transfer = 0.0

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """Place among ranks -> the rank as the program counts it."""
        return tuple(dict.fromkeys(self.program.segment_ranks))

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Segment -> its rank's place."""
        return tuple(map(self.homes.index, self.program.segment_ranks))

    @cached_property
    def segments_of(self) -> tuple[tuple[int, ...], ...]:
        """Place among ranks -> its segments."""
        every = range(len(self.rank))
        return tuple(tuple(s for s in every if self.rank[s] == place) for place in range(len(self.homes)))

    @cached_property
    def share(self) -> tuple[float, ...]:
        """Segment -> its share of what its rank keeps of one microbatch."""
        saved = [segment.saved for segment in self.program.segments]
        shares = []
        for segment, place in enumerate(self.rank):
            mine = [saved[other] for other in self.segments_of[place]]
            shares.append(saved[segment] / sum(mine) if any(mine) else 1 / len(mine))
        return tuple(shares)

    @cached_property
    def mean(self) -> float:
        """Mean time of forwards and whole backwards."""
        tasks = self.program.tasks
        return sum(map(self.program.cost, tasks)) / max(1, len(tasks))

    @cached_property
    def messages(self) -> dict[Task, float]:
        """The tasks that wait for a message, and what it takes."""
        needs = [need for need in self.program.dependencies if need.flow is not None]
        return {need.after: self.program.delay(need, self.transfer) for need in needs}


_Choice = tuple[float, Kind, int]
"""(start, kind, segment)."""


class _Clock:
    """The chain between its start and its end."""

    def __init__(self, chain: Chain, microbatches: int, rule: Rule) -> None:
        segments = chain.program.segments
        self.chain, self.microbatches, self.rule = chain, microbatches, rule
        self.last = len(segments) - 1
        self.backward = chain.program.backward
        self.back = [Kind.I if segment.weight > 0 else Kind.B for segment in segments]
        self.first = [mine[0] for mine in chain.segments_of]
        self.latest_first = [mine[::-1] for mine in chain.segments_of]
        kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
        self.cost = {(kind, s.index): chain.program.cost(Task(kind, s.index)) for kind in kinds for s in segments}
        delay = rule.delay * chain.mean
        slow = {task: max(delay, message) for task, message in chain.messages.items()}
        self.arrival = [slow.get(Task(Kind.F, s.index), 0.0) for s in segments]
        self.departure = [slow.get(Task(Kind.B, s.index), 0.0) for s in segments]
        size = len(chain.homes)
        self.room = [
            size - sum(chain.share[other] for other in chain.segments_of[place] if other >= segment) + _EPS
            for segment, place in enumerate(chain.rank)
        ]
        # Ends, by segment and microbatch; of W's only how many.
        self.forwards: list[list[float]] = [[] for _ in segments]
        self.backwards: list[list[float]] = [[] for _ in segments]
        self.weights = [0] * len(segments)
        self.held, self.free, self.turned = [0.0] * size, [0.0] * size, [False] * size
        self.actions: list[list[Action]] = [[] for _ in range(size)]

    def forward_start(self, place: int, segment: int) -> float:
        """When the segment's next forward can start; infinity: not in sight."""
        done = len(self.forwards[segment])
        if done == self.microbatches:
            return _NEVER
        if self.backward:
            if self.held[place] > self.room[segment]:
                return _NEVER
            if segment == self.first[place] and done - len(self.backwards[segment]) >= self.rule.ahead[place]:
                return _NEVER
        if segment == 0:
            return self.free[place]
        before = self.forwards[segment - 1]
        return max(self.free[place], before[done] + self.arrival[segment]) if len(before) > done else _NEVER

    def backward_start(self, place: int, segment: int) -> float:
        """When the segment's next B or I can start; infinity: not in sight."""
        done = len(self.backwards[segment])
        if not self.backward or done == len(self.forwards[segment]):
            return _NEVER
        if segment == self.last:
            return max(self.free[place], self.forwards[segment][done])
        before = self.backwards[segment + 1]
        return max(self.free[place], before[done] + self.departure[segment]) if len(before) > done else _NEVER

    def choose(self, place: int) -> _Choice:
        """What the rank does next, and when."""
        free, forward_first = self.free[place], self.rule.turn and self.turned[place]
        best, kind, chosen = _NEVER, Kind.F, 0
        # In order of preference, latest stage first: a later one has to be earlier in time.
        for backward in (not forward_first, forward_first):
            for segment in self.latest_first[place]:
                start = self.backward_start(place, segment) if backward else self.forward_start(place, segment)
                if start < best:
                    best, chosen = start, segment
                    kind = self.back[segment] if backward else Kind.F
                    if best == free:
                        return best, kind, chosen
        waiting = [
            (self.backwards[segment][self.weights[segment]], segment)
            for segment in self.latest_first[place]
            if self.back[segment] is Kind.I and self.weights[segment] < len(self.backwards[segment])
        ]
        if waiting:
            segment = min(waiting)[1]
            if best > free + (self.rule.patience - _EPS) * self.cost[Kind.W, segment]:
                return free, Kind.W, segment
        return best, kind, chosen

    def perform(self, place: int, start: float, kind: Kind, segment: int) -> set[int]:
        """Do it; returns the ranks that may choose otherwise now."""
        end = self.free[place] = start + self.cost[kind, segment]
        if kind is Kind.W:
            microbatch = self.weights[segment]
            self.weights[segment] += 1
        else:
            ends = self.forwards[segment] if kind is Kind.F else self.backwards[segment]
            microbatch = len(ends)
            ends.append(end)
            self.turned[place] = kind is not Kind.F
        if kind is Kind.F:
            self.held[place] += self.chain.share[segment]
        elif kind is not Kind.I:
            self.held[place] -= self.chain.share[segment]
        self.actions[place].append(Action(kind, segment, microbatch))
        if kind is Kind.W:
            return {place}
        neighbour = min(segment + 1, self.last) if kind is Kind.F else max(segment - 1, 0)
        return {place, self.chain.rank[neighbour]}


def fill(chain: Chain, microbatches: int, rule: Rule) -> tuple[tuple[Action, ...], ...]:
    """Each rank's actions under that rule; no rank holds more than p microbatches.

    Args:
        chain: each rank holds as many segments as any other.
        microbatches: how many.
        rule: how a rank chooses.
    """
    clock = _Clock(chain, microbatches, rule)
    tasks = len(chain.rank)
    if clock.backward:
        tasks += len(chain.rank) + clock.back.count(Kind.I)
    choices = [clock.choose(place) for place in range(len(chain.homes))]
    starts = [start for start, _, _ in choices]
    for _ in range(microbatches * tasks):
        place = starts.index(min(starts))
        for other in clock.perform(place, *choices[place]):
            choices[other] = clock.choose(other)
            starts[other] = choices[other][0]
    result: list[tuple[Action, ...]] = [()] * chain.program.size
    for place, actions in enumerate(clock.actions):
        result[chain.homes[place]] = tuple(actions)
    return tuple(result)
