"""Drawings of pages: a step's timetable and the search's frontier as SVG, bars as HTML. All colours are the page's.

rank 0  ▐0▌▐1▌▐2▌··▐₀▌▐3▌▐₁▌ ...  ▐₃▌            forwards, backwards, backwards of weights, to scale
        ───────────────────────── ▂▂reduce▂▂ ▂opt▂     below each rank: its reductions, its optimizer's step
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from smpar.describe.numbers import duration
from smpar.schedule import Kind, Timed

_LEFT, _WIDTH, _RIGHT = 66, 1000, 12
_ROW, _LANE, _GAP = 24, 5, 8
_LABELLED = 700  # actions; more would be a carpet of numbers
_MANY = 4000  # actions; more are drawn by sampling
_COLUMNS = 40_000  # of all ranks together, where they are sampled
_CLASS = {Kind.F: "f", Kind.B: "b", Kind.I: "b", Kind.W: "w"}


class Span(NamedTuple):
    """Something beside the actions of a rank: class of its colour, start and end in seconds."""

    colour: str
    start: float
    end: float


def timetable_svg(
    actions: Sequence[Timed],
    lanes: Sequence[Sequence[Span]],
    seconds: float,
    first_stages: Mapping[int, int],
    said: str,
) -> str:
    """A step's timetable to scale.

    Args:
        actions: of all ranks.
        lanes: for each rank what goes on below its actions.
        seconds: of the whole step.
        first_stages: rank -> the first of its stages; actions of others are paler.
        said: what the drawing shows, for those who do not see it.
    """
    ranks, scale = len(lanes), _WIDTH / (seconds or 1.0)
    height = ranks * (_ROW + _LANE + _GAP)
    parts = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {height + 34}" role="img" aria-label="{escape(said)}">',
    ]
    for rank in range(ranks):
        y = _top(rank)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect class="track" x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}"/>')
    drawn = actions if len(actions) <= _MANY else _sampled(actions, ranks, seconds)
    paths: dict[tuple[str, bool], list[str]] = {}
    for timed in drawn:
        action = timed.action
        key = f"{_CLASS[action.kind]}{action.microbatch % 2}", action.segment != first_stages.get(timed.rank)
        paths.setdefault(key, []).append(_box(timed.start * scale, timed.end * scale, _top(timed.rank), _ROW))
    for (colour, pale), boxes in sorted(paths.items()):
        faded = ' opacity=".72"' if pale else ""
        parts.append(f'<path class="{colour}"{faded} d="{"".join(boxes)}"/>')
    if len(actions) <= _LABELLED:
        parts += [_label(timed, scale) for timed in actions if (timed.end - timed.start) * scale >= 15]
    for rank, spans in enumerate(lanes):
        for span in spans:
            box = _box(span.start * scale, span.end * scale, _top(rank) + _ROW + 1, _LANE)
            parts.append(f'<path class="{span.colour}" d="{box}"/>')
    for share in range(5):
        x = _LEFT + _WIDTH * share / 4
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{height}" y2="{height + 6}"/>')
        anchor = "end" if share == 4 else "middle"
        told = duration(seconds * share / 4)
        parts.append(f'<text class="soft" x="{x}" y="{height + 22}" text-anchor="{anchor}">{told}</text>')
    return "".join([*parts, "</svg>"])


def _top(rank: int) -> int:
    return rank * (_ROW + _LANE + _GAP)


def _box(start: float, end: float, y: float, height: float) -> str:
    gap = 0.5 if end - start > 3 else 0.0
    return f"M{_LEFT + start:.1f} {y}h{max(end - start - gap, 0.3):.1f}v{height}H{_LEFT + start:.1f}z"


def _label(timed: Timed, scale: float) -> str:
    x = _LEFT + (timed.start + timed.end) / 2 * scale
    return (
        f'<text class="n" x="{x:.1f}" y="{_top(timed.rank) + 16}" text-anchor="middle">{timed.action.microbatch}</text>'
    )


def _sampled(actions: Iterable[Timed], ranks: int, seconds: float) -> list[Timed]:
    """What runs in the middle of each of some columns, as one action for each run of equal columns."""
    columns = max(200, min(2000, _COLUMNS // max(1, ranks)))
    step = seconds / columns
    found: list[Timed] = []
    for timed in actions:
        first, end = math.ceil(timed.start / step - 0.5), math.ceil(timed.end / step - 0.5)
        if first < end:
            found.append(timed._replace(start=first * step, end=end * step))
    return found


def frontier_svg(frontier: Mapping[int, float], said: str) -> str:
    """Seconds of a step against the number of devices: what was found with exactly so many, and the best so far."""
    left, top, width, height = 64, 14, 420, 210
    most, slowest = max(frontier), max(frontier.values())
    across, up = width / most, height / slowest
    points = sorted(frontier.items())
    parts = [f'<svg viewBox="0 0 {left + width + 24} {top + height + 44}" role="img" aria-label="{escape(said)}">']
    for share in range(5):
        y = top + height * (1 - share / 4)
        parts.append(f'<line class="axis" x1="{left}" x2="{left + width}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="soft" x="{left - 8}" y="{y + 4}" text-anchor="end">{duration(slowest * share / 4)}</text>'
        )
    path, low = "", float("inf")
    for devices, seconds in points:
        low = min(low, seconds)
        x, y = left + devices * across, top + height - low * up
        path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}"
    parts.append(f'<path class="curve" d="{path}"/>')
    best = min(points, key=lambda point: point[1])
    for devices, seconds in points:
        x, y = left + devices * across, top + height - seconds * up
        colour = "best" if (devices, seconds) == best else "dot"
        parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{devices} devices: '
                     f"{duration(seconds)}</title></circle>")  # fmt: skip
    for devices in _ticks(most):
        x = left + devices * across
        parts.append(f'<text class="soft" x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{devices}</text>')
    parts.append(
        f'<text class="soft" x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">devices</text>'
    )
    return "".join([*parts, "</svg>"])


def _ticks(most: int) -> list[int]:
    step = max(1, math.ceil(most / 8))
    return [*range(0, most - step // 2, step), most]


def bars(
    rows: Iterable[tuple[str, Sequence[tuple[str, float]], str]], whole: float, limits: Sequence[float] = ()
) -> str:
    """Stacked bars, one for each row.

    Args:
        rows: name, parts (class of their colour, amount), and what is said at the end.
        whole: the amount that fills a bar.
        limits: an amount for each row, drawn as a line.
    """
    found = []
    for index, (name, parts, end) in enumerate(rows):
        boxes = "".join(
            f'<i class="c-{colour}" style="width:{_share(amount, whole)}%"></i>'
            for colour, amount in parts
            if amount > 0
        )
        if limits:
            line = _share(limits[index], whole)
            rest = f'<s style="left:{line}%"></s>' if line < 100 else ""
            boxes += f'{rest}<u style="left:calc({line}% - 2px)"></u>'
        said = f"{name}: {end}"
        found.append(
            f'<div class="row"><span>{escape(name)}</span>'
            f'<div class="bar" role="img" aria-label="{escape(said)}">{boxes}</div>'
            f"<span>{escape(end)}</span></div>"
        )
    return f'<div class="bars">{"".join(found)}</div>'


def _share(amount: float, whole: float) -> float:
    return round(100 * amount / whole, 2) if whole else 0.0


def key(entries: Iterable[tuple[str, str]]) -> str:
    """What each colour means: class and words."""
    return (
        '<ul class="key">'
        + "".join(f'<li><i class="{colour}"></i>{escape(words)}</li>' for colour, words in entries)
        + "</ul>"
    )
