"""Orders for chains with whole backwards: each rank's forwards and backwards in turn.

In the drawings a column is one unit of time, a digit a forward and a lowered digit a backward of that microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smpar.errors import ScheduleError
from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.memory import memory
from smpar.schedule.program import Program
from smpar.schedule.simulate import makespan, times


def gpipe(program: Program, microbatches: int) -> Schedule:
    """All forwards, then all backwards, of a chain with one segment per rank (GPipe, arXiv 1811.06965).

    Keeps every microbatch's activations until its backward; idles (S-1)/(M+S-1) of the time on equal stages.

    ::

        rank 0 |0123·········₀₀₁₁₂₂₃₃|
        rank 1 |·0123······₀₀₁₁₂₂₃₃··|
        rank 2 |··0123···₀₀₁₁₂₂₃₃····|
        rank 3 |···0123₀₀₁₁₂₂₃₃······|

    Raises:
        ScheduleError: the program is no such chain, or `microbatches` is below one.
    """
    require_chain(program, microbatches, "gpipe", on_own_ranks)
    forwards, backwards = [Kind.F] * microbatches, [Kind.B] * microbatches
    return _chain("gpipe", program, lambda place: forwards + backwards)


def one_f_one_b(program: Program, microbatches: int, active: int | None = None) -> Schedule:
    """Forwards and backwards in turn, of a chain with one segment per rank (PipeDream-flush, arXiv 2006.09503).

    Idles as much as `gpipe`, but stage s of S holds at most S-s microbatches.

    ::

        rank 0 |0123······₀₀·₁₁·₂₂·₃₃|
        rank 1 |·012····₀₀3₁₁·₂₂·₃₃··|
        rank 2 |··01··₀₀2₁₁3₂₂·₃₃····|
        rank 3 |···0₀₀1₁₁2₂₂3₃₃······|

    Args:
        program: a chain.
        microbatches: how many, at least 1.
        active: cap on the microbatches in flight on a stage; None: no cap, the order itself holds few.

    Raises:
        ScheduleError: the program is no such chain, or a number is below one.
    """
    require_chain(program, microbatches, "1f1b", on_own_ranks)
    require_active(active)
    last = len(program.segments) - 1

    def kinds(place: int) -> list[Kind]:
        ahead = min(last - place + 1, microbatches, active or microbatches)
        return [Kind.F] * ahead + [Kind.B, Kind.F] * (microbatches - ahead) + [Kind.B] * ahead

    return _chain("1f1b", program, kinds)


def interleaved_1f1b(program: Program, microbatches: int) -> Schedule:
    """1F1B over v stages per rank, stage s on rank s % p (Megatron-LM, arXiv 2104.04473, section 2.2).

    Microbatches go in groups: a group runs all of a rank's stages before the next group begins. With groups of p, the
    ramps are v times shorter than those of `one_f_one_b`: idle (p-1)/(vM+p-1) of the time on equal stages. Where M is
    no multiple of p, either the last group is smaller or the groups are larger, whichever is faster by the segments'
    times. Rank r of p holds at most 2(p-1-r) + (v-1)g + 1 of its segments, in groups of g.

    Two stages per rank: 0 and 1 first run stages 0 and 1, then stages 2 and 3, in one column each.

    ::

        rank 0 |01012·₀₀3₁₁2₀₀3₁₁·₂₂·₃₃₂₂₃₃|
        rank 1 |·010₀₀1₁₁2₀₀3₁₁2₂₂3₃₃₂₂₃₃··|

    Args:
        program: a chain, one segment in each of v * p stages.
        microbatches: how many, at least 1.

    Raises:
        ScheduleError: the program is no such chain, or `microbatches` is below one.
    """
    require_chain(program, microbatches, "interleaved_1f1b", is_loop)
    rounds = max(1, microbatches // program.size)
    rest = microbatches - rounds * program.size
    groupings = [[program.size] * rounds + [rest]] if rest > 0 else []
    groupings.append([microbatches // rounds + (number < microbatches % rounds) for number in range(rounds)])
    found: list[tuple[float, int, Schedule]] = []
    for groups in groupings:
        schedule = _interleaved(program, groups)
        try:
            end = makespan(times(schedule, program))
        except ScheduleError:  # A small last group may need a backward that its own forwards hold up.
            continue
        found.append((end, sum(memory(schedule, program)), schedule))
    return min(found, key=lambda entry: entry[:2])[2]


def _interleaved(program: Program, groups: Sequence[int]) -> Schedule:
    size = program.size
    chunks = len(program.segments) // size
    turns: list[tuple[int, int]] = []  # (chunk, microbatch) in the order of a rank's forwards
    backs: list[tuple[int, int]] = []
    first = 0
    for group in groups:
        microbatches = range(first, first + group)
        turns += [(chunk, microbatch) for chunk in range(chunks) for microbatch in microbatches]
        backs += [(chunk, microbatch) for chunk in reversed(range(chunks)) for microbatch in microbatches]
        first += group
    ranks = []
    for rank in range(size):
        forwards = [Action(Kind.F, chunk * size + rank, microbatch) for chunk, microbatch in turns]
        if not program.backward:
            ranks.append(tuple(forwards))
            continue
        backwards = [Action(Kind.B, chunk * size + rank, microbatch) for chunk, microbatch in backs]
        ahead = min(len(turns), 2 * (size - 1 - rank) + (chunks - 1) * max(groups) + 1)
        steady = zip(backwards, forwards[ahead:], strict=False)
        actions = forwards[:ahead] + [action for pair in steady for action in pair]
        ranks.append(tuple(actions + backwards[len(turns) - ahead :]))
    return Schedule("interleaved_1f1b", tuple(ranks))


def on_own_ranks(program: Program) -> bool:
    """A chain with at most one segment per rank."""
    return program.is_chain and len(set(program.segment_ranks)) == len(program.segments)


def is_loop(program: Program) -> bool:
    """A chain with a segment in every stage, stage s on rank s % p, as many stages on each rank."""
    full = program.is_chain and len(program.segments) == program.stages and program.stages % program.size == 0
    return full and all(rank == stage % program.size for stage, rank in enumerate(program.segment_ranks))


def is_vee(program: Program) -> bool:
    """A chain with a segment in each of 2p stages, those of rank r being r and 2p-1-r."""
    full = program.is_chain and len(program.segments) == program.stages == 2 * program.size
    return full and program.segment_ranks == (*range(program.size), *reversed(range(program.size)))


def require_chain(program: Program, microbatches: int, name: str, fits: Callable[[Program], bool]) -> None:
    """Refuse a program that the order of that name cannot run.

    Raises:
        ScheduleError: it does not fit, or there is no microbatch.
    """
    require_microbatches(microbatches)
    if not fits(program):
        raise ScheduleError(
            f"{name} orders chains: {_SHAPES[fits]}, flows only to higher stages",
            f"{len(program.segments)} segments on ranks {program.segment_ranks}",
            'pipeline="list", or make_schedule, which chooses by the program',
        )


_SHAPES: dict[Callable[[Program], bool], str] = {
    on_own_ranks: "at most one segment per rank",
    is_loop: "a segment in every stage, stage s on rank s % p",
    is_vee: "a segment in every stage, stages r and 2p-1-r on rank r",
}


def require_microbatches(microbatches: int) -> None:
    """Raises ScheduleError if there is none."""
    if microbatches < 1:
        raise ScheduleError("a batch has at least one microbatch", f"{microbatches=}", "microbatches=1 or more")


def require_active(active: int | None) -> None:
    """Raises ScheduleError if no microbatch may be in flight."""
    if active is not None and active < 1:
        raise ScheduleError("at least one microbatch is in flight", f"{active=}", "active_microbatches=1 or more")


def _chain(name: str, program: Program, kinds: Callable[[int], list[Kind]]) -> Schedule:
    """Number the n-th forward and the n-th backward of each segment as microbatch n."""
    ranks: list[tuple[Action, ...]] = [()] * program.size
    for segment in program.segments:
        count = dict.fromkeys(Kind, 0)
        actions = []
        for kind in kinds(segment.index):
            if kind is Kind.F or program.backward:
                actions.append(Action(kind, segment.index, count[kind]))
            count[kind] += 1
        ranks[program.segment_ranks[segment.index]] = tuple(actions)
    return Schedule(name, tuple(ranks))
