"""What a schedule takes: its actions on the ranks' clocks, its messages on the channels between them. Done in C++.

::

    rank 0     ▐ F0 ▌▐ F1 ▌▐ F2 ▌                    an action starts when its rank is free and its messages are there
    channel          ▐▂0▂▂▂▂▂▌▐▂1▂▂▂▂▂▌▐▂2▂▂▂▂▂▌     a message occupies its channel for `wire`, first in first out,
                             ╲        ╲        ╲     and arrives `latency` after that
    rank 1                    ▐ F0 ▌   ▐ F1 ▌   ▐ F2 ▌

A channel goes from one rank to another, and is the only thing that messages wait for: those of other pairs of ranks do
not slow them. Each end of a message may keep its rank busy for a while (`host`): the sender after its action, the
receiver, when the message is there, before its own. Stages of one rank pass each other tensors for nothing.

`simulate_named` takes a chain of stages and a schedule's name, and makes the order itself, as fast as it runs it;
`simulate` takes any program and any schedule. The orders are those of `smpar.schedule.make_schedule`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from smpar.errors import PlanError, ScheduleError
from smpar.planner.native import core
from smpar.schedule import (
    Action,
    Flow,
    Kind,
    Program,
    Schedule,
    Segment,
    Task,
    Timed,
    Transfer,
    check,
    virtual_stages_of,
)

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_MANY = 2**31 - 1


@dataclass(frozen=True)
class Pipeline:
    """A chain of S stages on ranks, with times and sizes per microbatch. Boundary b is between stages b and b + 1.

    Attributes:
        ranks: stage -> the rank that holds it.
        forward: seconds of each stage's forward.
        backward: seconds of each stage's whole backward.
        weight: the part of it that gives the gradients of weights and may run later; 0: the backward is not split.
        saved: bytes that each stage keeps from a forward to the end of its backward.
        wire_forward: for each of the S - 1 boundaries the seconds that an activation occupies its channel; empty: 0.
        wire_backward: the same for a gradient.
        latency_forward: for each boundary the seconds from an activation's end on the channel to its arrival; empty: 0.
        latency_backward: the same for a gradient.
        host: seconds that each end of a message keeps its rank busy.
        training: whether there is a backward.

    Raises:
        PlanError: wrong lengths, ranks that mean nothing, a number that is negative or not finite, a part that is
            larger than the whole.
    """

    ranks: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    saved: tuple[int, ...]
    wire_forward: tuple[float, ...] = ()
    wire_backward: tuple[float, ...] = ()
    latency_forward: tuple[float, ...] = ()
    latency_backward: tuple[float, ...] = ()
    host: float = 0.0
    training: bool = True

    def __post_init__(self) -> None:
        stages = len(self.ranks)
        if not stages or min(self.ranks) < 0:
            raise PlanError("each stage has a rank, 0 or more", f"ranks={self.ranks}", "Pipeline(ranks=(0, 1), ...)")
        if max(self.ranks) >= 2 * stages:
            values = f"rank {max(self.ranks)} for {stages} stages"
            raise PlanError("a pipeline's ranks are numbered from 0 on", values, "ranks=(0, 1, ..., p-1)")
        for name in ("forward", "backward", "weight", "saved"):
            _require_numbers(name, getattr(self, name), stages, "stage")
        for name in ("wire_forward", "wire_backward", "latency_forward", "latency_backward"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * (stages - 1))
            _require_numbers(name, getattr(self, name), stages - 1, "boundary")
        _require_numbers("host", (self.host,), 1, "message")
        if not all(map(operator.le, self.weight, self.backward)):
            stage = next(s for s in range(stages) if self.weight[s] > self.backward[s])
            values = f"stage {stage}: weight={self.weight[stage]}, backward={self.backward[stage]}"
            raise PlanError("weight is a part of backward", values, "backward = inputs' part + weights' part")
        try:
            list(map(operator.index, self.saved))
        except TypeError as error:
            raise PlanError("saved bytes are whole numbers", f"saved={self.saved}", "round them up") from error

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return max(self.ranks) + 1

    @cached_property
    def program(self) -> Program:
        """The same chain for `smpar.schedule`, each tensor of one byte."""
        segments = tuple(
            Segment(stage, stage, *numbers)
            for stage, numbers in enumerate(zip(self.forward, self.backward, self.weight, self.saved, strict=True))
        )
        flows = tuple(Flow(stage, stage, stage, stage + 1, 1) for stage in range(len(segments) - 1))
        return Program(len(segments), segments, flows, self.training, self.ranks)

    def _fields(self) -> _Fields:
        return (
            self.ranks,
            self.forward,
            self.backward,
            self.weight,
            self.saved,
            self.wire_forward,
            self.wire_backward,
            self.latency_forward,
            self.latency_backward,
            self.host,
            self.training,
        )


_Seconds = tuple[float, ...]
_Whole = tuple[int, ...]
_Fields = tuple[
    _Whole, _Seconds, _Seconds, _Seconds, _Whole, _Seconds, _Seconds, _Seconds, _Seconds, float, bool
]  # fmt: skip


@dataclass(frozen=True)
class Timetable:
    """All actions, rank by rank in their order; one entry per action in each attribute.

    Attributes:
        rank: the rank that performs it.
        kind: 0 to 3 for F, B, I and W.
        segment: what it computes: in a `Pipeline`, the stage.
        microbatch: index of the microbatch.
        start, end: seconds.
    """

    rank: tuple[int, ...]
    kind: tuple[int, ...]
    segment: tuple[int, ...]
    microbatch: tuple[int, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]

    def __iter__(self) -> Iterator[Timed]:
        """One by one, rank by rank."""
        columns = (self.rank, self.kind, self.segment, self.microbatch, self.start, self.end)
        for rank, kind, segment, microbatch, start, end in zip(*columns, strict=True):
            yield Timed(rank, Action(_KINDS[kind], segment, microbatch), start, end)

    def timed(self) -> list[Timed]:
        """As `smpar.schedule.times` gives them: by start, then rank."""
        return sorted(self, key=lambda timed: (timed.start, timed.rank, timed.end))


@dataclass(frozen=True)
class Timeline:
    """What a simulation finds. Seconds from the start of the batch.

    Attributes:
        seconds: end of the last action.
        last_backward: stage -> end of the last action that gives its weights' gradients, B or W; 0 if there is none.
        first_start: rank -> start of its first action; 0 if it has none.
        busy: rank -> seconds of its actions.
        waiting: rank -> seconds it is idle because a message is under way, made but not yet there.
        peak_bytes: rank -> the most saved bytes held at once, from forwards' starts to the ends of B's and W's.
        in_flight: stage -> the most microbatches whose forward has begun and whose B or W has not ended; of a stage
            with several segments, the most microbatch-segments.
        timetable: all actions, if asked for.
    """

    seconds: float
    last_backward: tuple[float, ...]
    first_start: tuple[float, ...]
    busy: tuple[float, ...]
    waiting: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    timetable: Timetable | None = None

    @property
    def bubble(self) -> float:
        """Share of all ranks' time from 0 to the last end in which no action runs, between 0 and 1."""
        whole = len(self.busy) * self.seconds
        return 1.0 - sum(self.busy) / whole if whole else 0.0


def simulate_named(pipeline: Pipeline, name: str, microbatches: int, timetable: bool = False) -> Timeline:
    """Time a chain under the schedule of that name.

    Args:
        pipeline: stages placed as that schedule needs: one per rank for simple, gpipe, 1f1b, interleaved and zb; a loop
            for interleaved_1f1b, a V for zbv (`smpar.schedule.placement`).
        name: as for `smpar.schedule.make_schedule`, but for list and fill_drain.
        microbatches: how many, at least 1.
        timetable: whether to return all actions, too.

    Raises:
        ScheduleNameError: no such schedule.
        ScheduleError: the stages are placed otherwise, or there is no microbatch.
        NativeMissing: smpar was not installed, only found.
    """
    order = _order(pipeline, name, microbatches)
    found, ranks = core().simulate_named(pipeline._fields(), order, microbatches, timetable)
    return _timeline(found, ranks if timetable else None)


def named_order(pipeline: Pipeline, name: str, microbatches: int) -> Schedule:
    """The order that `simulate_named` times, action for action that of `smpar.schedule.make_schedule`.

    Args, raises: as for `simulate_named`.
    """
    order = _order(pipeline, name, microbatches)
    ranks = core().named_order(pipeline._fields(), order, microbatches)
    return Schedule(
        order, tuple(tuple(Action(_KINDS[task % 4], task // 4, mb) for task, mb in actions) for actions in ranks)
    )


def simulate(
    program: Program, schedule: Schedule, wire: Transfer = 0.0, latency: Transfer = 0.0, host: float = 0.0
) -> Timeline:
    """Time any schedule of any program; without `wire` and `host` as `smpar.schedule.times` does.

    Args:
        program: what each microbatch does.
        schedule: forwards and backwards, before lowering; each at most once.
        wire: seconds that a message occupies its channel: a constant, or a function of (bytes, sender's rank,
            receiver's rank). Messages of one action are sent, and received, in the order of `Program.flows`.
        latency: seconds from there to its arrival, given likewise.
        host: seconds that each end of a message keeps its rank busy.

    Returns:
        With its timetable.

    Raises:
        ScheduleError: the schedule cannot run; the error names the actions that wait for ever.
        PlanError: a time is negative or not finite.
        NativeMissing: smpar was not installed, only found.
    """
    every = [action for _, _, action in schedule]
    microbatches = 1 + max([0, *(action.microbatch for action in every)])
    homes, segments = program.segment_ranks, program.segments
    placed = len(schedule.ranks) == program.size and all(
        action.kind in _NUMBERS
        and min(action.segment, action.microbatch) >= 0
        and action.segment < len(homes)
        and homes[action.segment] == rank
        for rank, _, action in schedule
    )
    if not placed or microbatches > max(1, len(every)):
        raise _cannot_run(schedule, program, microbatches)
    _require_numbers("host", (host,), 1, "message")
    graph = (
        program.size,
        program.stages,
        homes,
        [segment.stage for segment in segments],
        [segment.forward for segment in segments],
        [segment.backward for segment in segments],
        [segment.weight for segment in segments],
        [segment.saved for segment in segments],
        program.backward,
        list(_needs(program, wire, latency)),
        host,
    )
    order = [[(4 * a.segment + _NUMBERS[a.kind], a.microbatch) for a in actions] for actions in schedule.ranks]
    found = core().simulate(graph, order, microbatches)
    if not found[0]:
        raise _cannot_run(schedule, program, microbatches)
    return _timeline(found, order)


def _needs(program: Program, wire: Transfer, latency: Transfer) -> Iterator[tuple[int, int, bool, float, float]]:
    """(before, after, whether by message, its wire, its latency); a segment's F, B or I, and W are numbered in turn."""

    def slot(task: Task) -> int:
        return 3 * task.segment + (task.kind is not Kind.F)

    for need in program.dependencies:
        times = program.delay(need, wire), program.delay(need, latency)
        _require_numbers("wire and latency", times, 2, "message")
        yield slot(need.before), slot(need.after), need.flow is not None, *times
    if program.backward:
        for segment in range(len(program.segments)):
            yield 3 * segment + 1, 3 * segment + 2, False, 0.0, 0.0


def _cannot_run(schedule: Schedule, program: Program, microbatches: int) -> ScheduleError:
    """Why the schedule does not run to its end."""
    try:
        check(schedule, [program] * microbatches)
    except ScheduleError as error:
        return error
    return ScheduleError("a schedule runs to its end", f"{schedule}", "check(schedule, programs) names the reason")


def _timeline(found: _Found, order: _Order | None) -> Timeline:
    ended, _, seconds, last, first, busy, waiting, peak, in_flight, starts, ends = found
    assert ended, "named orders run"
    timetable = None
    if order is not None:
        rank = tuple(rank for rank, actions in enumerate(order) for _ in actions)
        tasks = [task for actions in order for task, _ in actions]
        microbatch = tuple(microbatch for actions in order for _, microbatch in actions)
        kind, segment = tuple(task % 4 for task in tasks), tuple(task // 4 for task in tasks)
        timetable = Timetable(rank, kind, segment, microbatch, tuple(starts), tuple(ends))
    return Timeline(
        seconds, tuple(last), tuple(first), tuple(busy), tuple(waiting), tuple(peak), tuple(in_flight), timetable
    )


_Order = list[list[tuple[int, int]]]
"""Rank -> (4 * segment + kind, microbatch) of its actions."""

_Found = tuple[
    bool, list[int], float, list[float], list[float], list[float], list[float], list[int], list[int], list[float],
    list[float],
]  # fmt: skip


def _on_own(ranks: tuple[int, ...]) -> bool:
    return len(set(ranks)) == len(ranks)


def _in_loop(ranks: tuple[int, ...]) -> bool:
    size = max(ranks) + 1
    return ranks == tuple(range(size)) * (len(ranks) // size)


def _in_vee(ranks: tuple[int, ...]) -> bool:
    size = max(ranks) + 1
    return ranks == (*range(size), *reversed(range(size)))


_SHAPES = {
    "gpipe": (_on_own, "one stage per rank"),
    "1f1b": (_on_own, "one stage per rank"),
    "interleaved_1f1b": (_in_loop, "stages in a loop, stage s on rank s % p"),
    "zb": (_on_own, "one stage per rank"),
    "zbv": (_in_vee, "stages in a V, stages r and 2p-1-r on rank r"),
}
_SAME = {"simple": "gpipe", "interleaved": "1f1b"}


def _order(pipeline: Pipeline, name: str, microbatches: int) -> str:
    """The order's own name, for a schedule that fits."""
    if not 1 <= microbatches <= _MANY:
        raise ScheduleError("a batch has at least one microbatch", f"{microbatches=}", "microbatches=1 or more")
    return _fitting(name, pipeline.ranks)


@lru_cache(maxsize=1024)
def _fitting(name: str, ranks: tuple[int, ...]) -> str:
    virtual_stages_of(name)  # knows all names
    order = _SAME.get(name, name)
    if order not in _SHAPES or not _SHAPES[order][0](ranks):
        shape = _SHAPES[order][1] if order in _SHAPES else "no chain in particular"
        raise ScheduleError(
            f"{name} orders {shape}",
            f"{len(ranks)} stages on ranks {ranks}",
            f"simulate(pipeline.program, make_schedule({name!r}, pipeline.program, microbatches))",
        )
    return order


def _require_numbers(name: str, numbers: Sequence[float], count: int, each: str) -> None:
    if len(numbers) != count:
        rule = f"{name} has one number per {each}"
        raise PlanError(rule, f"{len(numbers)} numbers, {count} needed", f"give {name} {count} numbers")
    # A sum that is finite has no part that is not; min alone may miss a NaN.
    if numbers and not (min(numbers) >= 0 and sum(numbers) < float("inf")):
        bad = [f"{each} {place}: {n}" for place, n in enumerate(numbers) if not 0 <= n < float("inf")]
        found = bad[0] if bad else f"their sum {sum(numbers)}"
        raise PlanError(f"{name} is finite and not negative", found, "give seconds or bytes, 0 or more")


__all__ = ["Pipeline", "Timeline", "Timetable", "named_order", "simulate", "simulate_named"]
