"""Fixtures for all tests: the pool of ranks, and seeds that differ from run to run and can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.harness import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat a failed test: the seed it printed")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """``pool.run(world_size, fn, *args)`` runs a module-level function on ranks; see tests/harness.py."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for random inputs; printed, hence shown when the test fails. Repeat with ``--seed N``."""
    given = request.config.getoption("--seed")
    value = random.SystemRandom().randrange(2**31) if given is None else int(given)
    print(f"seed: repeat with --seed {value}")
    return value
