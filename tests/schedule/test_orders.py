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
    interleaved_1f1b,
    list_schedule,
    make_schedule,
    makespan,
    one_f_one_b,
    split_schedule,
    times,
    zbv,
    zero_bubble,
)
from smpar.schedule import draw as draw_module

from .programs import as_on_cpus, chain, encoder_decoder, loop, random_program, split_chain, timed, u_net
from .truth import is_right, must_precede, peaks

NAMES = ("simple", "gpipe", "1f1b", "interleaved", "interleaved_1f1b", "zb", "zbv", "list", "fill_drain")
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


INTERLEAVED = """
    rank 0 |01012·₀₀3₁₁2₀₀3₁₁·₂₂·₃₃₂₂₃₃|
    rank 1 |·010₀₀1₁₁2₀₀3₁₁2₂₂3₃₃₂₂₃₃··|
"""
ZERO_BUBBLE = """
    rank 0 |0123···₀⁰4₁¹5₂²₃³₄⁴₅⁵|
    rank 1 |·012··₀3₁⁰4₂¹5₃²₄³₅⁴⁵|
    rank 2 |··01·₀2₁3₂⁰4₃¹5₄²₅³⁴⁵|
    rank 3 |···0₀1₁2₂3₃⁰4₄¹5₅²³⁴⁵|
"""
ZBV = """
    rank 0 |0120₀⁰1₁₀¹⁰3₁¹2₂²3₃₂³²₃³·|
    rank 1 |·0011₀₀⁰₁₁⁰22¹¹33₂₂²₃₃²³³|
"""


@pytest.mark.parametrize(
    ("order", "program", "microbatches", "drawing"),
    [
        (gpipe, chain(4), 4, GPIPE),
        (one_f_one_b, chain(4), 4, ONE_F_ONE_B),
        (interleaved_1f1b, split_chain("interleaved_1f1b", 2), 4, INTERLEAVED),
        (zero_bubble, split_chain("zb", 4), 6, ZERO_BUBBLE),
        (zbv, split_chain("zbv", 2), 4, ZBV),
    ],
)
def test_orders_are_their_drawings(
    order: Callable[[Program, int], Schedule], program: Program, microbatches: int, drawing: str
) -> None:
    drawing = dedent(drawing).strip()
    rows = drawing.splitlines()
    width = rows[0].rindex("|") - rows[0].index("|") - 1
    drawn = draw_text(order(program, microbatches), program, width).splitlines()
    assert drawn[1 : 1 + len(rows)] == rows
    assert drawn[-1].endswith("one column = 1")
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


@pytest.mark.parametrize(
    ("program", "microbatches", "drained", "listed", "parted"),
    [
        # Encoder parts of 3 2 2 2, decoder parts of 3 3 3 5 on four ranks; of 3 2 and 3 5 on two.
        (timed(encoder_decoder(4), [3, 2, 2, 2, 3, 3, 3, 5]), 6, 171, 163, 138),
        (timed(encoder_decoder(4), [3, 2, 2, 2, 3, 3, 3, 5]), 16, 381, 377, 348),
        (timed(encoder_decoder(2), [3, 2, 3, 4]), 8, 160, 159, 149),
        # A U over three ranks: the last one has its widest level, or the middle of equal ones.
        (timed(u_net(3), [1, 1, 2, 1, 1]), 8, 60, 54, 50),
        (timed(u_net(3), [1, 1, 1, 1, 1]), 16, 102, 99, 97),
    ],
)
def test_list_uses_times_and_beats_fill_drain(
    program: Program, microbatches: int, drained: float, listed: float, parted: float
) -> None:
    """With at most ranks + 2 microbatches in flight, where fill_drain keeps all; with split backwards even more so."""
    assert listed < drained
    cap = program.size + 2
    for schedule, figure in (
        (fill_drain(program, microbatches), drained),
        (list_schedule(program, microbatches), listed),
        (split_schedule(program, microbatches), parted),
    ):
        check(schedule, [program] * microbatches, None if figure == drained else cap)
        assert makespan(times(schedule, program)) == figure


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
    cap = active or program.size + 2
    listed = list_schedule(program, microbatches, active, transfer_seconds=seed % 3)
    check(listed, programs, cap)
    assert is_right(listed, programs, cap)
    drained = fill_drain(program, microbatches)
    check(drained, programs)
    assert is_right(drained, programs)
    for actions in drained.ranks:
        kinds = [action.kind.value for action in actions]
        assert kinds == sorted(kinds, reverse=True), "a forward behind a backward"
    parted = split_schedule(program, microbatches, active, transfer_seconds=seed % 3)
    check(parted, programs, cap)
    assert is_right(parted, programs, cap)
    for name in random.Random(seed).sample(NAMES, 4):
        schedule = make_schedule(name, program, microbatches, active, transfer_seconds=seed % 3)
        check(schedule, programs, active if name not in ("simple", "gpipe", "fill_drain") else None)
        assert is_right(schedule, programs)
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", ["list", "zb", "zbv"])
def test_orders_that_know_how_long_messages_take_are_faster(name: str, seed: int) -> None:
    """Than those that take them for nothing: all in all, and hardly ever one is slower."""
    rng = random.Random(seed)
    told, untold = 0.0, 0.0
    for _ in range(30):
        size, microbatches, message = rng.randint(2, 4), rng.randint(2, 8), rng.uniform(0.3, 1.5)
        program = random_program(rng) if name == "list" else split_chain(name, size)
        by_flow = {nbytes: message for nbytes in {flow.nbytes for flow in program.flows}}
        schedules = [
            make_schedule(name, program, microbatches, transfer_seconds=message),
            make_schedule(name, program, microbatches),
        ]
        asked = make_schedule(name, program, microbatches, transfer_seconds=lambda n, a, b, of=by_flow: of[n])
        assert asked == schedules[0]
        assert make_schedule(name, program, microbatches, transfer_seconds=0.0) == schedules[1]
        ends = [makespan(times(schedule, program, message)) for schedule in schedules]
        told, untold = told + ends[0], untold + ends[1]
        assert ends[0] <= ends[1] * (1.1 if name == "list" else 1 + 1e-5)
    assert told < untold


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), microbatches=st.integers(1, 5), name=st.sampled_from(["list", "zb"]))
def test_times_keep_every_order(seed: int, microbatches: int, name: str) -> None:
    program = random_program(random.Random(seed))
    timeline = times(make_schedule(name, program, microbatches), program)
    at = {timed.action: timed for timed in timeline}
    for microbatch in range(microbatches):
        for earlier, later in must_precede(program, microbatch, at):
            assert at[earlier].end <= at[later].start
    spent = sum(timed.end - timed.start for timed in timeline)
    assert spent == pytest.approx(microbatches * sum(s.forward + s.backward for s in program.segments))
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
    for name in ("1f1b", "interleaved", "interleaved_1f1b", "zb", "zbv", "list"):
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
    with pytest.raises(ProgramError, match="inside the backward"):
        Program(1, (Segment(0, 0, 1, 1, 1.5),), ())
    with pytest.raises(ProgramError, match="numbered"):
        Program(2, pair[::-1], ())
    with pytest.raises(ProgramError, match="stage exists"):
        Program(1, pair, ())


def test_the_room_imports_no_torch_and_only_the_plainest_rooms() -> None:
    for path in Path(inspect.getfile(draw_module)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            for name in names:
                own = name in ("smpar.errors", "smpar.config") or name.startswith("smpar.schedule")
                assert own or name.partition(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"


def quickest(order: Callable[[], object]) -> float:
    """Seconds of this thread's time, best of five."""
    spent = []
    for _ in range(5):
        start = time.thread_time()
        order()
        spent.append(time.thread_time() - start)
    return min(spent)


def test_list_is_quick() -> None:
    """4 stages, 16 microbatches, 12 segments in under 20 ms."""
    assert quickest(lambda: list_schedule(loop(4, 3), 16)) < 0.020


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_quick(name: str) -> None:
    """4 ranks, two stages each, 16 microbatches, uneven times, in under 50 ms."""
    program = as_on_cpus(split_chain(name, 4, 2))
    assert quickest(lambda: make_schedule(name, program, 16)) < 0.050
