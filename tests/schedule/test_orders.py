"""Orders are their drawings, and run any program."""

from __future__ import annotations

import ast
import inspect
import random
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpar.errors import ProgramError, ScheduleError, ScheduleNameError
from smpar.schedule import (
    Flow,
    Program,
    Schedule,
    Segment,
    bubble,
    check,
    draw_text,
    fill_drain,
    gpipe,
    list_schedule,
    make_schedule,
    makespan,
    one_f_one_b,
    times,
)
from smpar.schedule import draw as draw_module

from .programs import chain, encoder_decoder, loop, random_program, u_net
from .truth import is_right, must_precede, peaks

GPIPE = """
    rank 0 |0123·········₀₀₁₁₂₂₃₃|
    rank 1 |·0123······₀₀₁₁₂₂₃₃··|
    rank 2 |··0123···₀₀₁₁₂₂₃₃····|
    rank 3 |···0123₀₀₁₁₂₂₃₃······|
"""
ONE_F_ONE_B = """
    rank 0 |0123······₀₀·₁₁·₂₂·₃₃|
    rank 1 |·012····₀₀3₁₁·₂₂·₃₃··|
    rank 2 |··01··₀₀2₁₁3₂₂·₃₃····|
    rank 3 |···0₀₀1₁₁2₂₂3₃₃······|
"""


@pytest.mark.parametrize(("order", "drawing"), [(gpipe, GPIPE), (one_f_one_b, ONE_F_ONE_B)])
def test_chain_orders_are_their_drawings(order: Callable[[Program, int], Schedule], drawing: str) -> None:
    drawing = dedent(drawing).strip()
    assert draw_text(order(chain(4), 4), chain(4), width=21).splitlines()[1:-1] == drawing.splitlines()
    assert drawing in dedent(inspect.getdoc(order) or "").replace("\n    ", "\n"), "the docstring draws another order"


def test_drawing_in_the_docstring_of_draw() -> None:
    drawing = draw_text(one_f_one_b(chain(2), 3), chain(2), width=12)
    assert drawing in dedent((draw_module.__doc__ or "").partition("::\n")[2])


def test_one_f_one_b_by_hand() -> None:
    expected = """
        schedule 1f1b
        rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """
    assert one_f_one_b(chain(2), 3) == Schedule.parse(expected)
    forward_only = one_f_one_b(chain(2).forward_only(), 3)
    assert forward_only == Schedule.parse("schedule 1f1b\nrank 0 | 0F0 0F1 0F2\nrank 1 | 1F0 1F1 1F2")


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "list", "fill_drain"])
def test_bubble_of_equal_stages(name: str, stages: int, microbatches: int) -> None:
    """(S-1)/(M+S-1), GPipe section 2.3."""
    program = chain(stages, 0.3, 0.5)
    timeline = times(make_schedule(name, program, microbatches), program)
    assert bubble(timeline, stages) == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("active", [1, 2, 3, 9, None])
@pytest.mark.parametrize("skip", [False, True])
def test_one_f_one_b_holds_few_microbatches(active: int | None, skip: bool) -> None:
    program = chain(4, skip=skip)
    schedule = one_f_one_b(program, 6, active)
    assert peaks(schedule) == [min(4 - s, active or 6) for s in range(4)]
    check(schedule, [program] * 6, active)


@pytest.mark.parametrize(
    ("program", "microbatches", "optimum", "listed"),
    [
        (chain(4), 8, 33, 33),
        (chain(4, skip=True), 8, 33, 33),
        (u_net(3), 8, 51, 51),
        (encoder_decoder(2), 8, 51, 51),
        (encoder_decoder(4), 16, 105, 106),
        (loop(4, 3), 16, 153, 162),
    ],
)
def test_list_by_hand_numbers(program: Program, microbatches: int, optimum: float, listed: float) -> None:
    """No order beats the busiest rank's work, plus the forwards before and the backwards behind it: 3 per rank above.

    With the default cap list comes near; with all microbatches in flight it gets there, as fill_drain need not.
    """
    busiest = max(range(program.size), key=lambda rank: (len(program.of_rank(rank)), rank))
    assert optimum == 3 * microbatches * len(program.of_rank(busiest)) + 3 * busiest
    assert makespan(times(list_schedule(program, microbatches), program)) == listed
    assert makespan(times(list_schedule(program, microbatches, microbatches), program)) == optimum
    assert makespan(times(fill_drain(program, microbatches), program)) >= optimum


def test_list_finds_the_interleaved_schedule() -> None:
    """Bubble (S-1)/(vM+S-1) with v segments per rank, arXiv 2104.04473 section 2.2, with 8 of 16 in flight."""
    program = loop(4, 3)
    schedule = list_schedule(program, 16, 8)
    check(schedule, [program] * 16, 8)
    assert bubble(times(schedule, program), 4) == pytest.approx(3 / (3 * 16 + 3))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    microbatches=st.integers(1, 7),
    active=st.sampled_from([None, 1, 2, 3, 5]),
    backward=st.booleans(),
)
def test_any_program_runs(seed: int, microbatches: int, active: int | None, backward: bool) -> None:
    program = random_program(random.Random(seed), backward)
    programs = [program] * microbatches
    cap = active or program.stages + 2
    listed = list_schedule(program, microbatches, active, transfer_seconds=seed % 3)
    check(listed, programs, cap)
    assert is_right(listed, programs, cap)
    drained = fill_drain(program, microbatches)
    check(drained, programs)
    assert is_right(drained, programs)
    for actions in drained.ranks:
        kinds = [action.kind.value for action in actions]
        assert kinds == sorted(kinds, reverse=True), "a forward behind a backward"
    for name in ("simple", "gpipe", "1f1b", "interleaved", "list", "fill_drain"):
        schedule = make_schedule(name, program, microbatches, active)
        check(schedule, programs, None if name in ("simple", "gpipe", "fill_drain") else cap)
        assert Schedule.parse(str(schedule)) == schedule


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), microbatches=st.integers(1, 5))
def test_times_keep_every_order(seed: int, microbatches: int) -> None:
    program = random_program(random.Random(seed))
    timeline = times(list_schedule(program, microbatches), program)
    at = {timed.action: timed for timed in timeline}
    for microbatch in range(microbatches):
        for earlier, later in must_precede(program, microbatch):
            assert at[earlier].end <= at[later].start
    for rank in range(program.size):
        mine = [timed for timed in timeline if timed.rank == rank]
        assert all(a.end <= b.start for a, b in pairwise(mine))


def test_transfers_take_time() -> None:
    program = chain(2)
    schedule = gpipe(program, 1)
    assert [(t.start, t.end) for t in times(schedule, program, 0.5)] == [(0, 1), (1.5, 2.5), (2.5, 4.5), (5, 7)]

    def seconds(nbytes: int, sender: int, receiver: int) -> float:
        return nbytes + 10 * sender

    # 8 bytes: 8 from rank 0 to 1, and 18 back.
    assert makespan(times(schedule, program, seconds)) == 1 + 8 + 1 + 2 + 18 + 2


def test_names() -> None:
    assert make_schedule("simple", chain(3), 4).name == make_schedule("gpipe", chain(3), 4).name == "gpipe"
    assert make_schedule("interleaved", chain(3), 4).name == "1f1b"
    assert make_schedule("simple", loop(2, 2), 4).name == "fill_drain"
    for name in ("1f1b", "interleaved", "list"):
        assert make_schedule(name, loop(2, 2), 4).name == "list"
    with pytest.raises(ScheduleNameError, match="interleaved") as caught:
        make_schedule("interleave", chain(3), 4)
    assert caught.value.fix == 'pipeline="interleaved"'


def test_shapes() -> None:
    assert chain(4).is_chain and not chain(4).has_skips
    assert chain(4, skip=True).is_chain and chain(4, skip=True).has_skips
    assert not loop(2, 2).is_chain and not u_net(3).is_chain
    gap = Program(3, (Segment(0, 0), Segment(1, 2)), (Flow(0, 0, 0, 1, 8),))
    assert gap.is_chain and not gap.has_skips
    check(one_f_one_b(gap, 3), [gap] * 3)
    virtual = Program(2, chain(2).segments, chain(2).flows, ranks=(0, 0))
    assert virtual.is_chain and virtual.size == 1 and len(virtual.of_rank(0)) == 2


def test_wrong_sizes_and_programs() -> None:
    with pytest.raises(ScheduleError, match="chains"):
        gpipe(loop(2, 2), 2)
    with pytest.raises(ScheduleError, match="at least one microbatch"):
        list_schedule(chain(2), 0)
    with pytest.raises(ScheduleError, match="active=0"):
        make_schedule("1f1b", chain(2), 2, 0)
    pair = (Segment(0, 0), Segment(1, 1))
    with pytest.raises(ProgramError, match="producer"):
        Program(2, pair, (Flow(0, 1, 1, 0, 8),))
    with pytest.raises(ProgramError, match="before its target"):
        Program(2, (*pair, Segment(2, 0)), (Flow(0, 2, 0, 1, 8),))
    with pytest.raises(ProgramError, match="numbered"):
        Program(2, pair[::-1], ())
    with pytest.raises(ProgramError, match="stage exists"):
        Program(1, pair, ())


def test_the_room_imports_no_torch_and_no_other_room() -> None:
    for path in Path(inspect.getfile(draw_module)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            for name in names:
                own = name == "smpar.errors" or name.startswith("smpar.schedule")
                assert own or name.partition(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_list_is_quick() -> None:
    """4 stages, 16 microbatches, 12 segments in under 20 ms of this thread's time, best of five."""
    program = loop(4, 3)
    spent = []
    for _ in range(5):
        start = time.thread_time()
        list_schedule(program, 16)
        spent.append(time.thread_time() - start)
    assert min(spent) < 0.020
