"""Two hundred random programs, none of them a chain, end and equal one process, under every kind of schedule.

A program that fails is shrunk by hypothesis and printed as code; the next run of the test tries it first.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import Phase, given, reject, settings

from smpar.config import Config
from tests.harness import Pool, RanksFailed
from tests.programs.drawing import programs
from tests.programs.programs import Program
from tests.programs.running import run

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
FRESH = settings(deadline=None, derandomize=False, report_multiple_bugs=False)
PHASES = (Phase.reuse, Phase.generate, Phase.shrink)  # not `explain`, whose runs nothing bounds


class Trial:
    """Runs programs of one configuration; looks for smaller ones that fail, too, for a bounded time.

    What failed is not run again: hypothesis asks for its smallest program once more, and gets the same answer even
    if it fails only now and then. Once the time is over, whatever else it asks for passes unseen.
    """

    SHRINKING = 60.0  # s, from the first program that fails
    TIMEOUT, SHORTER = 30.0, 6.0  # s, for a program that takes a fifth of a second; while shrinking deadlocks

    def __init__(self, pool: Pool, ranks: int, config: dict[str, Any]) -> None:
        self.pool, self.ranks = pool, ranks
        self.config = {"pipeline_parallel_degree": ranks, **config}
        self.passed: set[Program] = set()
        self.failed: dict[Program, str] = {}
        self.since = 0.0

    def check(self, program: Program) -> None:
        if program in self.passed:
            reject()  # drawn twice
        found = self.failed.get(program, "") or self._found(program)
        assert not found, f"{found}\n{program}"
        self.passed.add(program)

    def _found(self, program: Program) -> str:
        if self.failed and time.monotonic() - self.since > self.SHRINKING:
            return ""
        try:
            answers = self.pool.run(
                self.ranks, run, self.config, program, timeout=self.SHORTER if self.failed else self.TIMEOUT
            )
            found = "\n".join(f"rank {rank}: {line}" for rank, lines in enumerate(answers) for line in lines[:3])
        except RanksFailed as error:
            found = str(error)
        if found:
            self.since = self.since or time.monotonic()
            self.failed[program] = found
        return found


@pytest.mark.parametrize(("ranks", "config"), CONFIGS, ids=str)
def test_random_programs_equal_one_process(pool: Pool, ranks: int, config: dict[str, Any]) -> None:
    trial = Trial(pool, ranks, config)

    @settings(FRESH, max_examples=EACH, phases=PHASES)
    @given(programs(Config.from_dict(trial.config).stages))
    def check(program: Program) -> None:
        trial.check(program)

    check()


def test_programs_hold_what_makes_them_hard() -> None:
    """Among so many there are re-use, several losses, views, writes, parts without gradient, and every stage."""
    drawn: list[Program] = []

    @settings(FRESH, max_examples=EACH * len(CONFIGS), phases=(Phase.generate,), database=None)
    @given(programs(6))
    def gather(program: Program) -> None:
        if program in drawn:
            reject()
        drawn.append(program)

    gather()
    assert len(drawn) == EACH * len(CONFIGS)
    lines = [[op.name for op in p.ops] for p in drawn]
    for name in ("part", "alias", "add_", "mul_", "fill_", "flatten_", "quiet_", "detach", "look", "shift", "weigh"):
        assert sum(name in names for names in lines) >= 5, name
    assert sum(names.count("loss") > 1 for names in lines) > len(drawn) / 4
    calls = [[op.unit for op in p.ops if op.unit >= 0] for p in drawn]
    assert sum(len(set(units)) < len(units) for units in calls) > len(drawn) / 2
    assert {unit.home for p in drawn for unit in p.units} == set(range(6))
