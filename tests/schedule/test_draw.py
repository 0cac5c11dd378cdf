"""Drawings are to scale and say what they show."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from smpar.errors import ScheduleError
from smpar.schedule import (
    Action,
    Kind,
    Schedule,
    draw_svg,
    draw_text,
    gpipe,
    list_schedule,
    make_schedule,
    memory,
    times,
    zero_bubble,
)

from .programs import chain, random_program, split_chain

SVG = "{http://www.w3.org/2000/svg}"


def test_text_columns_are_proportional_to_time(seed: int) -> None:
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


@pytest.mark.parametrize("name", ["list", "zb"])
def test_svg_shows_every_action_once_and_weights_hatched(name: str, seed: int) -> None:
    program = random_program(random.Random(seed))
    schedule = make_schedule(name, program, 3)
    root = ET.fromstring(draw_svg(schedule, program))
    titles = [group.findtext(f"{SVG}title", "").split(":")[0] for group in root.iter(f"{SVG}g")]
    assert sorted(titles) == sorted(str(action) for _, _, action in schedule)
    assert root.findtext(f"{SVG}title", "").startswith(f"{schedule.name}: ")
    hatched = [
        group.findtext(f"{SVG}title", "").split(":")[0]
        for group in root.iter(f"{SVG}g")
        if any(box.get("fill") == "url(#weights)" for box in group.iter(f"{SVG}rect"))
    ]
    assert sorted(hatched) == sorted(str(a) for _, _, a in schedule if a.kind is Kind.W)


def test_split_backwards_are_told_apart_in_text() -> None:
    """4 of each digit are forwards, backwards of inputs and of weights, one column each on two ranks."""
    program = split_chain("zb", 2)
    text = draw_text(zero_bubble(program, 3), program, width=10)
    rows = "".join(line.partition("|")[2] for line in text.splitlines() if line.startswith("rank"))
    for digits in ("012", "₀₁₂", "⁰¹²"):
        assert all(rows.count(digit) == 2 for digit in digits)
    assert "⁰-⁹ of weights" in text and "⁰-⁹" not in draw_text(gpipe(program, 3), program)


def test_memory_lines_are_to_scale(seed: int) -> None:
    """Of one rank's peak of 8 units, 3 are 3 eighths of a block; the other rank's in the same scale."""
    size = random.Random(seed).randint(1, 2**20)
    first, second = (replace(s, saved=n * size) for s, n in zip(chain(2).segments, (4, 1), strict=True))
    program = replace(chain(2), segments=(first, second))
    lines = draw_text(gpipe(program, 2), program, width=9).splitlines()
    unit = f"{size * 8} bytes" if size * 8 < 1024 else f"{size * 8 / 2**20:.3g} MiB"
    assert lines[1:3] == ["rank 0 |01···₀₀₁₁|", "rank 1 |·01₀₀₁₁··|"]
    assert lines[3].startswith("held 0 |▄██████▄▄| peak ")
    assert lines[4].startswith("held 1 | ▁▂▂▂▁▁  | peak ")
    if size >= 2**17:
        assert lines[3].endswith(unit)


def test_memory_curves_of_an_svg_are_to_scale(seed: int) -> None:
    """Of programs whose segments take time: what is held for no time has no place on a time axis."""
    program = random_program(random.Random(seed))
    lasting = tuple(replace(s, forward=s.forward + 1, backward=s.backward + 1) for s in program.segments)
    program = replace(program, segments=lasting)
    schedule = make_schedule("zb", program, 4)
    root = ET.fromstring(draw_svg(schedule, program, width=1000))
    paths = list(root.iter(f"{SVG}path"))
    peaks = memory(schedule, program)
    assert len(paths) == program.size
    for path, peak in zip(paths, peaks, strict=True):
        ys = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path.get("d", ""))]
        assert max(ys) - min(ys) == pytest.approx(26 * peak / max(peaks), abs=0.02)
    labels = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert sum(label.startswith("peak ") for label in labels) == program.size


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


def test_measured_times_are_drawn_as_they_were(seed: int) -> None:
    rng = random.Random(seed)
    program, late = chain(2), rng.uniform(1, 5)
    schedule = make_schedule("1f1b", program, 3)
    measured = [timed._replace(start=timed.start + late, end=timed.end + late) for timed in times(schedule, program)]
    whole = measured[-1].end
    row = draw_text(schedule, program, width=1000, timeline=measured).splitlines()[1]
    assert row.index("0", len("rank 0 |")) - len("rank 0 |") == pytest.approx(1000 * late / whole, abs=1)
    boxes = ET.fromstring(draw_svg(schedule, program, timeline=measured)).iter(f"{SVG}title")
    assert f"0F0: {late:.4g} to {late + 1:.4g}" in {box.text for box in boxes}
