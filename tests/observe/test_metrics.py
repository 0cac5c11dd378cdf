"""A line per step, on request."""

from __future__ import annotations

import re

import pytest

from smpar.observe.metrics import Line
from tests.harness import Pool
from tests.observe import models


@pytest.mark.parametrize("degree", [1, 2])
def test_a_line_per_step(pool: Pool, seed: int, degree: int) -> None:
    steps = 3
    seen = pool.run(degree, models.metrics, degree, seed, steps)
    assert all(not printed for printed, _ in seen[1:])
    lines = seen[0][0].splitlines()
    assert len(lines) == steps
    pattern = r"step (\d+)  loss (\S+)  (\S+) samples/s  bubble (\S+) %  peak (.+)  (\S+) s"
    for i, (line, loss) in enumerate(zip(lines, seen[0][1], strict=True)):
        match = re.fullmatch(pattern, line)
        assert match, line
        assert int(match[1]) == i
        assert float(match[2]) == pytest.approx(loss, rel=1e-4)
        assert float(match[3]) * float(match[6]) == pytest.approx(10, rel=0.01)  # samples
        assert 0 <= float(match[4]) < 100
        assert len(match[5].split(" | ")) == degree and "MB" in match[5]
    if degree == 2:
        assert re.fullmatch(pattern, lines[-1])[4] != "0.0"  # type: ignore[index]


def test_a_step_that_returns_no_number() -> None:
    assert str(Line(3, None, None, 0.25, 0.125, (10**9,))) == "step 3  bubble 12.5 %  peak 1 GB  0.25 s"
