"""Several stages per rank: where they lie, and the orders made for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smpar.errors import ProgramError, ScheduleError, ScheduleNameError
from smpar.schedule import (
    Flow,
    Program,
    Segment,
    bubble,
    check,
    gpipe,
    interleaved_1f1b,
    lower,
    make_schedule,
    makespan,
    memory,
    one_f_one_b,
    placement,
    times,
    virtual_stages_of,
    zbv,
    zero_bubble,
)

from .programs import as_on_cpus, chain, split_chain
from .truth import is_right, peaks


def test_stages_lie_in_a_loop_or_in_a_vee() -> None:
    assert placement("interleaved_1f1b", 3) == (0, 1, 2, 0, 1, 2)
    assert placement("interleaved_1f1b", 2, 4) == (0, 1, 0, 1, 0, 1, 0, 1)
    assert placement("zbv", 3) == (0, 1, 2, 2, 1, 0)
    for name in ("simple", "gpipe", "1f1b", "interleaved", "zb", "list"):
        assert placement(name, 3) == (0, 1, 2)
        assert placement(name, 2, 2) == (0, 1, 0, 1)


def test_number_of_stages_per_rank() -> None:
    assert [virtual_stages_of(name) for name in ("interleaved_1f1b", "zbv", "zb", "gpipe")] == [2, 2, 1, 1]
    assert virtual_stages_of("interleaved_1f1b", 4) == 4 and virtual_stages_of("zb", 3) == 3
    for asked in (1, 3, 4):
        with pytest.raises(ScheduleError, match="zbv has 2 stages") as caught:
            virtual_stages_of("zbv", asked)
        assert "virtual_stages=2" in caught.value.fix
    with pytest.raises(ScheduleError, match="at least one stage"):
        virtual_stages_of("gpipe", -1)
    with pytest.raises(ScheduleError, match="at least one rank"):
        placement("gpipe", 0)
    with pytest.raises(ScheduleNameError, match="zbv"):
        placement("zbw", 2)


def test_a_tensor_leaves_from_where_its_rank_is() -> None:
    """Made in stage 0, used by stage 3 on the other rank: sent when rank 0 has come to stage 2."""
    loop = split_chain("interleaved_1f1b", 2)
    skip = Program(4, loop.segments, (*loop.flows, Flow(9, 2, 0, 3, 8)), ranks=loop.ranks)
    assert skip.is_chain and skip.has_skips
    schedule = interleaved_1f1b(skip, 3)
    check(schedule, [skip] * 3)
    sends = [str(action) for action in lower(schedule, [skip] * 3).ranks[0] if action.kind.is_send]
    assert "2SA0:3>1" in sends and "0SA0:3>1" not in sends
    with pytest.raises(ProgramError, match="producer's rank"):
        Program(4, loop.segments, (*loop.flows, Flow(9, 1, 0, 3, 8)), ranks=loop.ranks)


def test_no_message_between_stages_of_one_rank() -> None:
    vee = split_chain("zbv", 2)
    full = lower(zbv(vee, 2), [vee] * 2)
    flows = {action.flow for _, _, action in full if action.kind.is_message}
    assert flows == {0, 2}, "stages 1 and 2 are both on rank 1"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb", "zbv", "list", "fill_drain"])
def test_all_sizes(name: str, seed: int) -> None:
    """1 to 17 microbatches, 1 to 5 ranks, 1, 2 and 4 stages per rank, uneven times: the named order where it fits."""
    rng = random.Random(seed)
    for virtual in (1, 2, 4) if name != "zbv" else (2,):
        for microbatches in range(1, 18):
            for size in (2, rng.choice([1, 3, 4, 5])):
                each = (rng.uniform(0.5, 2), rng.uniform(0.5, 2), rng.uniform(0, 2))
                program = as_on_cpus(split_chain(name, size, virtual, each))
                schedule = make_schedule(name, program, microbatches)
                check(schedule, [program] * microbatches)
                own = name in ("interleaved_1f1b", "zbv", "list", "fill_drain") or virtual == 1
                assert schedule.name == (name if own else "fill_drain" if name == "gpipe" else "list")
                forward_only = program.forward_only()
                check(make_schedule(name, forward_only, microbatches), [forward_only] * microbatches)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb", "zbv"])
def test_a_second_definition_agrees(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        program = split_chain(name, rng.randint(1, 4), 0, (1, rng.uniform(0.5, 2), rng.uniform(0, 2)))
        microbatches = rng.randint(1, 9)
        assert is_right(make_schedule(name, program, microbatches), [program] * microbatches)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_bubble_of_interleaved(size: int, virtual: int) -> None:
    """1/v of 1F1B's idle time, arXiv 2104.04473 section 2.2, also where ranks do not divide the microbatches."""
    program = split_chain("interleaved_1f1b", size, virtual)
    for microbatches in range(size, 18):
        idle = bubble(times(interleaved_1f1b(program, microbatches), program), size)
        assert idle == pytest.approx((size - 1) / (virtual * microbatches + size - 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_interleaved_over_one_stage_per_rank_is_at_least_as_fast_as_1f1b(size: int) -> None:
    program = split_chain("interleaved_1f1b", size, 1)
    for microbatches in (1, 3, 8):
        ends = [makespan(times(order(program, microbatches), program)) for order in (interleaved_1f1b, one_f_one_b)]
        assert ends[0] <= ends[1]


@pytest.mark.parametrize(("size", "virtual"), [(2, 2), (4, 2), (3, 4)])
def test_memory_of_interleaved(size: int, virtual: int) -> None:
    program = split_chain("interleaved_1f1b", size, virtual)
    microbatches = 4 * size
    ahead = [2 * (size - 1 - rank) + (virtual - 1) * size + 1 for rank in range(size)]
    assert list(memory(interleaved_1f1b(program, microbatches), program)) == ahead


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb", "zbv", "1f1b"])
def test_a_cap_that_is_too_low_for_the_order_holds(name: str) -> None:
    program = split_chain(name, 4)
    need = max(peaks(make_schedule(name, program, 12)))
    assert make_schedule(name, program, 12, need) == make_schedule(name, program, 12)
    for active in range(1, need):
        schedule = make_schedule(name, program, 12, active)
        check(schedule, [program] * 12, active)
        assert schedule.name == ("1f1b" if name == "1f1b" else "list")


def test_programs_that_an_order_does_not_fit() -> None:
    loop, vee = split_chain("interleaved_1f1b", 2), split_chain("zbv", 2)
    gap = Program(4, loop.segments[:3], loop.flows[:2], ranks=loop.ranks)
    for order, fitting, others in (
        (interleaved_1f1b, loop, (vee, gap)),
        (zbv, vee, (loop, gap, chain(4))),
        (zero_bubble, chain(3), (loop, vee)),
        (gpipe, chain(3), (loop, vee)),
        (one_f_one_b, chain(3), (loop, vee)),
    ):
        order(fitting, 2)
        for other in others:
            with pytest.raises(ScheduleError, match="orders chains"):
                order(other, 2)
    for name in ("interleaved_1f1b", "zb", "zbv"):
        schedule = make_schedule(name, gap, 5)
        assert schedule.name == "list"
        check(schedule, [gap] * 5, 2 + 2)


def test_ranks_in_any_order() -> None:
    """A chain may run over the ranks in any order, and leave some out."""
    program = replace(split_chain("zb", 3), stages=4, ranks=(2, 0, 3, 1))
    schedule = zero_bubble(program, 5)
    check(schedule, [program] * 5)
    assert [len(actions) for actions in schedule.ranks] == [15, 0, 15, 15]
    straight = split_chain("zb", 3)
    assert makespan(times(schedule, program)) == makespan(times(zero_bubble(straight, 5), straight))


def test_a_segment_may_follow_on_its_own_rank() -> None:
    whole = Program(2, (Segment(0, 0), Segment(1, 1)), (Flow(0, 0, 0, 1, 8),), ranks=(0, 0))
    schedule = interleaved_1f1b(whole, 2)
    assert " ".join(map(str, schedule.ranks[0])) == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"
