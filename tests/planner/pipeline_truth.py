"""What a schedule takes, event by event: ranks perform their lowered actions in turn, channels carry one message each.

An independent second opinion on `smpar.planner.pipeline`: a clock, a heap of events, and what happens at each.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from smpar.schedule import Action, Kind, Message, Program, Schedule, Task, Timed, lower, message_of

Seconds = Callable[[int, int, int], float]
"""Time of a message: a function of (bytes, sender's rank, receiver's rank)."""


@dataclass
class Channel:
    """From one rank to another, first in first out."""

    queue: deque[Message] = field(default_factory=deque)
    busy: bool = False


class World:
    """Ranks, channels and a clock."""

    def __init__(self, program: Program, schedule: Schedule, wire: Seconds, latency: Seconds, host: float) -> None:
        self.program, self.wire, self.latency, self.host = program, wire, latency, host
        microbatches = 1 + max((action.microbatch for _, _, action in schedule), default=0)
        self.lowered = lower(schedule, [program] * microbatches)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.channels: dict[tuple[int, int], Channel] = {}
        self.made: dict[tuple[int, Message], float] = {}  # (receiver, message) -> end of the action that made it
        self.arrived: set[tuple[int, Message]] = set()
        self.awaited: dict[tuple[int, Message], int] = {}  # -> the rank that waits
        self.timeline: list[Timed] = []
        self.waiting = [0.0] * program.size
        self.ranks = [self.rank(number, actions) for number, actions in enumerate(self.lowered.ranks)]

    def run(self) -> None:
        for number in range(len(self.ranks)):
            self.at(0.0, lambda number=number: self.resume(number))
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def at(self, time: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

    def resume(self, number: int) -> None:
        """Let a rank go on, until it next lets time pass."""
        wish = next(self.ranks[number], None)
        if isinstance(wish, Message):
            self.awaited[number, wish] = number
        elif wish is not None:
            self.at(self.now + wish, lambda: self.resume(number))

    def rank(self, number: int, actions: Sequence[Action]) -> Iterator[float | Message]:
        """Yields seconds to pass, or a message to wait for."""
        ended = 0.0
        for action in actions:
            if action.kind.is_send:
                yield self.host
                self.made[action.peer, message_of(action)] = ended
                self.send(number, action.peer, message_of(action))
            elif action.kind.is_message:
                since = self.now
                if (number, message_of(action)) not in self.arrived:
                    yield message_of(action)
                if self.now > since:
                    self.waiting[number] += self.now - max(since, self.made[number, message_of(action)])
                yield self.host
            else:
                start = self.now
                yield self.program.cost(Task(action.kind, action.segment))
                ended = self.now
                self.timeline.append(Timed(number, action, start, ended))

    def send(self, sender: int, receiver: int, message: Message) -> None:
        channel = self.channels.setdefault((sender, receiver), Channel())
        channel.queue.append(message)
        if not channel.busy:
            self.carry(sender, receiver, channel)

    def carry(self, sender: int, receiver: int, channel: Channel) -> None:
        """The channel takes its next message, if there is one."""
        channel.busy = bool(channel.queue)
        if channel.busy:
            message = channel.queue.popleft()
            nbytes = self.program.flows[message.flow].nbytes

            def left() -> None:
                arrival = self.now + self.latency(nbytes, sender, receiver)
                self.at(arrival, lambda: self.arrive(receiver, message))
                self.carry(sender, receiver, channel)

            self.at(self.now + self.wire(nbytes, sender, receiver), left)

    def arrive(self, receiver: int, message: Message) -> None:
        self.arrived.add((receiver, message))
        if (receiver, message) in self.awaited:
            self.resume(self.awaited.pop((receiver, message)))


@dataclass(frozen=True)
class Truth:
    """As `smpar.planner.pipeline.Timeline`, its actions as `smpar.schedule.times` gives them."""

    seconds: float
    last_backward: tuple[float, ...]
    first_start: tuple[float, ...]
    busy: tuple[float, ...]
    waiting: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    timed: list[Timed]


def truth(program: Program, schedule: Schedule, wire: Seconds, latency: Seconds, host: float) -> Truth:
    """Run it all, and look at what happened."""
    world = World(program, schedule, wire, latency, host)
    world.run()
    timeline = world.timeline
    assert len(timeline) == sum(map(len, schedule.ranks)), "the schedule runs to its end"
    frees = (Kind.B, Kind.W) if program.backward else (Kind.F,)
    stage_of = [segment.stage for segment in program.segments]
    last, count, most = [0.0] * program.stages, [0] * program.stages, [0] * program.stages
    held, peak = [0] * program.size, [0] * program.size
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, saved = stage_of[action.segment], program.segments[action.segment].saved
            if action.kind is Kind.F:
                held[rank] += saved
                count[stage] += 1
            peak[rank], most[stage] = max(peak[rank], held[rank]), max(most[stage], count[stage])
            if action.kind in frees:
                held[rank] -= saved
                count[stage] -= 1
    for timed in timeline:
        if timed.action.kind in (Kind.B, Kind.W):
            last[stage_of[timed.action.segment]] = max(last[stage_of[timed.action.segment]], timed.end)
    of_rank = [[timed for timed in timeline if timed.rank == rank] for rank in range(program.size)]
    return Truth(
        max((timed.end for timed in timeline), default=0.0),
        tuple(last),
        tuple(min((timed.start for timed in mine), default=0.0) for mine in of_rank),
        tuple(sum(program.cost(Task(timed.action.kind, timed.action.segment)) for timed in mine) for mine in of_rank),
        tuple(world.waiting),
        tuple(peak),
        tuple(most),
        sorted(timeline, key=lambda timed: (timed.start, timed.rank, timed.end)),
    )
