"""From computations to computations with messages, and the one order of messages that both ends use.

Before an action come the receives it needs, after it the sends it makes:

    rank 0 | 0F0 0SA0:0>1 ... 0RG0:0<1 0B0
    rank 1 | 1RA0:0<0 1F0 1B0 1SG0:0>0

Of a split backward, I waits for and sends what the whole one does, W nothing.

A channel (one per directed pair of ranks) is first in, first out, in the order in which its sender's actions make the
messages. A message that a receiver waits for may arrive behind others which it needs later; receives are posted ahead
into buffers, so that is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.program import Program


class Message(NamedTuple):
    """One transfer on a channel.

    Attributes:
        kind: an activation goes from a flow's source to its target, a gradient from its target to its producer.
        flow: index into the program's flows.
        microbatch: index of the microbatch.
    """

    kind: Literal["activation", "gradient"]
    flow: int
    microbatch: int


def lower(schedule: Schedule, programs: Sequence[Program]) -> Schedule:
    """Add every action's receives before it and its sends after it.

    Args:
        schedule: forwards and backwards only, one that `smpar.schedule.check` accepts.
        programs: one per microbatch; segments are the same in all.
    """
    tables = {id(program): _table(program) for program in programs}
    ranks = []
    for actions in schedule.ranks:
        full: list[Action] = []
        for action in actions:
            moves = tables[id(programs[action.microbatch])]
            before, after = moves.get((action.kind, action.segment), ((), ()))
            full += [make(action.microbatch) for make in before]
            full.append(action)
            full += [make(action.microbatch) for make in after]
        ranks.append(tuple(full))
    return Schedule(schedule.name, tuple(ranks))


def channel_order(schedule: Schedule, programs: Sequence[Program]) -> dict[tuple[int, int], tuple[Message, ...]]:
    """(sender's rank, receiver's rank) -> its messages, first in, first out.

    The order is that of the sender's actions and, within an action, of `Program.flows`.

    Args:
        schedule: forwards and backwards only, one that `smpar.schedule.check` accepts.
        programs: one per microbatch; segments are the same in all.
    """
    channels: dict[tuple[int, int], list[Message]] = {}
    for rank, _, action in lower(schedule, programs):
        if action.kind.is_send:
            channels.setdefault((rank, action.peer), []).append(message_of(action))
    return {channel: tuple(messages) for channel, messages in channels.items()}


def received_before(schedule: Schedule, programs: Sequence[Program], rank: int) -> dict[Message, int]:
    """For each message to `rank`: how many messages of `rank` its sender surely had received before it sent it.

    So a message tells which of one's own are done with, without being asked: those for earlier actions of its sender.
    Messages of no bytes are not counted, as nothing is sent for them.

        rank 0 | 0F0 0SA0 ──▶ 1RA0 1F0 1B0 1SG0 ──▶ 0RG0 ...      when the gradient comes, the activation is done with

    Args:
        schedule: forwards and backwards only, one that `smpar.schedule.check` accepts.
        programs: one per microbatch; segments are the same in all.
        rank: the receiver.
    """
    done: dict[Message, int] = {}
    for actions in lower(schedule, programs).ranks:
        settled = begun = asked = 0  # for actions before the present one, up to the present one, and up to the next
        for action in actions:
            if not action.kind.is_message:
                settled, begun = begun, asked
            elif action.peer == rank and action.kind.is_send:
                done[message_of(action)] = settled
            elif action.peer == rank:
                asked += programs[action.microbatch].flows[action.flow].nbytes > 0
    return done


def message_of(action: Action) -> Message:
    """The message of which a lowered send or receive is one end."""
    activation = action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
    return Message("activation" if activation else "gradient", action.flow, action.microbatch)


_Make = Callable[[int], Action]
_Moves = tuple[tuple[_Make, ...], tuple[_Make, ...]]


def _table(program: Program) -> dict[tuple[Kind, int], _Moves]:
    """(kind, segment) -> makers of the receives before that action and of the sends after it; I has those of B."""
    before: dict[tuple[Kind, int], list[_Make]] = {}
    after: dict[tuple[Kind, int], list[_Make]] = {}
    for send, receive, sender, receiver, flow in _messages(program):
        ranks = program.segment_ranks
        compute = Kind.F if send is Kind.SEND_ACTIVATION else Kind.B
        after.setdefault((compute, sender), []).append(_maker(send, sender, flow, ranks[receiver]))
        before.setdefault((compute, receiver), []).append(_maker(receive, receiver, flow, ranks[sender]))
    table = {task: (tuple(before.get(task, ())), tuple(after.get(task, ()))) for task in before.keys() | after.keys()}
    return table | {(Kind.I, segment): moves for (kind, segment), moves in table.items() if kind is Kind.B}


def _messages(program: Program) -> Iterator[tuple[Kind, Kind, int, int, int]]:
    """(send, receive, sender's segment, receiver's segment, flow) of each message, in order of flows."""
    for index, flow in enumerate(program.flows):
        if program.sends_activation(flow):
            yield Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, flow.source, flow.target, index
        if program.sends_gradient(flow):
            yield Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, flow.target, flow.producer, index


def _maker(kind: Kind, segment: int, flow: int, peer: int) -> _Make:
    return lambda microbatch: Action(kind, segment, microbatch, flow, peer)
