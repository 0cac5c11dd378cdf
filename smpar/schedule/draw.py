"""Schedules drawn to scale, as text for terminals and as SVG for pages; below, the memory that each rank holds.

Where backwards are split, a lowered digit is one of inputs, a raised one (⁰-⁹) one of weights.

::

    1f1b: 2 ranks, 3 microbatches, time 12, bubble 25 %
    rank 0 |01··₀₀2₁₁·₂₂|
    rank 1 |·0₀₀1₁₁2₂₂··|
    held 0 |▄████████▄▄▄| peak 2 microbatch-segments
    held 1 | ▄▄▄▄▄▄▄▄▄  | peak 1 microbatch-segments
    0-9 forward, ₀-₉ backward of that microbatch (its last digit), · idle; one column = 1
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from smpar.schedule.actions import Kind, Schedule
from smpar.schedule.memory import Step, counts_segments, held, memory
from smpar.schedule.program import Program, Transfer
from smpar.schedule.simulate import Timed, bubble, makespan, times

_LOWERED, _RAISED = "₀₁₂₃₄₅₆₇₈₉", "⁰¹²³⁴⁵⁶⁷⁸⁹"
_DIGITS = {Kind.F: "0123456789", Kind.B: _LOWERED, Kind.I: _LOWERED, Kind.W: _RAISED}
_BLOCKS = " ▁▂▃▄▅▆▇█"
_IDLE = "·"


def draw_text(
    schedule: Schedule,
    program: Program,
    width: int = 96,
    transfer_seconds: Transfer = 0.0,
    timeline: Sequence[Timed] = (),
) -> str:
    """A line per rank, to scale: each column shows what runs in the middle of its time. Below, a line of held memory.

    Memory is that of `smpar.schedule.memory`, all ranks in one scale.

    Args:
        schedule: forwards and backwards, before lowering.
        program: what each microbatch does.
        width: columns for the whole time. An action shorter than a column may be lost.
        transfer_seconds: as for `smpar.schedule.times`.
        timeline: all actions with times from elsewhere, as measured ones, by start; empty: those of
            `smpar.schedule.times`.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    timeline = timeline or times(schedule, program, transfer_seconds)
    whole = makespan(timeline)
    rows = [[_IDLE] * width for _ in schedule.ranks]
    for timed in timeline:
        digit = _DIGITS[timed.action.kind][timed.action.microbatch % 10]
        for column in range(_column(timed.start, whole, width), _column(timed.end, whole, width)):
            rows[timed.rank][column] = digit
    digits = len(str(len(rows) - 1))
    lines = [f"rank {rank:>{digits}} |{''.join(row)}|" for rank, row in enumerate(rows)]
    peaks = memory(schedule, program)
    for rank, curve in enumerate(held(timeline, program)):
        blocks = "".join(_blocks(curve, whole, width, max(peaks)))
        lines.append(f"held {rank:>{digits}} |{blocks}| peak {_amount(peaks[rank], program)}")
    backward = "₀-₉ backward of inputs, ⁰-⁹ of weights" if _is_split(schedule) else "₀-₉ backward"
    legend = f"0-9 forward, {backward} of that microbatch (its last digit), · idle"
    scale = f"one column = {whole / width:.3g}"
    return "\n".join([title(schedule, timeline), *lines, f"{legend}; {scale}"])


def _blocks(curve: Sequence[Step], whole: float, width: int, most: int) -> list[str]:
    """A column's block is as high as what is held in the middle of its time; what is held shows, if little."""
    row = [_BLOCKS[0]] * width
    for step, following in zip(curve, [*curve[1:], Step(whole, 0)], strict=True):
        block = _BLOCKS[-(-step.held * (len(_BLOCKS) - 1) // max(1, most))]
        for column in range(_column(step.time, whole, width), _column(following.time, whole, width)):
            row[column] = block
    return row


def _amount(amount: int, program: Program) -> str:
    if counts_segments(program):
        return f"{amount} microbatch-segments"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount} bytes"


def _is_split(schedule: Schedule) -> bool:
    return any(action.kind is Kind.W for _, _, action in schedule)


def _column(time: float, whole: float, width: int) -> int:
    """The first column whose middle is not before `time`."""
    # Times are sums of floats: a middle that is later by less than a millionth of a column counts as equal.
    return min(width, max(0, -int(-(time / whole * width - 0.5 - 1e-6) // 1))) if whole else 0


def title(schedule: Schedule, timeline: Sequence[Timed]) -> str:
    """Name, sizes, time and bubble in one line."""
    microbatches = len({timed.action.microbatch for timed in timeline})
    idle = 100 * bubble(timeline, len(schedule.ranks))
    return (
        f"{schedule.name}: {len(schedule.ranks)} ranks, {microbatches} microbatches, "
        f"time {makespan(timeline):.4g}, bubble {idle:.0f} %"
    )


_LEFT, _RIGHT, _TOP, _ROW, _GAP = 70, 190, 56, 26, 6


def draw_svg(
    schedule: Schedule,
    program: Program,
    width: int = 1000,
    transfer_seconds: Transfer = 0.0,
    timeline: Sequence[Timed] = (),
) -> str:
    """A self-contained SVG: a row per rank, a colour per microbatch, backwards darker, a label where it fits.

    Backwards of weights are hatched. Below, on the same time axis, a curve per rank of the memory that it holds, all in
    one scale, with its peak (as for `smpar.schedule.memory`). Pointing at an action shows its name and times.

    Args:
        schedule: forwards and backwards, before lowering.
        program: what each microbatch does.
        width: of the time axis, in pixels.
        transfer_seconds: as for `smpar.schedule.times`.
        timeline: all actions with times from elsewhere, as measured ones, by start; empty: those of
            `smpar.schedule.times`.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    timeline = timeline or times(schedule, program, transfer_seconds)
    whole = makespan(timeline) or 1.0
    middle = _TOP + len(schedule.ranks) * (_ROW + _GAP)
    bottom = middle + len(schedule.ranks) * (_ROW + _GAP) + _GAP
    head = escape(title(schedule, timeline))
    microbatches = 1 + max((timed.action.microbatch for timed in timeline), default=0)
    backward = "dark: backward of inputs, hatched: of weights" if _is_split(schedule) else "dark: backward"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + width + _RIGHT} {bottom + 50}" role="img"',
        f'     aria-label="{head}" font-family="sans-serif" font-size="12">',
        f"<title>{head}</title>",
        '<defs><pattern id="weights" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="white" stroke-width="3" stroke-opacity="0.45"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{head}</text>',
        f'<text x="{_LEFT}" y="42" fill="#555">light: forward, {backward}; number and colour: microbatch; '
        "below: memory held</text>",
    ]
    for rank in range(len(schedule.ranks)):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_ROW}" fill="#f2f2f2"/>')
    for timed in timeline:
        parts.append(_box(timed, width / whole, microbatches))
    peaks = memory(schedule, program)
    for rank, curve in enumerate(held(timeline, program)):
        y = middle + _GAP + rank * (_ROW + _GAP) + _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{y - 9}" text-anchor="end">held {rank}</text>')
        parts.append(_curve(curve, y, width / whole, _ROW / max(1, *peaks)))
        label = f"peak {_amount(peaks[rank], program)}"
        parts.append(f'<text x="{_LEFT + width + 6}" y="{y - 9}" fill="#555">{label}</text>')
    for tick in range(5):
        x = _LEFT + width * tick / 4
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 6}" stroke="#555"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{whole * tick / 4:.4g}</text>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{bottom + 40}" text-anchor="middle">time</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(curve: Sequence[Step], base: float, across: float, up: float) -> str:
    """Held memory as a filled step curve above `base`."""
    path, height = f"M {_LEFT} {base}", 0.0
    for step in curve:
        x = _LEFT + step.time * across
        path += f" L {x:.2f} {base - height:.2f}"
        height = step.held * up
        path += f" L {x:.2f} {base - height:.2f}"
    return f'<path d="{path} Z" fill="#cfe0f3" stroke="#3b6ea5"/>'


def _box(timed: Timed, scale: float, microbatches: int) -> str:
    action = timed.action
    x, wide = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    y = _TOP + timed.rank * (_ROW + _GAP)
    hue = 360 * action.microbatch // microbatches
    light, ink = (78, "black") if action.kind is Kind.F else (38, "white")
    label = str(action.microbatch)
    place = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}"'
    box = (
        f"<g><title>{action}: {timed.start:.4g} to {timed.end:.4g}</title>"
        f'<rect {place} fill="hsl({hue},60%,{light}%)" stroke="white"/>'
    )
    if action.kind is Kind.W:
        box += f'<rect {place} fill="url(#weights)"/>'
    if wide >= 8 * len(label) + 4:
        box += f'<text x="{x + wide / 2:.2f}" y="{y + 17}" text-anchor="middle" fill="{ink}">{label}</text>'
    return box + "</g>"
