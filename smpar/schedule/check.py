"""Will it run? Every mistake of a schedule is found here, before a rank waits for ever.

no action waits for one that waits for it
  found: 0B0 on rank 0, position 1 waits for 1B0 on rank 1; 1F1 on rank 1, position 0 waits for 0F1 on rank 0
    schedule demo
    rank 0 | 0F0   >0B0< 0F1 0B1
    rank 1 | >1F1< 1F0   1B0 1B1
  to fix: move one of the marked actions behind what the others wait for
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from smpar.errors import ScheduleError
from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.lower import Message, lower, message_of
from smpar.schedule.program import Program

Place = tuple[int, int]
"""(rank, position among its actions)."""


def check(schedule: Schedule, programs: Sequence[Program], active: int | None = None) -> None:
    """Prove that the schedule runs its programs.

    Checked in this order: each needed action occurs once, on the rank that holds its segment, a backward whole (B) or
    split (I and W); a microbatch's actions on one rank keep their order; at most `active` microbatches are in flight;
    run with channels whose sends never block, every rank comes to its end.

    Args:
        schedule: forwards and backwards, before lowering.
        programs: one per microbatch; segments are the same in all.
        active: cap on the microbatches in flight on a rank; None: no cap.

    Raises:
        ScheduleError: names rule and action, and shows the schedule with the failing places marked.
    """
    if not programs:
        raise ScheduleError("there is one program per microbatch", "no program", "pass [program] * microbatches")
    for microbatch, program in enumerate(programs):
        if (program.segments, program.ranks) != (programs[0].segments, programs[0].ranks):
            raise ScheduleError(
                "all microbatches of a step have the same segments",
                f"microbatch {microbatch}: {program.segments}, microbatch 0: {programs[0].segments}",
                "make a schedule for each kind of microbatch, and run them one after the other",
            )
    _check_once(schedule, programs)
    _check_order(schedule, programs)
    if active is not None:
        _check_in_flight(schedule, active)
    _check_runs(schedule, programs)


def _fail(schedule: Schedule, rule: str, values: str, fix: str, *places: Place) -> ScheduleError:
    grid = schedule.table(places, around=8).replace("\n", "\n    ")
    return ScheduleError(rule, f"{values}\n    {grid}", fix)


def _at(place: Place) -> str:
    return f"on rank {place[0]}, position {place[1]}"


def _check_once(schedule: Schedule, programs: Sequence[Program]) -> None:
    size = programs[0].size
    if len(schedule.ranks) != size:
        raise _fail(
            schedule,
            "a schedule has one list of actions per rank of its program",
            f"{len(schedule.ranks)} lists for {size} ranks",
            "add the missing ranks; a rank without segments has an empty list",
        )
    needed = {
        Action(task.kind, task.segment, microbatch): program.segment_ranks[task.segment]
        for microbatch, program in enumerate(programs)
        for task in program.tasks
    }
    wholes: dict[Action, Place] = {}
    for rank, position, action in schedule:
        whole = _whole(action)
        if action.kind in (Kind.I, Kind.W) and whole in needed:
            _check_splits(schedule, programs, action, (rank, position))
            wholes[whole] = (rank, position)
    for whole in wholes:
        home = needed.pop(whole)
        needed |= {replace(whole, kind=kind): home for kind in (Kind.I, Kind.W)}
    seen: dict[Action, Place] = {}
    for rank, position, action in schedule:
        place = (rank, position)
        if action.kind.is_message:
            rule = "messages are added by lowering, not by the schedule"
            raise _fail(schedule, rule, f"{action} {_at(place)}", "check the schedule before lower()", place)
        if action in wholes:
            rule = "a backward occurs once, whole or split"
            values = f"{action} {_at(place)}, and a part of it {_at(wholes[action])}"
            raise _fail(schedule, rule, values, f"remove {action}, or its I and W", wholes[action], place)
        if action not in needed:
            rule = "each action is a forward or backward that the program has"
            values = f"{action} {_at(place)}; {len(programs)} microbatches, {len(programs[0].segments)} segments"
            if action.kind is not Kind.F and Action(Kind.F, action.segment, action.microbatch) in needed:
                values += f", program of microbatch {action.microbatch} without backward"
            raise _fail(schedule, rule, values, f"remove {action}", place)
        if rank != needed[action]:
            rule = "an action is on the rank that holds its segment"
            raise _fail(schedule, rule, f"{action} {_at(place)}", f"move {action} to rank {needed[action]}", place)
        if action in seen:
            rule = "each action occurs once"
            values = f"{action} {_at(seen[action])} and again {_at(place)}"
            raise _fail(schedule, rule, values, f"remove one {action}", seen[action], place)
        seen[action] = place
    for action, rank in needed.items():
        if action not in seen:
            rule = "each action of the program occurs"
            place = (rank, len(schedule.ranks[rank]))
            raise _fail(schedule, rule, f"no {action} on rank {rank}", f"add {action} to rank {rank}", place)


def _whole(action: Action) -> Action:
    """The backward that the action is, or is a part of."""
    return replace(action, kind=Kind.B)


def _check_splits(schedule: Schedule, programs: Sequence[Program], action: Action, place: Place) -> None:
    if programs[action.microbatch].segments[action.segment].weight == 0:
        rule = "a backward is split only where the weights' part has a time"
        values = f"{action} {_at(place)}, weight=0 of segment {action.segment}"
        raise _fail(schedule, rule, values, f"use {_whole(action)}, whole", place)


def _check_order(schedule: Schedule, programs: Sequence[Program]) -> None:
    """The order of one microbatch's actions on one rank."""
    forwards_left = Counter(
        (microbatch, rank) for microbatch, program in enumerate(programs) for rank in program.segment_ranks
    )
    users = [_local_users(program) for program in programs]
    last: dict[tuple[int, int], tuple[Action, Place]] = {}
    done: set[Action] = set()
    for rank, position, action in schedule:
        place, turn = (rank, position), (action.microbatch, rank)
        if action.kind is Kind.F:
            before = last.get(turn)
            if before and before[0].segment > action.segment:
                rule = "a rank runs a microbatch's forwards in program order"
                values = f"{action} {_at(place)} after {before[0]} {_at(before[1])}"
                raise _fail(schedule, rule, values, f"move {action} before {before[0]}", before[1], place)
            last[turn] = action, place
            forwards_left[turn] -= 1
        elif action.kind is Kind.W:
            if _whole(action) not in done:
                first = replace(action, kind=Kind.I)
                rule = "the weights' part of a backward comes after that of the inputs"
                raise _fail(schedule, rule, f"{action} {_at(place)} before {first}", f"move it behind {first}", place)
        else:
            if forwards_left[turn]:
                rule = "a rank starts a microbatch's backwards after all its forwards of that microbatch"
                values = f"{action} {_at(place)} with {forwards_left[turn]} forwards of it to come"
                raise _fail(schedule, rule, values, f"move {action} behind them", place)
            for user in users[action.microbatch].get(action.segment, ()):
                first = Action(Kind.B, user, action.microbatch)
                if first not in done:
                    rule = "a segment's backward comes after those of the segments that use its tensors"
                    values = f"{action} {_at(place)} before {first} or its I"
                    raise _fail(schedule, rule, values, f"move {action} behind it", place)
            done.add(_whole(action))


def _local_users(program: Program) -> dict[int, list[int]]:
    """Segment -> the other segments of its rank whose backward gives it a gradient."""
    users: dict[int, list[int]] = {}
    for flow in program.flows:
        same_rank = program.segment_ranks[flow.producer] == program.segment_ranks[flow.target]
        if flow.backward and same_rank and flow.producer != flow.target:
            users.setdefault(flow.producer, []).append(flow.target)
    return users


def _check_in_flight(schedule: Schedule, active: int) -> None:
    for rank, counts in enumerate(schedule.in_flight()):
        for position, count in enumerate(counts):
            if count > active:
                action, place = schedule.ranks[rank][position], (rank, position)
                rule = f"at most {active} microbatches are in flight on a rank"
                fix = f"move {action} behind a backward, or active_microbatches={max(schedule.peak_in_flight())}"
                raise _fail(schedule, rule, f"{count} at {action} {_at(place)}", fix, place)


def _check_runs(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Run the lowered schedule: sends never block, a receive waits until its message was sent."""
    full = lower(schedule, programs).ranks
    at = [0] * len(full)
    sent: set[tuple[int, int, Message]] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(full):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind.is_send:
                    sent.add((rank, action.peer, message_of(action)))
                elif action.kind.is_message and (action.peer, rank, message_of(action)) not in sent:
                    break
                at[rank] += 1
                moved = True
    stuck = [rank for rank, actions in enumerate(full) if at[rank] < len(actions)]
    if stuck:
        places, waits = [], []
        for rank in stuck:
            receive = full[rank][at[rank]]
            waiting = next(action for action in full[rank][at[rank] :] if not action.kind.is_message)
            place = (rank, schedule.ranks[rank].index(waiting))
            places.append(place)
            maker = _maker_of(receive, programs)
            if maker not in schedule.ranks[receive.peer]:
                maker = replace(maker, kind=Kind.I)
            waits.append(f"{waiting} {_at(place)} waits for {maker} on rank {receive.peer}")
        raise _fail(
            schedule,
            "no action waits for one that waits for it",
            "; ".join(waits),
            "move one of the marked actions behind what the others wait for",
            *places,
        )


def _maker_of(receive: Action, programs: Sequence[Program]) -> Action:
    """The action after which the awaited message is sent, if it is not split."""
    flow = programs[receive.microbatch].flows[receive.flow]
    if receive.kind is Kind.RECV_ACTIVATION:
        return Action(Kind.F, flow.source, receive.microbatch)
    return Action(Kind.B, flow.target, receive.microbatch)
