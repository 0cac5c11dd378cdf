"""Orders for chains whose backwards split: ZB-H1 and ZB-V.

Some rules are tried on a simulated clock (`smpar.schedule.filling`), with the segments' times, and for the V a fixed
order for equal stages; the fastest wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.chains import is_vee, on_own_ranks, require_chain
from smpar.schedule.filling import Chain, Rule, fill
from smpar.schedule.memory import counts_segments, memory
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
    idles (p-1) F in all, however many microbatches there are, from 2p-1 on.

    ::

        rank 0 |0120₀⁰1₁¹3₀⁰2₂²₁¹3₃³₂²₃³·|
        rank 1 |·0011₀⁰2₀⁰2₁¹3₁¹3₂²₂₃₃³²³|

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
    even = Schedule("zbv", _even_vee(program, microbatches))
    return _fastest("zbv", program, microbatches, rules, transfer_seconds, [even] if _keeps_few(even, program) else [])


def _even_vee(program: Program, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """A fixed order for a V; with F = I = W and 2p-1 microbatches or more, it idles no longer than the ramp, (p-1) F.

    Rank r has the segments 0, on the way down, and 1, on the way up. What has run out, it leaves out::

        fill      F0, 2(p-r)-1 times      F1 F0, r times      F1 I1 W1, p-r times
        steady    F0 I0 W0 F1 I1 W1
        drain     I0 I1, r times          I0 W, p-r times     the other W's

    Since fewer than 2p segments are in flight when the steady part begins, and each forward follows a whole backward
    there, no rank holds more than 2p.
    """
    (f0, f1), (i0, i1), (w0, w1) = [[(kind, 0), (kind, 1)] for kind in (Kind.F, Kind.I, Kind.W)]
    size, rounds = program.size, max(0, microbatches - program.size)
    ranks = []
    for rank in range(size):
        both = microbatches - min(microbatches, max(size, microbatches) - rank)
        last = microbatches - rounds - both
        turns = [f0] * (2 * (size - rank) - 1) + [f1, f0] * rank + [f1, i1, w1] * (size - rank)
        turns += [f0, i0, w0, f1, i1, w1] * rounds
        turns += [i0, i1] * both + [i0, w1] * min(both, last) + [i0, w0] * (last - both)
        turns += [w1] * microbatches + [w0] * microbatches
        done: Counter[tuple[Kind, int]] = Counter()
        actions = []
        for kind, which in turns:
            segment = program.segments[(rank, 2 * size - 1 - rank)[which]]
            splits, microbatch = segment.weight > 0, done[kind, which]
            needed = microbatch < microbatches and (kind is Kind.F or program.backward)
            if needed and (splits or kind is not Kind.W):
                whole = kind is Kind.I and not splits
                actions.append(Action(Kind.B if whole else kind, segment.index, microbatch))
            done[kind, which] += 1
        ranks.append(tuple(actions))
    return tuple(ranks)


def _keeps_few(schedule: Schedule, program: Program) -> bool:
    """Whether no rank holds more than p microbatches; 2p segments may be more, where one keeps more than the other."""
    whole = [sum(segment.saved for segment in program.of_rank(rank)) for rank in range(program.size)]
    held = memory(schedule, program)
    return counts_segments(program) or all(h <= program.size * w for h, w in zip(held, whole, strict=True))


def _fastest(
    name: str,
    program: Program,
    microbatches: int,
    rules: Sequence[Rule],
    transfer: Transfer,
    others: Sequence[Schedule] = (),
) -> Schedule:
    """The fastest of one order per rule, and of the others; no rank holds more than p microbatches.

    Of equally fast ones, the one that is fastest when messages take a while longer.
    """
    chain = Chain(program)
    clocks = [chain] if transfer == 0.0 else [chain, Chain(program, transfer)]
    orders = {fill(clock, microbatches, rule): None for clock in clocks for rule in rules}
    schedules = [*(Schedule(name, ranks) for ranks in orders), *others]
    ends = [makespan(times(schedule, program, transfer)) for schedule in schedules]
    best = [s for s, end in zip(schedules, ends, strict=True) if end <= min(ends) * (1 + 1e-6)]
    delay = _DELAY * chain.mean

    def slowed(nbytes: int, source: int, target: int) -> float:
        return delay + (transfer(nbytes, source, target) if callable(transfer) else transfer)

    return min(best, key=lambda schedule: makespan(times(schedule, program, slowed))) if best[1:] else best[0]
