"""Two hundred random programs, none of them a chain, end and equal one process, under every kind of schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import Pool
from tests.programs.programs import draw
from tests.programs.running import run_all

EACH = 20
CONFIGS: list[tuple[int, dict[str, Any]]] = [  # ranks, configuration
    (1, {"pipeline": "interleaved_1f1b", "virtual_stages": 3}),
    (2, {}),
    (2, {"virtual_stages": 2}),
    (2, {"pipeline": "interleaved_1f1b", "virtual_stages": 3}),
    (2, {"pipeline": "zb"}),
    (2, {"pipeline": "zbv"}),
    (2, {"pipeline": "simple", "virtual_stages": 2}),
    (3, {}),
    (3, {"pipeline": "zb", "virtual_stages": 2}),
    (3, {"pipeline": "zbv", "active_microbatches": 1}),
]


@pytest.mark.parametrize(("ranks", "config"), CONFIGS, ids=str)
def test_random_programs_equal_one_process(pool: Pool, seed: int, ranks: int, config: dict[str, Any]) -> None:
    numbers = range(seed, seed + EACH)
    whole = {"pipeline_parallel_degree": ranks, **config}
    for rank, found in enumerate(pool.run(ranks, run_all, whole, numbers, timeout=240.0)):
        assert not found, f"rank {rank}: {len(found)} differences, the first:\n{found[0]}"


def test_programs_hold_what_makes_them_hard(seed: int) -> None:
    """Among so many there are re-use, several losses, views, writes, parts without gradient, and every stage."""
    programs = [draw(number, 6) for number in range(seed, seed + EACH * len(CONFIGS))]
    assert len({str(p) for p in programs}) == len(programs)
    lines = [[op.name for op in p.ops] for p in programs]
    for name in ("part", "add_", "mul_", "fill_", "flatten_", "quiet_", "detach", "look", "shift", "weigh"):
        assert sum(name in names for names in lines) >= 5, name
    assert sum(names.count("loss") > 1 for names in lines) > len(programs) / 4
    assert sum(len({op.unit for op in p.ops if op.unit >= 0}) < sum(op.unit >= 0 for op in p.ops) for p in programs) > (
        len(programs) / 2
    )
    assert {home for p in programs for home in p.homes} == set(range(6))
