"""Measured times decide the cut where counted ones are wrong, and measuring leaves nothing behind."""

from __future__ import annotations

from tests.harness import Pool
from tests.observe import models


def test_a_slow_unit_moves_the_cut(pool: Pool, seed: int) -> None:
    counted = pool.run(2, models.cut_with_slow_unit, False, seed)
    measured = pool.run(2, models.cut_with_slow_unit, True, seed)
    assert counted[0]["stages"] == counted[1]["stages"] and measured[0]["stages"] == measured[1]["stages"]
    assert measured[0]["seconds"] == measured[1]["seconds"], "all ranks know the first rank's times"
    assert [c["measured"] for c in (*counted, *measured)] == [False, False, True, True]
    assert counted[0]["stages"].count(0) >= 4, "counted: all are alike"
    seconds = measured[0]["seconds"]
    assert seconds[1] > 5 * max(s for i, s in enumerate(seconds) if i != 1)
    assert measured[0]["stages"].index(1) <= 2, "measured: the slow one with at most the first"
    assert measured[0]["mean"] and measured[0]["grads"]
    assert abs(measured[0]["loss"] - counted[0]["loss"]) < 1e-6
