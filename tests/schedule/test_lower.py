"""Both ends of a channel agree on its messages, and every tensor arrives before it is used."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpar.schedule import (
    Action,
    Flow,
    Kind,
    Message,
    Program,
    Schedule,
    Segment,
    channel_order,
    list_schedule,
    lower,
    make_schedule,
    message_of,
    one_f_one_b,
    received_before,
)

from .programs import chain, random_program


def test_chain_by_hand() -> None:
    expected = """
        schedule 1f1b
        rank 0 | 0F0 0SA0:0>1 0F1 0SA1:0>1 0RG0:0<1 0B0 0RG1:0<1 0B1
        rank 1 | 1RA0:0<0 1F0 1B0 1SG0:0>0 1RA1:0<0 1F1 1B1 1SG1:0>0
    """
    programs = [chain(2)] * 2
    assert lower(one_f_one_b(chain(2), 2), programs) == Schedule.parse(expected)
    assert channel_order(one_f_one_b(chain(2), 2), programs) == {
        (0, 1): (Message("activation", 0, 0), Message("activation", 0, 1)),
        (1, 0): (Message("gradient", 0, 0), Message("gradient", 0, 1)),
    }


def test_a_tensor_used_twice_is_sent_once_and_from_where_its_stage_is() -> None:
    """Made in segment 0, sent after segment 2, its stage's segment at the time of use; used again in segment 5."""
    homes = (0, 1, 0, 2, 0, 2)
    flows = (
        Flow(0, 0, 0, 1, 8),
        Flow(1, 1, 1, 2, 8),
        Flow(7, 2, 0, 3, 8),
        Flow(2, 3, 3, 4, 8),
        Flow(3, 4, 4, 5, 8),
        Flow(7, 4, 0, 5, 8, forward=False),
    )
    program = Program(3, tuple(Segment(i, home) for i, home in enumerate(homes)), flows)
    full = lower(make_schedule("list", program, 1), [program])
    expected = "3RA0:2<0 3F0 3SA0:3>0 5RA0:4<0 5F0 5B0 5SG0:4>0 5SG0:5>0 3RG0:3<0 3B0 3SG0:2>0"
    assert " ".join(map(str, full.ranks[2])) == expected
    rank = full.ranks[0]
    assert rank.index(Action.parse("2SA0:2>2")) == rank.index(Action.parse("2F0")) + 1
    # Both gradients of tensor 7 come before the backward of the segment that made it.
    last = rank.index(Action.parse("0B0"))
    assert {str(a) for a in rank[last - 3 : last]} == {"0RG0:0<1", "0RG0:2<2", "0RG0:5<2"}


def test_no_gradient_without_backward() -> None:
    program = chain(2)
    silent = replace(program, flows=(replace(program.flows[0], backward=False),))
    channels = channel_order(one_f_one_b(program, 2), [program, silent])
    assert channels[1, 0] == (Message("gradient", 0, 0),)
    assert set(channel_order(one_f_one_b(program.forward_only(), 2), [program.forward_only()] * 2)) == {(0, 1)}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["list", "fill_drain", "zb"]))
def test_queues_run_in_any_interleaving(seed: int, name: str) -> None:
    rng = random.Random(seed)
    program = random_program(rng, backward=rng.random() < 0.8)
    microbatches = rng.randint(1, 4)
    fewer = replace(program, flows=tuple(replace(f, backward=f.backward and rng.random() < 0.7) for f in program.flows))
    programs = [rng.choice([program, fewer]) for _ in range(microbatches)]
    schedule = make_schedule(name, program, microbatches, rng.choice([None, 1, 2]))
    full = lower(schedule, programs).ranks
    promised = {channel: deque(messages) for channel, messages in channel_order(schedule, programs).items()}
    wires: dict[tuple[int, int], deque[Message]] = {channel: deque() for channel in promised}
    arrived: dict[int, set[Message]] = {rank: set() for rank in range(len(full))}
    got: dict[int, set[Message]] = {rank: set() for rank in range(len(full))}
    at = [0] * len(full)
    done: list[Action] = []
    stuck = 0
    while stuck < 200 and any(at[r] < len(full[r]) for r in range(len(full))):
        rank = rng.randrange(len(full))
        for (source, target), wire in wires.items():
            if target == rank and wire and rng.random() < 0.7:
                message = wire.popleft()
                assert message == promised[source, target].popleft(), "out of the promised order"
                arrived[rank].add(message)
        stuck += 1
        if at[rank] == len(full[rank]):
            continue
        action = full[rank][at[rank]]
        if action.kind.is_send:
            kinds = (Kind.F,) if action.kind is Kind.SEND_ACTIVATION else (Kind.B, Kind.I)
            assert any(Action(kind, action.segment, action.microbatch) in done for kind in kinds)
            wires[rank, action.peer].append(message_of(action))
        elif action.kind.is_message:
            if message_of(action) not in arrived[rank]:
                continue
            got[rank].add(message_of(action))
        else:
            for message in inputs(program, programs[action.microbatch], rank, action):
                assert message in got[rank], f"{action} without {message}"
            done.append(action)
        at[rank] += 1
        stuck = 0
    assert all(at[r] == len(full[r]) for r in range(len(full))), "a rank waits for ever"
    assert not any(wires.values()) or all(arrived[r] == got[r] for r in arrived)


def inputs(shape: Program, program: Program, rank: int, action: Action) -> list[Message]:
    """The messages that an action consumes, from the definition of flows."""
    home = shape.segment_ranks
    result: list[Message] = []
    for index, flow in enumerate(program.flows):
        if action.kind is Kind.F and flow.target == action.segment and flow.forward and home[flow.source] != rank:
            result.append(Message("activation", index, action.microbatch))
        if (
            action.kind in (Kind.B, Kind.I)
            and flow.producer == action.segment
            and flow.backward
            and home[flow.target] != rank
        ):
            result.append(Message("gradient", index, action.microbatch))
    return result


@pytest.mark.parametrize("text", ["2F0", "12B34", "0I7", "3W10", "2SA0:5>1", "3RA0:5<0", "3SG1:5>0", "2RG1:5<1"])
def test_actions_read_back(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0:1>2", "2SA0", "2SA0:5<1", "02F0", "2F0 "])
def test_other_texts_are_no_actions(text: str) -> None:
    with pytest.raises(Exception, match="an action is written"):
        Action.parse(text)


def test_a_gradient_tells_that_its_activation_was_received() -> None:
    """1F1B: when rank 0 gets the k-th gradient, rank 1 has begun k + 1 forwards; its activations come without a hint
    of the gradient that the same action waits for, only of those before it."""
    chain = Program(2, (Segment(0, 0), Segment(1, 1)), (Flow(0, 0, 0, 1, 8),))
    schedule = one_f_one_b(chain, 4)
    here = received_before(schedule, [chain] * 4, 0)
    assert here == {Message("gradient", 0, k): k + 1 for k in range(4)}
    there = received_before(schedule, [chain] * 4, 1)
    assert there == {Message("activation", 0, k): max(0, k - 1) for k in range(4)}


def test_messages_without_bytes_are_not_counted() -> None:
    chain = Program(2, (Segment(0, 0), Segment(1, 1)), (Flow(0, 0, 0, 1, 0), Flow(1, 0, 0, 1, 8)))
    assert set(received_before(one_f_one_b(chain, 3), [chain] * 3, 0).values()) == {1, 2, 3}


def test_what_counts_as_received_was_received(seed: int) -> None:
    """On random programs: run the lowered ranks in random order; a message never claims more than has been taken."""
    draw = random.Random(seed)
    for _ in range(30):
        program = random_program(draw)
        count = draw.randint(1, 5)
        schedule = list_schedule(program, count)
        claims = [received_before(schedule, [program] * count, rank) for rank in range(program.size)]
        queues = [list(actions) for actions in lower(schedule, [program] * count).ranks]
        sent: set[tuple[int, int, Message]] = set()
        begun: dict[tuple[int, int], int] = {}  # (receiver, sender) -> messages that actions have waited for
        while any(queues):
            rank = draw.choice([r for r, queue in enumerate(queues) if queue])
            action = queues[rank][0]
            if action.kind.is_message and not action.kind.is_send:
                if (action.peer, rank, message_of(action)) not in sent:
                    continue
                begun[rank, action.peer] = begun.get((rank, action.peer), 0) + (program.flows[action.flow].nbytes > 0)
            elif action.kind.is_send:
                sent.add((rank, action.peer, message_of(action)))
                assert claims[action.peer][message_of(action)] <= begun.get((rank, action.peer), 0)
            queues[rank].pop(0)
