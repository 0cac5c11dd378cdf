"""Schedules drawn to scale, as text for terminals and as SVG for pages.

::

    1f1b: 2 ranks, 3 microbatches, time 12, bubble 25 %
    rank 0 |01··₀₀2₁₁·₂₂|
    rank 1 |·0₀₀1₁₁2₂₂··|
    0-9 forward, ₀-₉ backward of that microbatch (its last digit), · idle; one column = 1
"""

from __future__ import annotations

from html import escape

from smpar.schedule.actions import Kind, Schedule
from smpar.schedule.program import Program, Transfer
from smpar.schedule.simulate import Timed, bubble, makespan, times

_DIGITS = {Kind.F: "0123456789", Kind.B: "₀₁₂₃₄₅₆₇₈₉", Kind.I: "₀₁₂₃₄₅₆₇₈₉", Kind.W: "⁰¹²³⁴⁵⁶⁷⁸⁹"}
_IDLE = "·"


def draw_text(schedule: Schedule, program: Program, width: int = 96, transfer_seconds: Transfer = 0.0) -> str:
    """One line per rank, to scale: each column shows what runs in the middle of its time.

    Args:
        schedule: forwards and backwards, before lowering.
        program: what each microbatch does.
        width: columns for the whole time. An action shorter than a column may be lost.
        transfer_seconds: as for `smpar.schedule.times`.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    timeline = times(schedule, program, transfer_seconds)
    whole = makespan(timeline)
    rows = [[_IDLE] * width for _ in schedule.ranks]
    for timed in timeline:
        digit = _DIGITS[timed.action.kind][timed.action.microbatch % 10]
        for column in range(_column(timed.start, whole, width), _column(timed.end, whole, width)):
            rows[timed.rank][column] = digit
    digits = len(str(len(rows) - 1))
    lines = [f"rank {rank:>{digits}} |{''.join(row)}|" for rank, row in enumerate(rows)]
    legend = "0-9 forward, ₀-₉ backward of that microbatch (its last digit), · idle"
    scale = f"one column = {whole / width:.3g}"
    return "\n".join([title(schedule, timeline), *lines, f"{legend}; {scale}"])


def _column(time: float, whole: float, width: int) -> int:
    """The first column whose middle is not before `time`."""
    # Times are sums of floats: a middle that is later by less than a millionth of a column counts as equal.
    return min(width, max(0, -int(-(time / whole * width - 0.5 - 1e-6) // 1))) if whole else 0


def title(schedule: Schedule, timeline: list[Timed]) -> str:
    """Name, sizes, time and bubble in one line."""
    microbatches = len({timed.action.microbatch for timed in timeline})
    idle = 100 * bubble(timeline, len(schedule.ranks))
    return (
        f"{schedule.name}: {len(schedule.ranks)} ranks, {microbatches} microbatches, "
        f"time {makespan(timeline):.4g}, bubble {idle:.0f} %"
    )


_LEFT, _TOP, _ROW, _GAP = 70, 56, 26, 6


def draw_svg(schedule: Schedule, program: Program, width: int = 1000, transfer_seconds: Transfer = 0.0) -> str:
    """A self-contained SVG: a row per rank, a colour per microbatch, backwards darker, a label where it fits.

    Pointing at an action shows its name and times.

    Args:
        schedule: forwards and backwards, before lowering.
        program: what each microbatch does.
        width: of the time axis, in pixels.
        transfer_seconds: as for `smpar.schedule.times`.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    timeline = times(schedule, program, transfer_seconds)
    whole = makespan(timeline) or 1.0
    bottom = _TOP + len(schedule.ranks) * (_ROW + _GAP)
    head = escape(title(schedule, timeline))
    microbatches = 1 + max((timed.action.microbatch for timed in timeline), default=0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + width + 20} {bottom + 50}" role="img"',
        f'     aria-label="{head}" font-family="sans-serif" font-size="12">',
        f"<title>{head}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{head}</text>',
        f'<text x="{_LEFT}" y="42" fill="#555">light: forward, dark: backward; number and colour: microbatch</text>',
    ]
    for rank in range(len(schedule.ranks)):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_ROW}" fill="#f2f2f2"/>')
    for timed in timeline:
        parts.append(_box(timed, width / whole, microbatches))
    for tick in range(5):
        x = _LEFT + width * tick / 4
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 6}" stroke="#555"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{whole * tick / 4:.4g}</text>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{bottom + 40}" text-anchor="middle">time</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(timed: Timed, scale: float, microbatches: int) -> str:
    action = timed.action
    x, wide = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    y = _TOP + timed.rank * (_ROW + _GAP)
    hue = 360 * action.microbatch // microbatches
    light, ink = (78, "black") if action.kind is Kind.F else (38, "white")
    label = str(action.microbatch)
    box = (
        f"<g><title>{action}: {timed.start:.4g} to {timed.end:.4g}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" fill="hsl({hue},60%,{light}%)" stroke="white"/>'
    )
    if wide >= 8 * len(label) + 4:
        box += f'<text x="{x + wide / 2:.2f}" y="{y + 17}" text-anchor="middle" fill="{ink}">{label}</text>'
    return box + "</g>"
