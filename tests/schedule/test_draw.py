"""Drawings are to scale and say what they show."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from smpar.errors import ScheduleError
from smpar.schedule import Action, Kind, Schedule, draw_svg, draw_text, list_schedule, times

from .programs import chain, random_program


def test_text_columns_are_proportional_to_time() -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    program = chain(3, rng.uniform(0.5, 2), rng.uniform(0.5, 4))
    schedule = list_schedule(program, 5)
    timeline = times(schedule, program)
    whole = max(timed.end for timed in timeline)
    lines = draw_text(schedule, program, width=400).splitlines()
    assert lines[0].startswith("list: 3 ranks, 5 microbatches, time ")
    for rank in range(3):
        row = lines[1 + rank].partition("|")[2][:-1]
        assert len(row) == 400
        for digit, kind in (("3", Kind.F), ("₃", Kind.B)):
            spent = sum(t.end - t.start for t in timeline if t.rank == rank and t.action.kind is kind) / 5
            assert row.count(digit) == pytest.approx(400 * spent / whole, abs=1.01)


def test_svg_shows_every_action_once() -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    program = random_program(random.Random(seed))
    schedule = list_schedule(program, 3)
    root = ET.fromstring(draw_svg(schedule, program))
    space = "{http://www.w3.org/2000/svg}"
    titles = [group.findtext(f"{space}title", "").split(":")[0] for group in root.iter(f"{space}g")]
    assert sorted(titles) == sorted(str(action) for _, _, action in schedule)
    assert root.findtext(f"{space}title", "").startswith("list: ")


def test_a_schedule_that_cannot_run_is_not_drawn() -> None:
    broken = Schedule("s", ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)),))
    with pytest.raises(ScheduleError, match=">0B0<"):
        draw_text(broken, chain(1))


def test_long_tables_show_the_neighbourhood_of_a_mark() -> None:
    schedule = list_schedule(chain(2), 20)
    lines = schedule.table([(1, 20)], around=2).splitlines()
    assert lines[2].split("|")[1].split()[0] == "..." and lines[2].split()[-1] == "..."
    assert f">{schedule.ranks[1][20]}<" in lines[2] and len(lines[2].split()) == 3 + 2 + 5


def test_table_reads_back_or_says_why() -> None:
    assert Schedule.parse(str(Schedule("", ((), ())))) == Schedule("", ((), ()))
    for text in ("", "rank 0 | 0F0", "schedule s\nrank 1 | 0F0", "schedule s\nrank 0 0F0", "schedule s\nrank 0 | 0Q0"):
        with pytest.raises(ScheduleError):
            Schedule.parse(text)
