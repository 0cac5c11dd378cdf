"""Plans for people: tables and one page say what the plans are, whole, and need nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from smpar.describe.charts import timetable_svg
from smpar.describe.numbers import duration, memory, ranges
from smpar.describe.page import plans_page
from smpar.describe.plans import placement, plans_text
from smpar.planner.cluster import Cluster
from smpar.planner.cost import Prediction, Stage
from smpar.planner.plans import Plan, parts
from smpar.planner.strategy import Strategy
from smpar.schedule import Action, Kind, Timed
from tests.planner.sample_plans import some_plans

VOID = {"meta", "line", "circle", "path", "rect", "br", "i", "u", "s"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects elements with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def widths(bar: str) -> list[float]:
    return [float(x) for x in re.findall(r"width:([\d.]+)%", bar)]


def test_the_page_is_whole_and_needs_nothing_else(seed: int) -> None:
    plans = some_plans(seed)
    text = plans_page(plans)
    page = Page(text)
    assert text.startswith("<!doctype html>") and ("html", {"lang": "en"}) in page.found
    assert not page.all("script") and not page.all("link") and not page.all("img")
    assert not re.search(r"https?:|url\(|@import|src=|href=", text)
    opened = page.all("details")
    assert len(opened) == len(plans) and ["open" in d for d in opened] == [True] + [False] * (len(plans) - 1)
    words = "".join(page.text)
    for plan in plans:
        assert str(plan.strategy) in words and duration(plan.prediction.seconds) in words and plan.why in words
    assert "embed & <b>" in words and "fast <node>" in words  # names are text, never tags
    assert all(svg.get("aria-label") and svg.get("role") == "img" for svg in page.all("svg"))


def test_bars_are_to_scale(seed: int) -> None:
    """Seconds by cause add up to the step; memory adds up to what a rank needs, beside a line at its limit."""
    plans = some_plans(seed)
    assert plans.model is not None
    rows = re.findall(r'<div class="bar".*?</div>', plans_page(plans))
    slowest = max(plan.prediction.seconds for plan in plans)
    for plan, row in zip(plans, rows, strict=False):
        assert sum(widths(row)) == pytest.approx(100 * plan.prediction.seconds / slowest, abs=0.05)
        assert sum(parts(plans.model, plan).values()) == pytest.approx(plan.prediction.seconds)
    rest = iter(rows[len(plans) :])
    for plan in plans:
        p = plan.prediction
        for need, limit in zip(p.memory, p.limits, strict=True):
            row = next(rest)
            assert sum(widths(row)) == pytest.approx(100 * need / max(p.limits), abs=0.05)
            line = re.search(r"left:calc\(([\d.]+)%", row)
            assert line is not None and float(line[1]) == pytest.approx(100 * limit / max(p.limits), abs=0.01)


def test_every_device_has_its_place(seed: int) -> None:
    plans = some_plans(seed, keep=1)
    strategy = plans.best.strategy
    cells = dict(re.findall(r'<div class="cell[^>]*>(\d+)<br>([^<]+)</div>', plans_page(plans)))
    assert len(cells) == plans.best.cluster.size
    for p in range(strategy.pp):
        for d in range(strategy.dp):
            assert cells.pop(str(strategy.place(p, d))) == f"p{p} r{d}"
    assert set(cells.values()) <= {"unused"}


@pytest.mark.parametrize("microbatches", [3, 900], ids=["drawn", "sampled"])
def test_a_timetable_is_to_scale(microbatches: int) -> None:
    """Two ranks take turns; whether drawn one by one or sampled, each fills half of its row."""
    actions = [
        Timed(rank, Action(kind, rank, m), t, t + 1.0)
        for m in range(microbatches)
        for rank, kind, t in ((0, Kind.F, 4.0 * m), (1, Kind.F, 4.0 * m + 1), (1, Kind.B, 4.0 * m + 2),
                              (0, Kind.B, 4.0 * m + 3))
    ]  # fmt: skip
    end = 4.0 * microbatches
    drawing = timetable_svg(actions * (1 if microbatches < 9 else 2), [[], []], end, {0: 0, 1: 1}, "said")
    boxes = re.findall(r"M[\d.]+ (\d+)h([\d.]+)v24", drawing)
    for rank, y in enumerate(sorted({int(y) for y, _ in boxes})):
        filled = sum(float(width) for at, width in boxes if int(at) == y)
        repeated = 1 if microbatches < 9 else 2
        assert filled / repeated == pytest.approx(500, rel=0.05), rank
    labels = re.findall(r'class="n"[^>]*>(\d+)<', drawing)
    assert sorted(map(int, labels)) == (sorted([0, 1, 2] * 4) if microbatches == 3 else [])


def test_the_tables_say_the_numbers(seed: int) -> None:
    plans = some_plans(seed)
    lines = plans_text(plans).splitlines()
    assert max(map(len, lines)) <= 120
    for number, plan in enumerate(plans, 1):
        row = next(line for line in lines if re.match(rf" ?{number} ", line))
        assert duration(plan.prediction.seconds) in row and plan.strategy.schedule in row
        need, limit = plan.prediction.memory, plan.prediction.limits
        fullest = max(range(len(need)), key=lambda i: need[i] - limit[i])
        assert memory(limit[fullest]) in row
        assert not plan.why or f"{number:>2}  {plan.why}" in lines
    assert sum(line.startswith("  node ") for line in lines) == len(plans.best.cluster.nodes)
    assert "simulated" in plans_text(plans)


def test_many_nodes_are_told_in_few_lines() -> None:
    """Neighbours with the same pipeline ranks share a line; all nodes are in one of them."""
    machines = Cluster.from_file("8xh100*40")
    layers, cuts = tuple("abcdefgh"), (0, 1, 2, 3)
    strategy = Strategy(1, 4, 72, 1, 1, "1f1b", 1, cuts, tuple(range(4 * 72)))
    each = (1.0,) * 4
    stages = tuple(Stage((a, a + 1), 1.0, 1.0, 0.0, 0.0, 1.0) for a in cuts)
    plan = Plan(strategy, Prediction(1.0, 1.0, 0.0, 0.0, 0.0, each, each, stages), layers, machines)
    assert [line.split(": ") for line in placement(plan)[1:]] == [
        [f"  nodes {9 * p}-{9 * p + 8} 8xh100 (8 H100)", f"p{p} of r0-71"] for p in range(4)
    ] + [["  nodes 36-39 8xh100 (8 H100)", "-"]]


def test_numbers() -> None:
    assert [duration(x) for x in (0.0, 1.5e-9, 2e-5, 0.25, 90.0)] == ["0 s", "1.5 ns", "20 µs", "250 ms", "90 s"]
    assert memory(1.5 * 2**30) == "1.5 GiB" and memory(10) == "10 B"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
