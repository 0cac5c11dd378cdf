"""Orders for chains whose backwards split: the weights' part, for which nobody waits, fills what would be idle time.

The chain runs on a simulated clock. A rank that is free takes, of the forwards and backwards that are ready, the one
its rule prefers; a W if it would idle otherwise; and never begins a forward for which it has no memory left. A few
rules are tried, the fastest wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.chains import is_vee, on_own_ranks, require_chain
from smpar.schedule.program import Program

_EPS = 1e-9
"""Memory in microbatches is a sum of fractions."""


class Rule(NamedTuple):
    """How a free rank chooses.

    Attributes:
        ahead: place among ranks -> most forwards of its first stage whose backward of inputs has not begun.
        turn: after a backward prefer a forward; else a backward whenever one is ready.
        deep: of the forwards, prefer the later stage's; else the earlier one's.
        patience: idle rather than run a W if a forward or backward is due in less than this share of the W's time.
    """

    ahead: tuple[int, ...]
    turn: bool
    deep: bool
    patience: float


def zero_bubble(program: Program, microbatches: int) -> Schedule:
    """1F1B with split backwards, of a chain with one segment per rank: ZB-H1 (arXiv 2401.10241, section 2.3).

    I takes the place of B, so gradients reach the earlier ranks sooner; the W's follow where the rank would idle. No
    rank holds more than p microbatches, as the first one does in `one_f_one_b`. With equal stages a rank idles
    (p-1)(F+I-W) at most. Segments whose backward cannot be split keep it whole.

    Raised digits are W's; a lowered digit is a backward of inputs.

    ::

        rank 0 |0123···₀⁰₁¹₂²₃³|
        rank 1 |·012··₀3₁⁰₂¹₃²³|
        rank 2 |··01·₀2₁3₂⁰₃¹²³|
        rank 3 |···0₀1₁2₂3₃⁰¹²³|

    Args:
        program: a chain.
        microbatches: how many, at least 1.

    Raises:
        ScheduleError: the program is no such chain, or `microbatches` is below one.
    """
    require_chain(program, microbatches, "zb", on_own_ranks)
    ranks = len(program.segments)
    as_1f1b, free = tuple(range(ranks, 0, -1)), (microbatches,) * ranks
    rules = [Rule(as_1f1b, True, False, 0.99), Rule(as_1f1b, False, False, 0.0), Rule(free, False, False, 0.0)]
    return _fastest("zb", program, microbatches, rules)


def zbv(program: Program, microbatches: int) -> Schedule:
    """Two stages per rank in a V, backwards split: ZB-V (arXiv 2401.10241, section 6; arXiv 2405.15362).

    The first rank also holds the last stage, so its backwards start at once and every rank holds at most p
    microbatches (of both its segments), as the first one does in `one_f_one_b`. With F = I = W a rank that has begun
    never idles: the whole takes 6M + p-1 times F, if M >= p.

    ::

        rank 0 |0120₀⁰1₁₀¹₁⁰32₂¹²·₂3₃²³₃³|
        rank 1 |·0011₀₀⁰₁₁⁰22¹¹₂3₂3²²₃₃³³|

    Args:
        program: a chain, one segment in each of 2p stages, stages r and 2p-1-r on rank r.
        microbatches: how many, at least 1.

    Raises:
        ScheduleError: the program is no such chain, or `microbatches` is below one.
    """
    require_chain(program, microbatches, "zbv", is_vee)
    free = (microbatches,) * program.size
    ramp = tuple(2 * (program.size - rank) + 1 for rank in range(program.size))
    rules = [
        Rule(free, True, True, 0.3),
        Rule(free, False, True, 0.6),
        Rule(ramp, False, True, 0.0),
        Rule(free, True, True, 0.99),
        Rule(free, True, True, 0.6),
        Rule(free, True, True, 0.0),
    ]
    return _fastest("zbv", program, microbatches, rules)


@dataclass(frozen=True)
class _Chain:
    """A chain as numbers, by place in the chain; ranks in order of their first place."""

    rank: tuple[int, ...]
    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    split: tuple[bool, ...]
    memory: tuple[float, ...]
    backward: bool


def _fastest(name: str, program: Program, microbatches: int, rules: Sequence[Rule]) -> Schedule:
    """The fastest of one order per rule, no rank holding more than p microbatches; of equally fast ones the first."""
    chain = _chain_of(program)
    least = _least(chain, microbatches)
    best_end, best = float("inf"), list[list[Action]]()
    for rule in rules:
        end, ranks = _run(chain, microbatches, rule)
        if end < best_end * (1 - 1e-6):
            best_end, best = end, ranks
        if best_end <= least * (1 + 1e-6):
            break
    homes = list(dict.fromkeys(program.segment_ranks))
    actions: list[tuple[Action, ...]] = [()] * program.size
    for place, mine in enumerate(best):
        actions[homes[place]] = tuple(mine)
    return Schedule(name, tuple(actions))


def _chain_of(program: Program) -> _Chain:
    homes = {rank: place for place, rank in enumerate(dict.fromkeys(program.segment_ranks))}
    rank = tuple(homes[r] for r in program.segment_ranks)
    segments = program.segments
    memory = []
    for segment, r in zip(segments, rank, strict=True):
        mine = [other.saved for other, o in zip(segments, rank, strict=True) if o == r]
        memory.append(segment.saved / sum(mine) if min(mine) > 0 else 1 / len(mine))
    return _Chain(
        rank,
        tuple(s.forward for s in segments),
        tuple(s.backward - s.weight for s in segments),
        tuple(s.weight for s in segments),
        tuple(s.weight > 0 for s in segments),
        tuple(memory),
        program.backward,
    )


def _least(chain: _Chain, microbatches: int) -> float:
    """No order is faster: a rank's work, behind the forwards before it, and what has to follow its last task."""
    best = 0.0
    for rank in set(chain.rank):
        mine = [place for place, r in enumerate(chain.rank) if r == rank]
        work = sum(chain.forward[place] for place in mine)
        if chain.backward:
            work += sum(chain.inputs[place] + chain.weights[place] for place in mine)
        best = max(best, microbatches * work + sum(chain.forward[: mine[0]]))
    return best


def _run(chain: _Chain, microbatches: int, rule: Rule) -> tuple[float, list[list[Action]]]:
    """One order: its end and each rank's actions."""
    places = range(len(chain.rank))
    last = len(chain.rank) - 1
    size = max(chain.rank) + 1
    mine = [[place for place in places if chain.rank[place] == rank] for rank in range(size)]
    # A forward leaves room for one of each later segment of its rank, so the oldest microbatch can always go on.
    room = [
        size - sum(chain.memory[other] for other in mine[chain.rank[place]] if other >= place) + _EPS
        for place in places
    ]
    forwards: list[list[float]] = [[] for _ in places]
    backwards: list[list[float]] = [[] for _ in places]
    weights = [0] * len(chain.rank)
    held, free, turned = [0.0] * size, [0.0] * size, [False] * size
    actions: list[list[Action]] = [[] for _ in range(size)]
    never = float("inf")

    def choose(rank: int) -> tuple[float, Kind, int]:
        now = free[rank]
        best = (never, 0, 0, 0)
        for place in mine[rank]:
            done = len(forwards[place])
            begun = len(backwards[place])
            if (
                done < microbatches
                and held[rank] <= room[place]
                and (place == 0 or len(forwards[place - 1]) > done)
                and (place != mine[rank][0] or done - begun < rule.ahead[rank] or not chain.backward)
            ):
                start = max(now, forwards[place - 1][done]) if place else now
                best = min(best, (start, not turned[rank] if rule.turn else 1, -place if rule.deep else place, place))
            if chain.backward and begun < done and (place == last or len(backwards[place + 1]) > begun):
                start = max(now, backwards[place + 1][begun] if place < last else forwards[place][begun])
                best = min(best, (start, turned[rank] if rule.turn else 0, -place, ~place))
        waiting = [place for place in mine[rank] if chain.split[place] and weights[place] < len(backwards[place])]
        if waiting:
            place = min(waiting, key=lambda place: backwards[place][weights[place]])
            if best[0] > now + rule.patience * chain.weights[place]:
                return now, Kind.W, place
        place = best[3]
        if place >= 0:
            return best[0], Kind.F, place
        return best[0], Kind.I if chain.split[~place] else Kind.B, ~place

    choices = [choose(rank) for rank in range(size)]
    total = microbatches * (len(places) + (sum(1 + split for split in chain.split) if chain.backward else 0))
    for _ in range(total):
        rank = min(range(size), key=lambda rank: choices[rank][0])
        start, kind, place = choices[rank]
        changed = {rank}
        if kind is Kind.F:
            microbatch = len(forwards[place])
            free[rank] = start + chain.forward[place]
            forwards[place].append(free[rank])
            held[rank] += chain.memory[place]
            turned[rank] = False
            if place < last:
                changed.add(chain.rank[place + 1])
        elif kind is Kind.W:
            microbatch = weights[place]
            free[rank] = start + chain.weights[place]
            weights[place] += 1
            held[rank] -= chain.memory[place]
        else:
            microbatch = len(backwards[place])
            free[rank] = start + chain.inputs[place] + (0 if kind is Kind.I else chain.weights[place])
            backwards[place].append(free[rank])
            turned[rank] = True
            if kind is Kind.B:
                held[rank] -= chain.memory[place]
            if place:
                changed.add(chain.rank[place - 1])
        actions[rank].append(Action(kind, place, microbatch))
        for other in changed:
            choices[other] = choose(other)
    return max(free), actions
