"""One microbatch as its schedule sees it: segments in program order, and the flows of tensors between them.

    stage 0   [0]─────────────▶[2]          segments 0..3 in program order
                 \\             / \\          flows 0→1, 1→2, 0→2 (local cut), 2→3
    stage 1       ▶[1]────────▶   ▶[3]
                                            backward: gradients run the flows from target to producer

All ranks hold the same program, so all compute the same schedule from it without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from smpar.errors import ProgramError
from smpar.schedule.actions import Kind

Transfer: TypeAlias = "float | Callable[[int, int, int], float]"
"""Time of one message: a constant, or a function of (bytes, sender's rank, receiver's rank)."""


@dataclass(frozen=True)
class Segment:
    """What one stage runs of one microbatch without waiting for another stage.

    Attributes:
        index: its place in program order.
        stage: the stage that runs it.
        forward, backward: times of its forward and whole backward, in seconds or any other unit.
        weight: the part of `backward` that gives the gradients of weights and may run later; 0 if the backward cannot
            be split.
        saved: bytes that it keeps from its forward to the end of its backward.
    """

    index: int
    stage: int
    forward: float = 1.0
    backward: float = 2.0
    weight: float = 0.0
    saved: int = 0


@dataclass(frozen=True)
class Flow:
    """A tensor used by one segment and made by an earlier one.

    Attributes:
        tensor: the tensor's number.
        source: the segment after which it is sent: its rank's segment at the time of use, perhaps of another of the
            rank's stages. Without meaning where nothing is sent (a local cut, or ``forward=False``).
        producer: the segment that made it, on the source's rank, not after the source.
        target: the segment that uses it.
        nbytes: its size in bytes.
        forward: False if an earlier flow took the value to the target's rank: only a gradient travels.
        backward: True if a gradient goes from the target to the producer.
    """

    tensor: int
    source: int
    producer: int
    target: int
    nbytes: int
    forward: bool = True
    backward: bool = True


class Task(NamedTuple):
    """A forward or backward of one segment, of whichever microbatch; a backward whole (B) or a part of it (I or W)."""

    kind: Kind
    segment: int


class Dependency(NamedTuple):
    """`before` must end before `after` starts; `flow` is the flow whose message is between them, or None."""

    before: Task
    after: Task
    flow: int | None


@dataclass(frozen=True)
class Program:
    """One microbatch's segments and flows.

    Attributes:
        stages: number of (virtual) stages; a stage may have no segment, a rank may hold several stages.
        segments: in program order; ``segments[i].index == i``.
        flows: all tensors that leave their segment; for local cuts source and target are on one rank.
        backward: False if the program has no backward at all, as in evaluation.
        ranks: stage -> rank; empty means stage i is on rank i.

    Raises:
        ProgramError: the parts contradict each other.
    """

    stages: int
    segments: tuple[Segment, ...]
    flows: tuple[Flow, ...]
    backward: bool = True
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _validate(self)

    def rank_of(self, stage: int) -> int:
        """The rank that holds the stage."""
        return self.ranks[stage] if self.ranks else stage

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return max(self.ranks) + 1 if self.ranks else self.stages

    @cached_property
    def segment_ranks(self) -> tuple[int, ...]:
        """Segment -> the rank that runs it."""
        return tuple(self.rank_of(segment.stage) for segment in self.segments)

    def of_rank(self, rank: int) -> tuple[Segment, ...]:
        """The rank's segments in program order."""
        return tuple(segment for segment in self.segments if self.segment_ranks[segment.index] == rank)

    def sends_activation(self, flow: Flow) -> bool:
        """Whether the flow's value travels between ranks."""
        return flow.forward and self.segment_ranks[flow.source] != self.segment_ranks[flow.target]

    def sends_gradient(self, flow: Flow) -> bool:
        """Whether the flow's gradient travels between ranks."""
        return self.backward and flow.backward and self.segment_ranks[flow.producer] != self.segment_ranks[flow.target]

    @cached_property
    def is_chain(self) -> bool:
        """At most one segment per stage, stages in program order: flows go to higher stages, perhaps over some."""
        ordered = all(a.stage < b.stage for a, b in pairwise(self.segments))
        return ordered and all(flow.producer < flow.target for flow in self.flows)

    @cached_property
    def has_skips(self) -> bool:
        """Whether some flow passes over a stage that has segments."""
        order = {stage: place for place, stage in enumerate(sorted({segment.stage for segment in self.segments}))}
        return any(
            order[self.segments[f.target].stage] - order[self.segments[f.producer].stage] > 1 for f in self.flows
        )

    @cached_property
    def dependencies(self) -> tuple[Dependency, ...]:
        """All orders that hold inside one microbatch.

        A rank runs its forwards in program order, since they are one coroutine, and starts backwards when that has
        ended; a flow orders forwards source to target, and backwards target to producer. Of a split backward, I has
        the orders of B, and W only comes after its I.
        """
        result = []
        last: dict[int, int] = {}
        for segment, rank in enumerate(self.segment_ranks):
            if rank in last:
                result.append(Dependency(Task(Kind.F, last[rank]), Task(Kind.F, segment), None))
            last[rank] = segment
        for index, flow in enumerate(self.flows):
            if self.sends_activation(flow):
                result.append(Dependency(Task(Kind.F, flow.source), Task(Kind.F, flow.target), index))
            if self.backward and flow.backward and flow.producer != flow.target:
                sent = index if self.sends_gradient(flow) else None
                result.append(Dependency(Task(Kind.B, flow.target), Task(Kind.B, flow.producer), sent))
        if self.backward:
            for segment, rank in enumerate(self.segment_ranks):
                result.append(Dependency(Task(Kind.F, last[rank]), Task(Kind.B, segment), None))
        return tuple(result)

    def delay(self, dependency: Dependency, transfer: Transfer) -> float:
        """Time between the end of `before` and the earliest start of `after`: that of the message, if there is one."""
        if dependency.flow is None:
            return 0.0
        if not callable(transfer):
            return transfer
        ranks = self.segment_ranks
        return transfer(
            self.flows[dependency.flow].nbytes, ranks[dependency.before.segment], ranks[dependency.after.segment]
        )

    def cost(self, task: Task) -> float:
        """The task's time, in the segments' unit."""
        return _COSTS[task.kind](self.segments[task.segment])

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All forwards in program order, then, if there are any, all backwards, whole ones, in program order."""
        kinds = (Kind.F, Kind.B) if self.backward else (Kind.F,)
        return tuple(Task(kind, segment.index) for kind in kinds for segment in self.segments)

    def forward_only(self) -> Program:
        """The same program without its backward."""
        return replace(self, backward=False)


_COSTS: dict[Kind, Callable[[Segment], float]] = {
    Kind.F: lambda segment: segment.forward,
    Kind.B: lambda segment: segment.backward,
    Kind.I: lambda segment: segment.backward - segment.weight,
    Kind.W: lambda segment: segment.weight,
}


def _validate(program: Program) -> None:
    def require(holds: bool, rule: str, values: str) -> None:
        if not holds:
            raise ProgramError(rule, values, "correct what built the program; each flow runs from earlier to later")

    stages, segments = program.stages, program.segments
    ranks = program.ranks
    require(stages >= 1, "a program has at least one stage", f"stages={stages}")
    require(not ranks or (len(ranks) == stages and min(ranks) >= 0), "each stage has one rank", f"{stages=} {ranks=}")
    for place, segment in enumerate(segments):
        require(segment.index == place, "segments are numbered in program order", f"{segment} at place {place}")
        require(0 <= segment.stage < stages, "a segment's stage exists", f"{segment}, {stages=}")
        require(segment.forward >= 0 and segment.backward >= 0, "times are not negative", f"{segment}")
        require(0 <= segment.weight <= segment.backward, "the weights' part is inside the backward", f"{segment}")
        require(segment.saved >= 0, "sizes are not negative", f"{segment}")
    for flow in program.flows:
        inside = 0 <= flow.producer <= flow.source < len(segments) and flow.producer <= flow.target < len(segments)
        require(
            inside, "a flow goes from its producer to an existing later segment", f"{flow}, {len(segments)} segments"
        )
        home = program.segment_ranks[flow.source]
        require(program.segment_ranks[flow.producer] == home, "a flow leaves from its producer's rank", f"{flow}")
        # Where nothing is sent, the source is only where the rank happened to be at the time of use.
        late = program.sends_activation(flow) and flow.source >= flow.target
        require(not late, "a value is sent before its target starts", f"{flow}")
