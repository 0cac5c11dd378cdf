"""Cut a chain of units into pipeline stages, exactly.

::

    units    0   1   2   3   4   5   6   7
             ├───────┤├──────────┤├──────┤
    cuts     0        2          5            -> Partition.cuts == (0, 2, 5)

A stage ``[a, b)`` takes ``time(a, b)``: its units' times, plus the seconds of every edge that comes into it from
another stage. With ``T`` and ``M`` the chain's total time and memory and ``w`` the memory weight, it costs::

    c(a, b) = (1 - w) * time(a, b) / T + w * memory(a, b) / M

A microbatch crosses all stages once and then follows its predecessor at the pace of the slowest stage, so the cuts
minimise::

    sum of c + (microbatches - 1) * max of c + (1 - w) * (seconds paid for tied parameters) / T

Sum plus maxima is the pipeline cost of AMP (arXiv 2210.07297); memory and its weight are SMP's (arXiv 2111.05972,
section on model partitioning), whose own algorithm splits the module tree top down and is no optimum. This one is: a
dynamic program over Pareto frontiers of (sum, max), bounded from both sides, done by the C++ core. It holds the costs
of all intervals that an optimum may use: with one microbatch all of them, 8 bytes times the square of the units.
`smpar.planner.reference` is the same in a few lines of Python, and decides equally, bit for bit.

Where a rank holds several (virtual) stages, what sets the pace is the rank with the largest sum over its stages, so
that a dear stage may be paired with a cheap one. Two ranks, two stages on each::

    time     4   1   1   4        stage  0    1    2    3
    rank     0   1   0   1        rank 0: 4 + 1, rank 1: 1 + 4; cuts that even out stages do not see this

With ``C(rank)`` the sum of c over its stages and ``v`` stages per rank the cuts then minimise::

    pace = (1 - evenness) * max of C + evenness * v * max of c
    (sum of c) / v + (microbatches - 1 / v) * pace + (1 - w) * (seconds paid for tied parameters) / T

``evenness`` 0 is for schedules free to take any ready work. The fixed order of interleaved 1F1B makes ranks wait where
stages differ, even if their sums do not: simulated, cuts for sums alone were 8 to 14% slower than the best, those for
the dearest stage alone 2 to 3%, those with an evenness of 0.4, which the runtime takes, 2%.

The slowest rank works ``microbatches * max of C``; it idles while the pipeline fills and drains, which with
interleaved stages takes only as long as the other ranks' work on one stage each: ``(sum of c - max of C) / v`` (arXiv
2104.04473, section 2.2.2: the bubble shrinks by v). With one stage per rank this is the formula above. A tensor between
stages of one rank costs nothing, nor does a parameter tied between them; the memory limit holds for a rank.

A rank's sum is no function of an interval, so the dynamic program ends here. A branch and bound proves the optimum
where it gets through in its budget (always up to a dozen units, and far beyond if transfers are cheap); otherwise an
iterated local search over the cuts has the last word, which starts from the cuts of the dynamic program and so is never
worse than those. Both count their effort instead of timing it: every rank finds the same cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

from smpar.errors import PlanError
from smpar.planner.chain import Edge, Goal, Partition, Tie, UnitCost, check, fold, shares_ranks
from smpar.planner.native import core

EVENNESS = 0.4
"""That of those who cut for interleaved stages: see above."""
_MANY = 2**31 - 1  # microbatches, so that only the fullest rank counts


def partition(
    units: Sequence[UnitCost],
    edges: Sequence[Edge],
    ties: Sequence[Tie],
    stages: int,
    microbatches: int,
    memory_weight: float = 0.0,
    memory_limit: float | None = None,
    ranks: Sequence[int] = (),
    evenness: float = 0.0,
) -> Partition:
    """The best cuts of ``units`` into ``stages`` stages.

    With one stage per rank, of equally good cuts the lexicographically smallest; with several, see above.

    Args:
        units: costs in chain order; seconds per microbatch and bytes.
        edges: tensors between units, in either direction, of any length; seconds per microbatch.
        ties: units that share a parameter; seconds per step.
        stages: number of stages.
        microbatches: per step.
        memory_weight: 0 balances time only, 1 memory only.
        memory_limit: bytes per rank.
        ranks: the rank that holds each stage; empty if stage ``k`` is alone on rank ``k``.
        evenness: where ranks are shared, the part of the pace that the dearest stage sets; between 0 and 1.

    Raises:
        TooFewUnits: fewer units than stages.
        PlanError: no cuts keep within ``memory_limit``; a number or an index that means nothing.
        NativeMissing: smpar was not installed, only found.
    """
    goal = Goal(stages, microbatches, memory_weight, memory_limit, tuple(ranks), evenness)
    check(units, edges, ties, goal)
    found = core().partition(
        [u.time for u in units],
        [u.memory for u in units],
        [(e.source, list(e.targets), e.seconds) for e in edges],
        [(list(t.units), t.seconds) for t in ties],
        stages,
        microbatches,
        memory_weight,
        float("inf") if memory_limit is None else memory_limit,
        list(ranks) if shares_ranks(goal.ranks) else [],
        evenness,
    )
    if found is None:
        raise too_large(units, goal)
    return Partition.make(goal, *found)


def too_large(units: Sequence[UnitCost], goal: Goal) -> PlanError:
    """The error for a memory limit that no cuts keep: by how much, and what would fit."""
    assert goal.memory_limit is not None
    where = "rank" if shares_ranks(goal.ranks) else "stage"
    if shares_ranks(goal.ranks):
        need = max(partition(units, [], [], goal.stages, _MANY, memory_weight=1.0, ranks=goal.ranks).rank_memory)
    else:
        need = least_memory(units, goal.stages)
    largest = max(units, key=lambda u: u.memory)
    return PlanError(
        f"every {where} fits into {goal.memory_limit:.0f} bytes",
        f"the best cuts into {goal.stages} stages need {need:.0f} bytes on one {where}, "
        f"{need - goal.memory_limit:.0f} too many; the largest unit is {largest.name!r} with {largest.memory:.0f}",
        "use more stages, tensor parallelism, smaller microbatches or activation checkpointing; or raise memory_limit",
    )


def least_memory(units: Sequence[UnitCost], stages: int) -> float:
    """Bytes of the fullest stage, at least, when the chain is cut into so many stages.

    Bisection; it ends because each feasible try lowers the upper end to a sum that occurs.
    """
    low = max(u.memory for u in units)
    high = fullest(units, stages, float("inf"))
    if (best := fullest(units, stages, low)) <= low:
        return best
    while True:
        middle = low + (high - low) / 2.0
        if not low < middle < high:
            return high
        found = fullest(units, stages, middle)
        low, high = (low, found) if found <= middle else (middle, high)


def fullest(units: Sequence[UnitCost], stages: int, limit: float) -> float:
    """Bytes of the fullest stage when stages are filled in turn up to ``limit`` and the last takes the rest."""
    full = [0.0]
    for unit in units:
        if full[-1] + unit.memory > limit and len(full) < stages:
            full.append(0.0)
        full[-1] = fold((full[-1], unit.memory))
    return max(full)
