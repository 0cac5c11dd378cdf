"""What is emulated: the times of a step's parts, for each replica of a pipeline. Pure data.

::

    replica 0   rank 0 |0F0 |0F1 |    |0B0     |0B1     |reduce 0  |optimizer|
                rank 1      |1F0|1B0  |1F1|1B1  |reduce 1 |optimizer|
    replica 1   the same, perhaps on slower devices; a stage's reduction starts when all replicas have its gradients
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from smpar.errors import EmulationError
from smpar.planner.parts import Parts
from smpar.planner.pipeline import Pipeline, Timeline, simulate_named
from smpar.planner.strategy import Strategy
from smpar.schedule import Kind, Schedule, Timed, make_schedule


class Link(NamedTuple):
    """What a message takes: seconds on its channel, and seconds until it is there after that."""

    wire: float
    latency: float


class Tied(NamedTuple):
    """A parameter on several stages: within a replica its gradients are summed over them before the reduction.

    Attributes:
        stages: they are complete when the sum is.
        seconds: of the sum, from the moment at which the last stage has its part. Nothing else waits for it.
    """

    stages: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Emulation:
    """A step of a plan. One process stands for a rank of one replica, and for all of its tensor-parallel group.

    Attributes:
        schedule: a name of `smpar.schedule.make_schedule`.
        microbatches: of a step, in each replica.
        pipelines: one per replica, alike but for their times.
        reduction: by stage, seconds of the reduction of its gradients over the replicas; empty: none. A rank reduces
            one stage after the other, while it goes on with its actions.
        optimizer: by rank, seconds from the last of its actions and reductions to the end of its step; empty: none.
        tied: parameters on several stages.

    Raises:
        EmulationError: a length does not fit, or a time is negative or no number.
    """

    schedule: str
    microbatches: int
    pipelines: tuple[Pipeline, ...]
    reduction: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    tied: tuple[Tied, ...] = ()

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones included."""
        return len(self.pipelines[0].ranks)

    @property
    def size(self) -> int:
        """Number of ranks of a pipeline."""
        return self.pipelines[0].size

    @property
    def replicas(self) -> int:
        return len(self.pipelines)

    @property
    def processes(self) -> int:
        """One for each rank of each replica."""
        return self.size * self.replicas

    @cached_property
    def orders(self) -> tuple[Schedule, ...]:
        """By replica, its schedule, as the runtime makes it."""
        made: dict[Pipeline, Schedule] = {}
        for pipeline in self.pipelines:
            if pipeline not in made:
                made[pipeline] = make_schedule(self.schedule, pipeline.program, self.microbatches)
        return tuple(made[pipeline] for pipeline in self.pipelines)

    @classmethod
    def of(cls, strategy: Strategy, parts: Parts) -> Emulation:
        """A strategy's step: that of `CostModel.parts`, or of a plan's file.

        Raises:
            EmulationError: the parts are not the strategy's.
        """
        known = range(len(parts.pipelines))
        placed = all(kind in known and parts.pipelines[kind].ranks == strategy.ranks for kind in parts.kinds)
        if len(parts.kinds) != strategy.dp or not placed:
            ranks = [pipeline.ranks for pipeline in parts.pipelines]
            found = f"{len(parts.kinds)} replicas, of kinds {parts.kinds} of stages on ranks {ranks}, for {strategy}"
            raise EmulationError("a plan's parts are those of its strategy", found, "let `smpar plan` write it again")
        reduces = strategy.dp > 1 or bool(parts.tied)
        return cls(
            strategy.schedule,
            strategy.microbatches,
            tuple(parts.pipelines[kind] for kind in parts.kinds),
            parts.reductions if reduces else (),
            parts.steps,
            tuple(Tied(stages, seconds) for stages, seconds in parts.tied),
        )

    @property
    def kernel(self) -> float:
        """Mean seconds of a stage's forward or backward."""
        pipelines = self.pipelines
        return sum(sum(p.forward) + sum(p.backward) for p in pipelines) / (2 * self.stages * len(pipelines))

    def first(self, replicas: int) -> Emulation:
        """The same with the first replicas only, each of which reduces as long."""
        return replace(self, pipelines=self.pipelines[:replicas])

    def scaled(self, factor: float) -> Emulation:
        """The same with all times so many times as long: kernels of 10 ms and more outlast what a machine delays them.

        By a power of two nothing is rounded, so that schedules which choose by times choose alike.

        Raises:
            EmulationError: the factor is not above 0.
        """
        if not 0 < factor < math.inf:
            raise EmulationError("times are scaled by a factor above 0", f"{factor=}", "factor=1.0 leaves all as it is")
        pipelines = tuple(_slower(pipeline, factor) for pipeline in self.pipelines)
        return replace(
            self,
            pipelines=pipelines,
            reduction=_scaled(self.reduction, factor),
            optimizer=_scaled(self.optimizer, factor),
            tied=tuple(Tied(tied.stages, factor * tied.seconds) for tied in self.tied),
        )

    def link(self, replica: int, flow: int, kind: Kind) -> Link:
        """What the message of a flow takes; `kind` is that of its send."""
        pipeline = self.pipelines[replica]
        if kind is Kind.SEND_ACTIVATION:
            return Link(pipeline.wire_forward[flow], pipeline.latency_forward[flow])
        return Link(pipeline.wire_backward[flow], pipeline.latency_backward[flow])

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """By replica, its pipeline as the planner's simulator has it."""
        lines = {
            pipeline: simulate_named(pipeline, self.schedule, self.microbatches, timetable=True)
            for pipeline in dict.fromkeys(self.pipelines)
        }
        return tuple(lines[pipeline] for pipeline in self.pipelines)

    @cached_property
    def complete(self) -> tuple[float, ...]:
        """By stage, when all replicas have its gradients, tied ones summed over their stages."""
        ends = [max(line.last_backward[stage] for line in self.timelines) for stage in range(self.stages)]
        for tied in self.tied:
            end = max(ends[stage] for stage in tied.stages) + tied.seconds
            for stage in tied.stages:
                ends[stage] = end
        return tuple(ends)

    def reduced(self, rank: int) -> tuple[int, ...]:
        """The rank's stages in the order of their reductions: as their gradients are predicted to be complete.

        All replicas keep this one order, as they meet in each reduction.
        """
        if not self.reduction:
            return ()
        mine = [stage for stage, home in enumerate(self.pipelines[0].ranks) if home == rank]
        return tuple(sorted(mine, key=lambda stage: self.complete[stage]))


@dataclass(frozen=True)
class Step:
    """One step's times, in seconds from its start.

    Attributes:
        ends: ``ends[replica][rank]``: when that rank is done, its optimizer included.
        actions: by replica, all actions with their times, by start.
    """

    ends: tuple[tuple[float, ...], ...]
    actions: tuple[tuple[Timed, ...], ...]

    def scaled(self, factor: float) -> Step:
        """The same with all times so many times as long."""
        actions = tuple(
            tuple(timed._replace(start=factor * timed.start, end=factor * timed.end) for timed in timeline)
            for timeline in self.actions
        )
        return Step(tuple(_scaled(ends, factor) for ends in self.ends), actions)

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(end for ends in self.ends for end in ends)


def fastest(steps: Sequence[Step]) -> Step:
    """The step that the machine disturbed least: other work only ever delays a process."""
    return min(steps, key=lambda step: step.seconds)


def _slower(pipeline: Pipeline, factor: float) -> Pipeline:
    return replace(
        pipeline,
        forward=_scaled(pipeline.forward, factor),
        backward=_scaled(pipeline.backward, factor),
        weight=_scaled(pipeline.weight, factor),
        wire_forward=_scaled(pipeline.wire_forward, factor),
        wire_backward=_scaled(pipeline.wire_backward, factor),
        latency_forward=_scaled(pipeline.latency_forward, factor),
        latency_backward=_scaled(pipeline.latency_backward, factor),
        host=factor * pipeline.host,
    )


def _scaled(times: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * seconds for seconds in times)


def _validate(emulation: Emulation) -> None:
    def require(holds: bool, rule: str, values: str) -> None:
        if not holds:
            raise EmulationError(rule, values, "correct what made the emulation")

    require(bool(emulation.pipelines), "there is at least one replica", "none")
    require(emulation.microbatches >= 1, "a step has at least one microbatch", f"{emulation.microbatches}")
    first = emulation.pipelines[0]
    stages = len(first.ranks)
    require(set(first.ranks) == set(range(first.size)), "every rank has a stage", f"{first.ranks}")
    for other in emulation.pipelines[1:]:
        alike = other.ranks == first.ranks and other.training == first.training
        require(alike, "replicas differ by their times only", f"{first}, {other}")
    for name, times, count in (
        ("reduction", emulation.reduction, stages),
        ("optimizer", emulation.optimizer, first.size),
        ("tied", tuple(tied.seconds for tied in emulation.tied), len(emulation.tied)),
    ):
        require(len(times) in (0, count), f"{name} has {count} times", f"{times}")
        fine = all(0 <= time < math.inf for time in times)
        require(fine, f"{name} is finite and not negative", f"{times}")
    reduces = bool(emulation.reduction) or (emulation.replicas == 1 and not emulation.tied) or not first.training
    require(reduces, "several replicas, or tied stages, reduce every stage", "reduction=()")
    for tied in emulation.tied:
        fine = bool(tied.stages) and all(0 <= stage < stages for stage in tied.stages)
        require(fine and first.training, "tied stages exist, and have gradients", f"{tied}, {stages} stages")
