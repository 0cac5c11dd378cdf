"""Sizes in, schedule out: who does what, in which order.

In the drawings a column is one unit of time, a digit a forward and a lowered digit a backward of that microbatch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from smpar.errors import ScheduleError, ScheduleNameError
from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.greedy import greedy
from smpar.schedule.program import Program, Transfer


def gpipe(program: Program, microbatches: int) -> Schedule:
    """All forwards, then all backwards, of a chain (GPipe, arXiv 1811.06965).

    Keeps every microbatch's activations until its backward; idles (S-1)/(M+S-1) of the time on equal stages.

    ::

        rank 0 |0123·········₀₀₁₁₂₂₃₃|
        rank 1 |·0123······₀₀₁₁₂₂₃₃··|
        rank 2 |··0123···₀₀₁₁₂₂₃₃····|
        rank 3 |···0123₀₀₁₁₂₂₃₃······|

    Raises:
        ScheduleError: the program is no chain, or `microbatches` is below one.
    """
    _require_chain(program, microbatches, "gpipe")
    forwards, backwards = [Kind.F] * microbatches, [Kind.B] * microbatches
    return _chain("gpipe", program, lambda place: forwards + backwards)


def one_f_one_b(program: Program, microbatches: int, active: int | None = None) -> Schedule:
    """Forwards and backwards in turn, of a chain (PipeDream-flush, arXiv 2006.09503).

    Idles as much as `gpipe`, but stage s of S holds at most S-s microbatches.

    ::

        rank 0 |0123······₀₀·₁₁·₂₂·₃₃|
        rank 1 |·012····₀₀3₁₁·₂₂·₃₃··|
        rank 2 |··01··₀₀2₁₁3₂₂·₃₃····|
        rank 3 |···0₀₀1₁₁2₂₂3₃₃······|

    Args:
        program: a chain.
        microbatches: how many, at least 1.
        active: cap on the microbatches in flight on a stage; None: stages + 2, which never binds.

    Raises:
        ScheduleError: the program is no chain, or a number is below one.
    """
    _require_chain(program, microbatches, "1f1b")
    cap = _active(program, active)
    last = len(program.segments) - 1

    def kinds(place: int) -> list[Kind]:
        ahead = min(last - place + 1, cap, microbatches)
        return [Kind.F] * ahead + [Kind.B, Kind.F] * (microbatches - ahead) + [Kind.B] * ahead

    return _chain("1f1b", program, kinds)


def list_schedule(
    program: Program, microbatches: int, active: int | None = None, transfer_seconds: Transfer = 0.0
) -> Schedule:
    """Any program: a rank that is free starts a ready action, in an order chosen by the segments' times.

    Module re-use, encoder-decoders, skips and several segments per stage all fit. Several ways to choose are tried
    (see `smpar.schedule.greedy.POLICIES`): backward first, unless another is faster by more than 1 %. On module
    loops it finds the interleaved schedule of Megatron-LM (arXiv 2104.04473). Every rank begins microbatches in
    order, so the oldest unfinished one can always go on: no cap deadlocks.

    Args:
        program: any program.
        microbatches: how many, at least 1.
        active: cap on the microbatches in flight on a rank; None: stages + 2.
        transfer_seconds: time of a message, in the unit of the segments' times.

    Raises:
        ScheduleError: a number is below one.
    """
    _require_microbatches(microbatches)
    return greedy("list", program, microbatches, _active(program, active), transfer_seconds)


def fill_drain(program: Program, microbatches: int, transfer_seconds: Transfer = 0.0) -> Schedule:
    """Any program: each rank runs all its forwards, then all its backwards, each half list-scheduled.

    Keeps every microbatch's activations, as `gpipe` does.

    Raises:
        ScheduleError: `microbatches` is below one.
    """
    _require_microbatches(microbatches)
    return greedy("fill_drain", program, microbatches, microbatches, transfer_seconds, drain=True)


def make_schedule(name: str, program: Program, microbatches: int, active: int | None = None) -> Schedule:
    """The schedule of that name, or its general form where the program is no chain.

    =================== ============= =================
    name                chain         any other program
    =================== ============= =================
    simple, gpipe       gpipe         fill_drain
    1f1b, interleaved   1f1b          list
    list                list          list
    fill_drain          fill_drain    fill_drain
    =================== ============= =================

    Args:
        name: from the table (`simple` and `interleaved` are SMP's names, arXiv 2111.05972).
        program: what one microbatch does.
        microbatches: how many, at least 1.
        active: cap on the microbatches in flight on a rank, for 1f1b and list; None: stages + 2.

    Raises:
        ScheduleNameError: no such name.
        ScheduleError: a number is below one.
    """
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, _MAKERS, n=1)
        raise ScheduleNameError(
            f"a schedule is one of {', '.join(_MAKERS)}",
            f"pipeline={name!r}",
            f'pipeline="{near[0] if near else "interleaved"}"',
        )
    for_chain, for_any = _MAKERS[name]
    return (for_chain if program.is_chain else for_any)(program, microbatches, active)


def _gpipe(program: Program, microbatches: int, active: int | None) -> Schedule:
    return gpipe(program, microbatches)


def _fill_drain(program: Program, microbatches: int, active: int | None) -> Schedule:
    return fill_drain(program, microbatches)


_Maker = Callable[[Program, int, "int | None"], Schedule]

_MAKERS: dict[str, tuple[_Maker, _Maker]] = {
    "simple": (_gpipe, _fill_drain),
    "gpipe": (_gpipe, _fill_drain),
    "1f1b": (one_f_one_b, list_schedule),
    "interleaved": (one_f_one_b, list_schedule),
    "list": (list_schedule, list_schedule),
    "fill_drain": (_fill_drain, _fill_drain),
}


def _chain(name: str, program: Program, kinds: Callable[[int], list[Kind]]) -> Schedule:
    """Number the n-th forward and the n-th backward of each stage as microbatch n."""
    ranks: list[tuple[Action, ...]] = [()] * program.size
    for place, segment in enumerate(sorted(program.segments, key=lambda segment: segment.stage)):
        count = dict.fromkeys(Kind, 0)
        actions = []
        for kind in kinds(place):
            if kind is Kind.F or program.backward:
                actions.append(Action(kind, segment.index, count[kind]))
            count[kind] += 1
        ranks[program.rank_of(segment.stage)] = tuple(actions)
    return Schedule(name, tuple(ranks))


def _active(program: Program, active: int | None) -> int:
    if active is not None and active < 1:
        raise ScheduleError("at least one microbatch is in flight", f"{active=}", "active_microbatches=1 or more")
    return program.stages + 2 if active is None else active


def _require_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise ScheduleError("a batch has at least one microbatch", f"{microbatches=}", "microbatches=1 or more")


def _require_chain(program: Program, microbatches: int, name: str) -> None:
    _require_microbatches(microbatches)
    if not program.is_chain:
        raise ScheduleError(
            f"{name} orders chains: at most one segment per rank, flows only to higher stages",
            f"{len(program.segments)} segments on ranks {program.segment_ranks}",
            'pipeline="list", or make_schedule, which chooses by the program',
        )
