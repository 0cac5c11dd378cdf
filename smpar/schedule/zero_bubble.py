"""Orders for chains whose backwards split: ZB-H1 and ZB-V.

Some rules are tried on a simulated clock (`smpar.schedule.filling`), with the segments' times; the fastest wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from smpar.schedule.actions import Schedule
from smpar.schedule.chains import is_vee, on_own_ranks, require_chain
from smpar.schedule.filling import Chain, Rule, fill
from smpar.schedule.program import Program, Transfer
from smpar.schedule.simulate import makespan, times

_DELAY = 0.1
"""What a message may take, as a share of the mean time of forwards and whole backwards. Orders without any slack lose
that much at each message; on two ranks in a V, leaving it costs nothing."""


def zero_bubble(program: Program, microbatches: int, transfer_seconds: Transfer = 0.0) -> Schedule:
    """1F1B with split backwards, of a chain with one segment per rank: ZB-H1 (arXiv 2401.10241, section 2.3).

    I takes the place of B, so gradients reach the earlier ranks sooner; the W's follow where the rank would idle. No
    rank holds more than p microbatches, as the first one does in `one_f_one_b`. With equal stages a rank idles
    (p-1)(F+I-W) at most. Segments whose backward cannot be split keep it whole.

    Raised digits are W's; a lowered digit is a backward of inputs.

    ::

        rank 0 |0123···₀⁰4₁¹5₂²₃³₄⁴₅⁵|
        rank 1 |·012··₀3₁⁰4₂¹5₃²₄³₅⁴⁵|
        rank 2 |··01·₀2₁3₂⁰4₃¹5₄²₅³⁴⁵|
        rank 3 |···0₀1₁2₂3₃⁰4₄¹5₅²³⁴⁵|

    Args:
        program: a chain.
        microbatches: how many, at least 1.
        transfer_seconds: time of a message, as for `smpar.schedule.times`.

    Raises:
        ScheduleError: the program is no such chain, or `microbatches` is below one.
    """
    require_chain(program, microbatches, "zb", on_own_ranks)
    ranks = len(program.segments)
    as_1f1b, free = tuple(range(ranks, 0, -1)), (microbatches,) * ranks
    rules = [Rule(as_1f1b, True, 1.0), Rule(as_1f1b, False, 0.0), Rule(free, False, 0.0)]
    return _fastest("zb", program, microbatches, rules, transfer_seconds)


def zbv(program: Program, microbatches: int, transfer_seconds: Transfer = 0.0) -> Schedule:
    """Two stages per rank in a V, backwards split: ZB-V (arXiv 2401.10241, section 6; arXiv 2405.15362).

    The first rank also holds the last stage, so its backwards start at once and every rank holds at most p
    microbatches (of both its segments), as the first one does in `one_f_one_b`. With F = I = W of all segments a rank
    idles (p-1) F in all, however many microbatches there are.

    ::

        rank 0 |0120₀⁰1₁₀¹⁰3₁¹2₂²3₃₂³²₃³·|
        rank 1 |·0011₀₀⁰₁₁⁰22¹¹33₂₂²₃₃²³³|

    Args:
        program: a chain, one segment in each of 2p stages, stages r and 2p-1-r on rank r.
        microbatches: how many, at least 1.
        transfer_seconds: time of a message, as for `smpar.schedule.times`.

    Raises:
        ScheduleError: the program is no such chain, or `microbatches` is below one.
    """
    require_chain(program, microbatches, "zbv", is_vee)
    free = (microbatches,) * program.size
    # On 160 chains of two to four ranks the best of these was within 0.02 % on average of the best of 24.
    rules = [
        Rule(free, True, 0.0),
        Rule(free, False, 0.0),
        Rule(free, False, 0.6),
        Rule(free, True, 0.3, delay=0.05),
        Rule(free, True, 0.3, delay=0.2),
        Rule(free, False, 0.0, delay=0.3),
    ]
    return _fastest("zbv", program, microbatches, rules, transfer_seconds)


def _fastest(name: str, program: Program, microbatches: int, rules: Sequence[Rule], transfer: Transfer) -> Schedule:
    """The fastest of one order per rule, no rank holding more than p microbatches.

    Of equally fast ones, the one that is fastest when messages take a while longer.
    """
    chain = Chain(program)
    clocks = [chain] if transfer == 0.0 else [chain, Chain(program, transfer)]
    orders = {fill(clock, microbatches, rule): None for clock in clocks for rule in rules}
    schedules = [Schedule(name, ranks) for ranks in orders]
    ends = [makespan(times(schedule, program, transfer)) for schedule in schedules]
    best = [s for s, end in zip(schedules, ends, strict=True) if end <= min(ends) * (1 + 1e-6)]
    delay = _DELAY * chain.mean

    def slowed(nbytes: int, source: int, target: int) -> float:
        return delay + (transfer(nbytes, source, target) if callable(transfer) else transfer)

    return min(best, key=lambda schedule: makespan(times(schedule, program, slowed))) if best[1:] else best[0]
