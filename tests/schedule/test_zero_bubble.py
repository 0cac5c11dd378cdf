"""Split backwards: less idle time, within the memory promised."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpar.schedule import (
    Kind,
    Program,
    Schedule,
    check,
    list_schedule,
    lower,
    make_schedule,
    makespan,
    memory,
    one_f_one_b,
    split_schedule,
    times,
    zbv,
    zero_bubble,
)

from .programs import as_on_cpus, encoder_decoder, loop, split_chain, timed, u_net
from .truth import peaks


def end(schedule: Schedule, program: Program) -> float:
    return makespan(times(schedule, program))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_idle_time_of_zb(size: int, seed: int) -> None:
    """(p-1)(F+I-W) per rank at most, arXiv 2401.10241 section 2.3, where W is no longer than F and I."""
    rng = random.Random(seed)
    for _ in range(10):
        forward = rng.uniform(0.5, 2)
        inputs = forward * rng.uniform(0.7, 1.5)
        weights = rng.uniform(0.3, 1) * min(forward, inputs)
        program = split_chain("zb", size, 1, (forward, inputs, weights))
        microbatches = rng.randint(size, 12)
        idle = end(zero_bubble(program, microbatches), program) - microbatches * (forward + inputs + weights)
        assert idle <= (size - 1) * (forward + inputs - weights) + 1e-6
        assert idle >= -1e-6


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8])
def test_idle_time_of_zbv(size: int) -> None:
    """With F = I = W no more than the ramp, (p-1) F, which the last rank waits for its first forward."""
    program = split_chain("zbv", size)
    for microbatches in (2 * size - 1, 2 * size, 4 * size + 3):
        assert end(zbv(program, microbatches), program) == 6 * microbatches + size - 1


@pytest.mark.parametrize("microbatches", [4, 8])
def test_no_bubble_between_ramps_of_zbv_on_two_ranks(microbatches: int) -> None:
    program = split_chain("zbv", 2)
    timeline = times(zbv(program, microbatches), program)
    for rank in range(2):
        mine = [t for t in timeline if t.rank == rank]
        assert sum(t.end - t.start for t in mine) == 6 * microbatches
        last = [t for t in mine if t.action.kind is Kind.F][-1]
        before = [t for t in mine if t.start < last.start]
        idle = last.start - mine[0].start - sum(t.end - t.start for t in before)
        assert idle <= 1, "beyond the ramp's one unit"


@pytest.mark.parametrize("head", [1.0, 1.2, 1.4, 2.0])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_two_ranks_with_the_times_of_real_models(head: float, microbatches: int) -> None:
    """A heavier last segment and an unsplit first one: within one unit of the busiest rank's work, before 1F1B."""
    chain = as_on_cpus(split_chain("zb", 2), head)
    work = 3 * head * microbatches
    assert end(zero_bubble(chain, microbatches), chain) == pytest.approx(work + 1)
    assert end(one_f_one_b(chain, microbatches), chain) == pytest.approx(work + 3)
    vee = as_on_cpus(split_chain("zbv", 2), head)
    assert end(zbv(vee, microbatches), vee) <= 3 * (1 + head) * microbatches + 1 + 1e-6


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_memory_promises(size: int, seed: int) -> None:
    """No rank holds more than p microbatches, 1F1B's most, whatever the times and sizes."""
    rng = random.Random(seed)
    for _ in range(10):
        each = (rng.uniform(0.1, 2), rng.uniform(0.1, 2), rng.uniform(0, 2))
        microbatches = rng.randint(1, 12)
        chain = as_on_cpus(split_chain("zb", size, 1, each), rng.uniform(1, 3))
        schedule = zero_bubble(chain, microbatches)
        assert max(memory(schedule, chain)) == max(peaks(schedule)) <= size
        vee = as_on_cpus(split_chain("zbv", size, 2, each), rng.uniform(1, 3))
        assert max(memory(zbv(vee, microbatches), vee)) <= 2 * size
        uneven = sized(vee, [rng.randint(0, 9) for _ in vee.segments])
        held = memory(zbv(uneven, microbatches), uneven)
        for rank in range(size):
            whole = sum(segment.saved for segment in uneven.of_rank(rank))
            assert held[rank] <= size * whole or not any(segment.saved for segment in uneven.segments)


def sized(program: Program, saved: list[int]) -> Program:
    segments = tuple(replace(segment, saved=n) for segment, n in zip(program.segments, saved, strict=True))
    return replace(program, segments=segments)


@pytest.mark.parametrize("name", ["zb", "zbv"])
def test_only_what_can_be_split_is_split(name: str) -> None:
    program = as_on_cpus(split_chain(name, 3))
    kinds = {(action.segment, action.kind) for _, _, action in make_schedule(name, program, 5)}
    assert {kind for segment, kind in kinds if segment == 0} == {Kind.F, Kind.B}
    for segment in range(1, program.stages):
        assert {kind for s, kind in kinds if s == segment} == {Kind.F, Kind.I, Kind.W}
    none = split_chain("zb", 3, 1, (1, 2, 0))
    assert end(zero_bubble(none, 6), none) == end(one_f_one_b(none, 6), none)


def test_messages_of_a_split_backward_by_hand() -> None:
    program = split_chain("zb", 2)
    text = "schedule s\nrank 0 | 0F0 0I0 0W0\nrank 1 | 1F0 1I0 1W0"
    expected = """
        schedule s
        rank 0 | 0F0 0SA0:0>1 0RG0:0<1 0I0 0W0
        rank 1 | 1RA0:0<0 1F0 1I0 1SG0:0>0 1W0
    """
    assert lower(Schedule.parse(text), [program]) == Schedule.parse(expected)


@pytest.mark.parametrize(
    ("program", "microbatches", "busiest"),
    [(loop(2, 2), 8, 48), (loop(4, 2), 8, 48), (encoder_decoder(4), 8, 48), (u_net(3), 8, 48)],
)
def test_list_with_split_backwards_idles_little(program: Program, microbatches: int, busiest: float) -> None:
    """With F = I = W one F per rank before the last; whole backwards idle longer."""
    program = timed(program, [1.0] * len(program.segments))
    cap = program.size + 2
    whole, parted = list_schedule(program, microbatches), split_schedule(program, microbatches)
    check(parted, [program] * microbatches, cap)
    assert end(parted, program) <= busiest + program.size - 1
    assert end(whole, program) >= busiest + 3


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), active=st.integers(1, 5))
def test_split_lists_are_about_as_fast_at_least(seed: int, active: int) -> None:
    """Splitting is taken only where it gains."""
    rng = random.Random(seed)
    program = rng.choice([loop(2, 2), encoder_decoder(3), u_net(3)])
    program = timed(program, [rng.uniform(0.1, 2) for _ in program.segments])
    microbatches = rng.randint(1, 8)
    whole, parted = (order(program, microbatches, active) for order in (list_schedule, split_schedule))
    assert end(parted, program) <= end(whole, program) * 1.01 + 1e-9
