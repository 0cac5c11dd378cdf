"""From the events of one microbatch to its program: segments, flows, and where gradients go.

Each event (a unit's call or an operation in glue) runs on one stage. Walking through them in program
order, a stage's events join its rank's current segment as long as that is the stage's, and what they need
comes from segments that began before it; else a new segment begins:

    events      a@0   b@1(a)   c@1(b)   d@0(c)   e@1(d, b)
    segments     0      1        1        2        3
    flows           0->1             1->2     2->3  (b: a cut between segments 1 and 3 of stage 1)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from smpar.schedule.program import Flow, Program, Segment
from smpar.trace.outcome import Meta, Out, Outcome


@dataclasses.dataclass(slots=True)
class Event:
    """One unit call or glue operation of a microbatch; equal on all ranks.

    ``inputs`` holds, for each tensor argument, its ident, or None for a replicated tensor or a
    parameter. ``flows`` are the transfers and cuts that this event is the first to need.
    ``joined`` are pairs of idents: a tensor of the same segment, whose gradient from now on passes through what was
    written, too, as it shares the memory.
    """

    target: Any
    stage: int
    segment: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    written: tuple[int, ...]
    outcome: Outcome
    flows: tuple[int, ...]
    parameters: tuple[int, ...]  # ids of the model's parameters among the arguments
    direct: Meta | None  # the single fresh tensor that is the whole result, if it is so simple
    joined: tuple[tuple[int, int], ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether ranks that are not its home have nothing to do but to note its result."""
        return self.direct is not None and not self.flows and not self.outcome.guessed


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """A call of ``model.backward``: the tensors it starts from."""

    roots: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class _Draft:
    tensor: int
    source: int
    producer: int
    target: int
    forward: bool


class Recorder:
    """Collects events and finds segments and flows as they come.

    Args:
        ranks: stage -> the rank that runs it.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.events: list[Event | Backward] = []
        self.metas: dict[int, Meta] = {}
        self.flows: list[_Draft] = []
        self.segment_stage: list[int] = []
        self.producer: dict[int, int] = {}
        self._current: dict[int, int] = {}  # rank -> its segment
        self._flow_of: dict[tuple[int, int], int] = {}
        self._sent: set[tuple[int, int]] = set()
        self.seconds: list[float] = []
        self.saved: list[int] = []

    def new_ident(self, meta: Meta, segment: int) -> int:
        ident = len(self.metas)
        self.metas[ident] = meta
        self.producer[ident] = segment
        return ident

    def enter(self, stage: int, inputs: Sequence[int | None]) -> tuple[int, tuple[int, ...]]:
        """The segment in which an event on ``stage`` with these inputs runs, and the flows it adds."""
        rank = self.ranks[stage]
        segment = self.settle(stage, inputs)
        added = []
        for ident in inputs:
            if ident is None or self.producer[ident] == segment or (ident, segment) in self._flow_of:
                continue
            producer = self.producer[ident]
            home = self._home(producer)
            source = self._current[home] if home != rank else producer
            first = (ident, rank) not in self._sent
            self._sent.add((ident, rank))
            self._flow_of[ident, segment] = len(self.flows)
            added.append(len(self.flows))
            self.flows.append(_Draft(ident, source, producer, segment, first))
        return segment, tuple(added)

    def settle(self, stage: int, inputs: Sequence[int | None]) -> int:
        """The segment in which an event on ``stage`` with these inputs runs, begun if need be."""
        rank = self.ranks[stage]
        segment = self._current.get(rank)
        if segment is None or self.segment_stage[segment] != stage:
            segment = self._open(stage)
        homes = ((i, self._home(self.producer[i])) for i in inputs if i is not None)
        sources = (self._current[home] for i, home in homes if home != rank and (i, rank) not in self._sent)
        if any(source > segment for source in sources):  # it began after this segment, and may wait for it
            segment = self._open(stage)
        return segment

    def has_left(self, ident: int) -> bool:
        """Whether another segment has the tensor as it is now, under this number."""
        return any(tensor == ident for tensor, _ in self._flow_of)

    def _home(self, segment: int) -> int:
        return self.ranks[self.segment_stage[segment]]

    def _open(self, stage: int) -> int:
        segment = len(self.segment_stage)
        self.segment_stage.append(stage)
        self.seconds.append(0.0)
        self.saved.append(0)
        self._current[self.ranks[stage]] = segment
        return segment

    def flow_index(self, ident: int, segment: int) -> int:
        return self._flow_of[ident, segment]

    def finish(self, parameters: dict[int, set[int]], in_turn: str = "") -> MicrobatchProgram:
        """Close the record.

        Args:
            parameters: id of each model parameter used in glue -> stages that read it.
            in_turn: as in the program.
        """
        roots = {r for e in self.events if isinstance(e, Backward) for r in e.roots}
        live_uses = _live_uses(self.events, roots)
        flows = tuple(
            Flow(
                tensor=d.tensor,
                source=d.source,
                producer=d.producer,
                target=d.target,
                nbytes=self.metas[d.tensor].nbytes,
                forward=d.forward,
                backward=(d.tensor, d.target) in live_uses,
            )
            for d in self.flows
        )
        awaited = {f.target for f in flows if f.backward}  # others wait for gradients of these segments' inputs
        segments = tuple(
            Segment(i, stage, s, 2 * s, weight=s if i in awaited else 0.0, saved=saved)
            for i, (stage, s, saved) in enumerate(
                zip(self.segment_stage, (max(s, 1e-9) for s in self.seconds), self.saved, strict=True)
            )
        )
        shape = Program(len(self.ranks), segments, flows, backward=bool(roots), ranks=self.ranks)
        return MicrobatchProgram(tuple(self.events), shape, self.metas, parameters, in_turn)


def _live_uses(events: Sequence[Event | Backward], roots: set[int]) -> set[tuple[int, int]]:
    """(tensor, segment) pairs in which the tensor's use carries gradient from a root back to it."""
    live = set(roots)
    uses: set[tuple[int, int]] = set()
    for event in reversed(events):
        if isinstance(event, Backward):
            continue
        live.update(written for other, written in event.joined if other in live)
        outs: list[tuple[int | None, Out]] = [
            (ident, place)
            for ident, place in zip(event.outputs, event.outcome.places, strict=True)
            if isinstance(place, Out)
        ]
        outs += [(i, out) for i, (_, out) in zip(event.written, event.outcome.written, strict=True)]
        for ident, out in outs:
            if ident in live:
                for index in out.reaches:
                    source = event.inputs[index]
                    if source is not None:
                        live.add(source)
                        uses.add((source, event.segment))
    return uses


@dataclasses.dataclass(eq=False)
class MicrobatchProgram:
    """What one microbatch of an input signature does, on every stage.

    ``in_turn`` names Python state that passes from one segment to the next, or from a microbatch to the next, where
    there is any: then the forward of one microbatch has to end before the next one starts, as in a single process.
    """

    events: tuple[Event | Backward, ...]
    shape: Program
    metas: dict[int, Meta]
    parameters: dict[int, set[int]]
    in_turn: str = ""

    @functools.cached_property
    def arrivals(self) -> dict[tuple[int, int], int]:
        """(tensor, rank) -> the flow that brings it there."""
        ranks = self.ranks
        return {(f.tensor, ranks[f.target]): i for i, f in enumerate(self.shape.flows) if f.forward}

    @functools.cached_property
    def overwritten(self) -> frozenset[int]:
        """Flows whose tensor its home may still be sending when it writes into that memory."""
        ranks, root, last = self.ranks, dict[int, int](), dict[int, int]()

        def memory(ident: int) -> int:
            while ident in root:
                ident = root[ident]
            return ident

        def join(ident: int | None, other: int | None) -> None:
            if ident is not None and other is not None and memory(ident) != memory(other):
                root[memory(ident)] = memory(other)

        calls = [(at, e) for at, e in enumerate(self.events) if isinstance(e, Event)]
        for _, event in calls:
            for ident, place in zip(event.outputs, event.outcome.places, strict=True):
                for index in place.shares if isinstance(place, Out) else ():
                    join(ident, event.inputs[index] if index >= 0 else event.outputs[-index - 1])
            for ident, (index, _) in zip(event.written, event.outcome.written, strict=True):
                join(ident, event.inputs[index])
        for at, event in calls:
            for ident in event.written:
                last[memory(ident)] = at
        return frozenset(
            flow
            for at, event in calls
            for flow in event.flows
            if last.get(memory(self.shape.flows[flow].tensor), -1) > at
            and ranks[self.shape.flows[flow].target] != ranks[self.shape.flows[flow].producer]
        )

    @functools.cached_property
    def quiet(self) -> tuple[bool, ...]:
        """For each event, whether it is quiet."""
        return tuple(isinstance(e, Event) and e.quiet for e in self.events)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Segment -> rank."""
        return self.shape.segment_ranks

    @functools.cached_property
    def random(self) -> bool:
        """Whether some event draws random numbers."""
        return any(isinstance(e, Event) and e.outcome.random for e in self.events)

    def slices(self, rank: int) -> int:
        """How many segments a rank has."""
        return self.ranks.count(rank)

    def leaving(self, segment: int) -> tuple[int, ...]:
        """Flows whose gradients the backward of ``segment`` starts from."""
        return self._leaving.get(segment, ())

    def arriving(self, segment: int) -> tuple[int, ...]:
        """Flows into ``segment``."""
        return self._arriving.get(segment, ())

    @functools.cached_property
    def _leaving(self) -> dict[int, tuple[int, ...]]:
        return _grouped((f.producer, i) for i, f in enumerate(self.shape.flows) if f.backward)

    @functools.cached_property
    def _arriving(self) -> dict[int, tuple[int, ...]]:
        return _grouped((f.target, i) for i, f in enumerate(self.shape.flows))

    @functools.cached_property
    def skeleton(self) -> Any:
        """What microbatches must share to run under one schedule."""
        return (
            tuple(s.stage for s in self.shape.segments),
            tuple((f.source, f.target, f.producer, f.forward) for f in self.shape.flows),
        )


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    groups: dict[int, list[int]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in groups.items()}


def direct_meta(outcome: Outcome, is_leaf: Callable[[Any], bool]) -> Meta | None:
    """The metadata of the result if it is one fresh tensor and nothing was written."""
    if is_leaf(outcome.spec) and not outcome.written and not outcome.attributes and isinstance(outcome.places[0], Out):
        out = outcome.places[0]
        return None if out.shares else out.meta
    return None
