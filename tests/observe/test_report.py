"""Reports tell where everything lies, on every rank, and drawings show the last schedule."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

import smpar as smp
from smpar.describe.names import compress
from smpar.describe.prediction import most_in_flight
from smpar.errors import NothingRan
from smpar.schedule import Program, Segment, gpipe, one_f_one_b
from tests.harness import Pool
from tests.observe import models


@pytest.mark.parametrize("degree", [2, 4])
def test_report_tells_stages_units_and_parameters(pool: Pool, seed: int, degree: int) -> None:
    seen = pool.run(degree, models.reports, degree, seed, {"pipeline": "gpipe"})
    assert len({s["after"] for s in seen}) == 1, "every rank returns the same text"
    assert all(not s["printed"] for s in seen[1:])
    assert seen[0]["printed"] == seen[0]["before"] + seen[0]["after"]
    assert "not partitioned yet" in seen[0]["before"] and f"{degree} stages" in seen[0]["before"]
    text = seen[0]["after"]
    rows = [line for line in text.splitlines() if re.match(r"\d", line)]
    assert len(rows) >= degree
    for s in seen:
        row = next(r for r in rows if r.startswith(str(s["stage"])))
        assert f" {s['held']} (" in row or f" {s['held'] / 1e3:.3g} k (" in row
    assert "embed" in rows[0] and "head" in rows[degree - 1]
    assert "†" in rows[0] and "†" in rows[degree - 1]
    last = ", ".join(["0", str(degree - 1)])
    assert f"tied parameters: embed.weight on stages {last}" in text
    assert "units never called: spare" in text
    assert "gpipe, 4 microbatches: predicted" in text and "bubble" in text


def test_shares_of_time_add_up(pool: Pool, seed: int) -> None:
    text = pool.run(2, models.reports, 2, seed, {})[0]["after"]
    shares = [int(n) for n in re.findall(r"s  (\d+) %", text)]
    assert len(shares) == 2 and 98 <= sum(shares) <= 102


def test_replicas_share_a_row(pool: Pool, seed: int) -> None:
    text = pool.run(4, models.reports, 2, seed, {})[0]["after"]
    ranks = [re.split(r"  +", line)[1] for line in text.splitlines() if re.match(r"[01] ", line)]
    assert sorted(ranks) == sorted(["0, 1", "2, 3"]) or sorted(ranks) == sorted(["0, 2", "1, 3"])


def test_drawing_is_that_of_the_schedule(pool: Pool, seed: int) -> None:
    seen = pool.run(2, models.reports, 2, seed, {"pipeline": "gpipe"})
    drawing = seen[1]["drawing"]
    assert drawing.startswith("gpipe: 2 ranks, 4 microbatches")
    rows = [line for line in drawing.splitlines() if line.startswith("rank")]
    order = [re.sub(r"(.)\1*", r"\1", row.split("|")[1].replace("·", "")) for row in rows]
    assert order == ["0123₀₁₂₃", "0123₀₁₂₃"]
    assert len(ET.fromstring(seen[0]["svg"]).findall(".//{*}g")) == 16


def test_one_rank(pool: Pool, seed: int) -> None:
    seen = pool.run(1, models.reports, 1, seed, {})[0]
    assert "(whole model)" in seen["after"] and "no pipeline" in seen["after"]
    rows = [line for line in seen["drawing"].splitlines() if line.startswith("rank")]
    assert [re.sub(r"(.)\1*", r"\1", row.split("|")[1]) for row in rows] == ["0₀1₁2₂3₃"]


def test_steps_in_program_order_are_drawn_too(pool: Pool, seed: int) -> None:
    text, drawing = pool.run(2, models.drawing_by_value, 2, seed)[0]
    assert "program order" in text and drawing.startswith("program order: 2 ranks, 4 microbatches")


def test_no_step_no_drawing(pool: Pool) -> None:
    assert pool.run(2, _drawing_too_early) == ["call it after the first step"] * 2


def _drawing_too_early() -> str:
    models.start(2)
    try:
        smp.timetable()
    except NothingRan as error:
        return error.fix
    return "no error"


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        (["blocks.0", "blocks.1", "blocks.2", "norm"], [], "blocks.0-2, norm"),
        (["blocks.0", "blocks.1"], ["blocks.2", "head"], "blocks.0-1"),
        (["a.h.3.attn", "a.h.3.mlp", "a.h.4.attn"], ["a.h.4.mlp", "a.h.2.attn"], "a.h.3, a.h.4.attn"),
        (["h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.2.a"], ["h.2.b"], "h.0-1, h.2.a"),
        (["block.1", "block.3", "block.4"], ["block.2"], "block.1, block.3-4"),
        (["encoder.x", "encoder.y"], ["decoder.x"], "encoder"),
        (["layer1", "layer2"], [], "layer1, layer2"),
        (["(model)"], [], "(model)"),
        ([], [], ""),
    ],
)
def test_names_in_few_words(names: list[str], others: list[str], expected: str) -> None:
    assert compress(names, others) == expected


def test_microbatches_in_flight() -> None:
    chain = Program(3, tuple(Segment(i, i) for i in range(3)), ())
    assert most_in_flight(gpipe(chain, 5), chain) == (5, 5, 5)
    assert most_in_flight(one_f_one_b(chain, 5), chain) == (3, 2, 1)
