"""Training loops as people write them, one process against a pipeline; random numbers do not depend on the degree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import Pool
from tests.parity.features import compare, piped, unlike
from tests.parity.loops import LOOPS, Log, lbfgs


@pytest.mark.parametrize("config", [{}, {"pipeline": "simple"}, {"static_mode": False}], ids=str)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_random_numbers_do_not_depend_on_the_degree(pool: Pool, seed: int, degree: int, config: dict[str, Any]) -> None:
    (alone,) = pool.run(1, piped, "RandomNumbers", 1, seed, {})
    found = compare(pool.run(degree, piped, "RandomNumbers", degree, seed, config), alone, 1e-10)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_dropout_that_runs_again_in_backward_draws_the_same(
    pool: Pool, seed: int, degree: int, reentrant: bool
) -> None:
    (kept,) = pool.run(1, piped, "CheckpointedNone", 1, seed, {})
    found = compare(pool.run(degree, piped, f"Checkpointed{reentrant}", degree, seed, {}), kept, 1e-10)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop_equals_one_process(pool: Pool, seed: int, loop: Callable[[int, int], Log], degree: int) -> None:
    torch.set_num_threads(1)
    want = loop(0, seed)
    for rank, got in enumerate(pool.run(degree, loop, degree, seed)):
        found = [d for i, (a, b) in enumerate(zip(got, want, strict=True)) for d in unlike(a, b, 1e-9, f"entry {i}")]
        assert not found, f"rank {rank}: " + "; ".join(found[:5])


@pytest.mark.parametrize("degree", [1, 2])
def test_optimizers_that_mix_all_parameters_are_refused_or_right(pool: Pool, seed: int, degree: int) -> None:
    """LBFGS takes dot products over all parameters, which no stage has."""
    if degree == 1:
        assert not unlike(pool.run(1, lbfgs, 1, seed)[0], lbfgs(0, seed), 1e-7)
        return
    ends = pool.attempt(degree, lbfgs, degree, seed)
    assert all(end.error == "ModelError" for end in ends), ends
