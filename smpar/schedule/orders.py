"""Sizes in, schedule out: the names of schedules, the stages they need, and the orders that run any program.

A new schedule is one function from program and microbatches, and one line in the table `_ORDERS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from smpar.config import VIRTUAL_STAGES
from smpar.errors import ScheduleError, ScheduleNameError
from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.chains import (
    gpipe,
    interleaved_1f1b,
    is_loop,
    is_vee,
    on_own_ranks,
    one_f_one_b,
    require_active,
    require_microbatches,
)
from smpar.schedule.greedy import greedy
from smpar.schedule.program import Program, Transfer
from smpar.schedule.zero_bubble import zbv, zero_bubble


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
        active: cap on the microbatches in flight on a rank; None: ranks + 2.
        transfer_seconds: time of a message, in the unit of the segments' times.

    Raises:
        ScheduleError: a number is below one.
    """
    require_microbatches(microbatches)
    return greedy("list", program, microbatches, _active(program, active), transfer_seconds)


def split_schedule(
    program: Program, microbatches: int, active: int | None = None, transfer_seconds: Transfer = 0.0
) -> Schedule:
    """`list_schedule` with the backwards split of all segments that can be, if that is faster by more than 1 %.

    A W runs when its rank would idle. A microbatch is in flight until its last W, so no more memory is needed.

    Args, raises: as for `list_schedule`.
    """
    require_microbatches(microbatches)
    return greedy("list", program, microbatches, _active(program, active), transfer_seconds, split=True)


def fill_drain(program: Program, microbatches: int, transfer_seconds: Transfer = 0.0) -> Schedule:
    """Any program: each rank runs all its forwards, then all its backwards, each half list-scheduled.

    Keeps every microbatch's activations, as `gpipe` does.

    Raises:
        ScheduleError: `microbatches` is below one.
    """
    require_microbatches(microbatches)
    return greedy("fill_drain", program, microbatches, microbatches, transfer_seconds, drain=True)


def in_turn(program: Program, microbatches: int) -> Schedule:
    """Any program: the forward of one microbatch ends on a rank before the next one's starts; then all backwards.

    For programs whose Python keeps a state from segment to segment, so that microbatches must not mix:

        rank 0   0F0 2F0 0F1 2F1 ... 2B1 0B1 2B0 0B0
        rank 1     1F0     1F1   ...   1B1     1B0

    Raises:
        ScheduleError: `microbatches` is below one.
    """
    require_microbatches(microbatches)
    count = range(microbatches)
    return Schedule(
        "in turn",
        tuple(
            tuple(Action(Kind.F, s.index, i) for i in count for s in program.of_rank(rank))
            + tuple(
                Action(Kind.B, s.index, i)
                for i in reversed(count)
                for s in reversed(program.of_rank(rank))
                if program.backward
            )
            for rank in range(program.size)
        ),
    )


def make_schedule(
    name: str, program: Program, microbatches: int, active: int | None = None, transfer_seconds: Transfer = 0.0
) -> Schedule:
    """The schedule of that name, or its general form where the program does not fit or `active` is too little.

    =================== ======================================== ================ =======
    name                fits                                     its order        general
    =================== ======================================== ================ =======
    simple, gpipe       chain, one segment per rank              gpipe            fill_drain
    1f1b, interleaved   chain, one segment per rank              1f1b             list
    interleaved_1f1b    chain, v stages per rank, in a loop      interleaved_1f1b list
    zb                  chain, one segment per rank              zb               list, split
    zbv                 chain, two stages per rank, in a V       zbv              list, split
    list                                                                          list
    fill_drain                                                                    fill_drain
    =================== ======================================== ================ =======

    Args:
        name: from the table (`simple` and `interleaved` are SMP's names, arXiv 2111.05972).
        program: what one microbatch does.
        microbatches: how many, at least 1.
        active: cap on the microbatches in flight on a rank, but for gpipe and fill_drain; None: an order's own, and
            ranks + 2 for list.
        transfer_seconds: time of a message, for the orders that follow times (list, fill_drain, zb, zbv); as for
            `smpar.schedule.times`.

    Raises:
        ScheduleNameError: no such name.
        ScheduleError: a number is below one.
    """
    require_active(active)
    order = _order(name)
    if order.make and order.fits(program):
        schedule = order.make(program, microbatches, transfer_seconds)
        if active is None or not order.capped or max(schedule.peak_in_flight()) <= active:
            return schedule
    return order.general(program, microbatches, active, transfer_seconds)


def virtual_stages_of(name: str, asked: int = 0) -> int:
    """Stages per rank under the schedule of that name.

    Args:
        name: as for `make_schedule`.
        asked: how many are wanted; 0: the schedule's default, 2 for interleaved_1f1b and zbv, else 1.

    Raises:
        ScheduleNameError: no such name.
        ScheduleError: the schedule does not go with that number.
    """
    vee, default = _order(name).vee, VIRTUAL_STAGES.get(name, 1)
    if asked < 0 or (vee and asked not in (0, default)):
        rule = f"{name} has {default} stages per rank" if vee else "a rank has at least one stage"
        raise ScheduleError(rule, f"virtual_stages={asked}", f"virtual_stages={default}, or leave it out")
    return asked or default


def placement(name: str, size: int, virtual_stages: int = 0) -> tuple[int, ...]:
    """Stage -> the rank that holds it, for `Program.ranks`.

    A loop, ``0 1 2 0 1 2``: stage s on rank s % size; for zbv a V, ``0 1 2 2 1 0``.

    Args:
        name: as for `make_schedule`.
        size: number of ranks, at least 1.
        virtual_stages: as `asked` of `virtual_stages_of`.

    Raises:
        ScheduleNameError: no such name.
        ScheduleError: a number does not fit.
    """
    if size < 1:
        raise ScheduleError("a pipeline has at least one rank", f"{size=}", "pipeline_parallel_degree=1 or more")
    stages = virtual_stages_of(name, virtual_stages)
    loop = tuple(range(size))
    return loop + loop[::-1] if _order(name).vee else loop * stages


class _Order(NamedTuple):
    """What a name stands for.

    Attributes:
        general: runs any program, within a cap.
        make: runs the programs that fit; None: there is no such order, general runs all.
        fits: whether `make` runs the program.
        capped: whether a cap on microbatches in flight applies.
        vee: whether a rank's stages lie in a V, and are as many as its default for certain.
    """

    general: Callable[[Program, int, int | None, Transfer], Schedule]
    make: Callable[[Program, int, Transfer], Schedule] | None = None
    fits: Callable[[Program], bool] = on_own_ranks
    capped: bool = True
    vee: bool = False


def _fill_drain(program: Program, microbatches: int, active: int | None, transfer_seconds: Transfer) -> Schedule:
    return fill_drain(program, microbatches, transfer_seconds)


def _one_f_one_b(program: Program, microbatches: int, active: int | None, transfer_seconds: Transfer) -> Schedule:
    if on_own_ranks(program):
        return one_f_one_b(program, microbatches, active)
    return list_schedule(program, microbatches, active, transfer_seconds)


def _gpipe(program: Program, microbatches: int, transfer_seconds: Transfer) -> Schedule:
    return gpipe(program, microbatches)


def _interleaved(program: Program, microbatches: int, transfer_seconds: Transfer) -> Schedule:
    return interleaved_1f1b(program, microbatches)


_ORDERS: dict[str, _Order] = {
    "simple": _Order(_fill_drain, _gpipe, capped=False),
    "gpipe": _Order(_fill_drain, _gpipe, capped=False),
    "1f1b": _Order(_one_f_one_b),
    "interleaved": _Order(_one_f_one_b),
    "interleaved_1f1b": _Order(list_schedule, _interleaved, is_loop),
    "zb": _Order(split_schedule, zero_bubble),
    "zbv": _Order(split_schedule, zbv, is_vee, vee=True),
    "list": _Order(list_schedule),
    "fill_drain": _Order(_fill_drain, capped=False),
}


def _order(name: str) -> _Order:
    if name not in _ORDERS:
        near = difflib.get_close_matches(name, _ORDERS, n=1)
        raise ScheduleNameError(
            f"a schedule is one of {', '.join(_ORDERS)}",
            f"pipeline={name!r}",
            f'pipeline="{near[0] if near else "interleaved"}"',
        )
    return _ORDERS[name]


def _active(program: Program, active: int | None) -> int:
    require_active(active)
    return program.size + 2 if active is None else active
