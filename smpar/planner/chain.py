"""What the partitioner knows of a model: a chain of units, the tensors between them, the parameters they share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smpar.errors import PlanError, TooFewUnits


@dataclass(frozen=True)
class UnitCost:
    """A unit's share of one stage: ``time`` in seconds per microbatch, forward and backward; ``memory`` in bytes."""

    name: str
    time: float
    memory: float


@dataclass(frozen=True)
class Edge:
    """A tensor made by unit ``source`` and used by units ``targets``.

    Each stage that has a target and lies on another rank than the source pays ``seconds`` per microbatch once, however
    many of its units use the tensor.
    """

    source: int
    targets: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Tie:
    """Units that share a parameter: each rank beyond the first with a member pays ``seconds`` once per step."""

    units: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Goal:
    """How to cut, and what counts.

    Attributes:
        stages: number of stages, each of at least one unit.
        microbatches: per step; the slowest rank counts so many times.
        memory_weight: 0 balances time only, 1 memory only.
        memory_limit: bytes that a rank may hold, or None.
        ranks: of the stages, by the rank that holds them; empty if stage ``k`` is alone on rank ``k``.
        evenness: between 0 and 1, the part of the pace that the dearest stage sets instead of the dearest rank.
    """

    stages: int
    microbatches: int
    memory_weight: float = 0.0
    memory_limit: float | None = None
    ranks: tuple[int, ...] = ()
    evenness: float = 0.0

    def per_rank(self, of_stages: Sequence[float]) -> tuple[float, ...]:
        """Sums over each rank's stages."""
        sums = [0.0] * (1 + max(self.ranks, default=self.stages - 1))
        for rank, value in zip(self.ranks or range(self.stages), of_stages, strict=True):
            sums[rank] += value
        return tuple(sums)


@dataclass(frozen=True)
class Partition:
    """Stage ``k`` holds units ``cuts[k]`` up to ``cuts[k + 1]`` (the end, for the last one); ``cuts[0]`` is 0.

    ``objective`` is a pure number (see `smpar.planner.partition`); ``stage_time`` is in seconds per microbatch, with
    the transfers that the stage pays; ``stage_memory`` in bytes; ``rank_time`` and ``rank_memory`` are their sums over
    the stages of each rank.
    """

    cuts: tuple[int, ...]
    objective: float
    stage_time: tuple[float, ...]
    stage_memory: tuple[float, ...]
    rank_time: tuple[float, ...]
    rank_memory: tuple[float, ...]

    @classmethod
    def make(
        cls, goal: Goal, cuts: Sequence[int], objective: float, time: Sequence[float], memory: Sequence[float]
    ) -> Partition:
        """From the times and bytes of stages."""
        return cls(tuple(cuts), objective, tuple(time), tuple(memory), goal.per_rank(time), goal.per_rank(memory))


def check(units: Sequence[UnitCost], edges: Sequence[Edge], ties: Sequence[Tie], goal: Goal) -> None:
    """Raise the error that explains the first thing wrong with a partition problem.

    Raises:
        TooFewUnits: fewer units than stages.
        PlanError: ranks that are not 0, 1, ..., one for each stage; a number that is negative or not finite, or an
            index outside the chain.
    """
    if goal.stages < 1 or goal.microbatches < 1:
        raise PlanError(
            "a pipeline has at least one stage and one microbatch",
            f"stages={goal.stages}, microbatches={goal.microbatches}",
            "give positive whole numbers",
        )
    check_ranks(goal.ranks, goal.stages)
    if len(units) < goal.stages:
        raise TooFewUnits(
            "each pipeline stage holds at least one unit",
            f"{len(units)} units for {goal.stages} stages",
            f"set pipeline_parallel_degree (times virtual_stages) to {len(units)} or less, or split the model's "
            "largest modules into more units",
        )
    if not 0.0 <= goal.memory_weight <= 1.0:
        raise PlanError("memory_weight lies between 0 and 1", f"memory_weight={goal.memory_weight}", "0 is time only")
    if not 0.0 <= goal.evenness <= 1.0:
        raise PlanError("evenness lies between 0 and 1", f"evenness={goal.evenness}", "0 is ranks only")
    if goal.memory_limit is not None:
        check_number(goal.memory_limit, "memory_limit")
    for unit in units:
        check_number(unit.time, f"time of unit {unit.name!r}")
        check_number(unit.memory, f"memory of unit {unit.name!r}")
    for i, edge in enumerate(edges):
        check_number(edge.seconds, f"seconds of edge {i}")
        _check_indices((edge.source, *edge.targets), len(units), f"edge {i}")
    for i, tie in enumerate(ties):
        check_number(tie.seconds, f"seconds of tie {i}")
        _check_indices(tie.units, len(units), f"tie {i}")
    _check_scale(units, edges, ties, goal)


def shares_ranks(ranks: Sequence[int]) -> bool:
    """Whether a rank holds more than one stage."""
    return len(set(ranks)) < len(ranks)


def check_ranks(ranks: Sequence[int], stages: int) -> None:
    """Raise PlanError unless each stage has a rank, or none is given."""
    if ranks and (len(ranks) != stages or sorted(set(ranks)) != list(range(1 + max(ranks)))):
        raise PlanError(
            "each stage has a rank, and ranks are numbered from 0 without a gap",
            f"ranks={tuple(ranks)} for {stages} stages",
            "give (0, 1, 0, 1) for two stages on each of two ranks",
        )


def check_number(value: float, name: str) -> None:
    """Raise PlanError unless ``value`` can be a cost."""
    if not (math.isfinite(value) and value >= 0.0):
        raise PlanError("costs are finite and not negative", f"{name} is {value}", "measure or count that cost again")


def _check_indices(indices: Iterable[int], size: int, name: str) -> None:
    bad = [i for i in indices if not 0 <= i < size]
    if bad:
        raise PlanError(
            "edges and ties name units by their place in the chain",
            f"{name} names {bad[0]}, but units are numbered 0 to {size - 1}",
            f"remove {bad[0]} from {name}, or add the unit",
        )


def _check_scale(units: Sequence[UnitCost], edges: Sequence[Edge], ties: Sequence[Tie], goal: Goal) -> None:
    """Costs are divided by the chain's totals: the worst quotient must still be a number."""
    time, memory = total_time(units), total_memory(units)
    paid = fold(e.seconds * len(e.targets) for e in edges) + fold(t.seconds * len(t.units) for t in ties)
    worst = goal.microbatches * ((time + paid) / time if time > 0.0 else 1.0)
    if not (math.isfinite(worst) and math.isfinite(memory)):
        raise PlanError(
            "costs fit into a float64 after division by their total",
            f"total time {time} s, total transfers {paid} s, total memory {memory} bytes",
            "check the units of these costs: seconds and bytes",
        )


def fold(values: Iterable[float]) -> float:
    """Sum from left to right, each addition rounded; ``sum`` rounds otherwise from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


def total_time(units: Sequence[UnitCost]) -> float:
    return fold(u.time for u in units)


def total_memory(units: Sequence[UnitCost]) -> float:
    return fold(u.memory for u in units)
