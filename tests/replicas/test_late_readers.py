"""A replica's step comes to read a parameter on a further stage, while the other replicas' steps do not.

              stage 0      stage 1
replica 0     reads p                      has nothing to sum
replica 1     reads p ◀─── reads p, too    sums over its pipeline before it averages with replica 0
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Pool
from tests.replicas.models import Case, Tied, Wandering, train_both
from tests.replicas.test_join import joined

TINY = {"bucket_cap_mb": 1e-4}  # a bucket for each parameter or two
WHO = {
    "second replica": ((), (1,), (), (0, 1)),
    "first replica": ((), (0,), (0,), (1,)),
    "in the first step": ((1,), (), (0,), (0, 1)),
}


class TiedWandering(Wandering, Tied):
    """Besides, a weight is tied from the start."""


class Contrary(Wandering):
    """Reads at the other end when it is not told to."""

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        return super().forward(x, not extra)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("static", [True, False], ids=["planned", "program order"])
@pytest.mark.parametrize("options", [{}, TINY, {**TINY, "overlapping_allreduce": False}], ids=["one", "tiny", "end"])
def test_gradients_are_those_of_distributed_data_parallel(
    pool: Pool, seed: int, who: str, static: bool, options: dict[str, Any]
) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "static_mode": static}
    pool.run(4, train_both, Case(Wandering, config, options, extra=WHO[who]), seed)


@pytest.mark.parametrize("static", [True, False], ids=["planned", "program order"])
def test_one_replica(pool: Pool, seed: int, static: bool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "static_mode": static}
    pool.run(2, train_both, Case(Wandering, config, extra=((), (0,), (), (0,))), seed)
    pool.run(2, train_both, Case(Wandering, config, extra=((0,), ())), seed)


@pytest.mark.parametrize(
    "case",
    [
        Case(TiedWandering, {"pipeline_parallel_degree": 2, "microbatches": 3}, TINY, zeroed="zero"),
        Case(Wandering, {"pipeline_parallel_degree": 2, "microbatches": 2}, TINY, hook="allreduce_hook"),
        Case(Wandering, {"pipeline_parallel_degree": 2}, {**TINY, "gradient_as_bucket_view": True}),
        Case(Wandering, {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zbv"}, TINY),
        Case(
            Wandering,
            {"pipeline_parallel_degree": 2, "microbatches": 2, "fp32_grad_accumulation": True},
            TINY,
            dtype=torch.bfloat16,
            tolerance=0.1,
        ),
    ],
    ids=["tied", "hook", "views", "zbv", "wide"],
)
@pytest.mark.parametrize("who", [((), (1,), (0,), (0, 1)), ((1,), (0,))], ids=["later", "first step"])
def test_with_whatever_else_gradients_go_through(
    pool: Pool, seed: int, case: Case, who: tuple[tuple[int, ...], ...]
) -> None:
    import dataclasses

    pool.run(4, train_both, dataclasses.replace(case, extra=who), seed)


def test_before_the_first_average(pool: Pool, seed: int) -> None:
    """The buckets' order is settled when the first average has shown it, and replicas differ by then."""
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    synced = (False, False, True, True)
    pool.run(4, train_both, Case(Wandering, config, TINY, synced=synced, extra=((), (1,), (0,), (0, 1))), seed)


@pytest.mark.parametrize("counts", [[3, 1], [1, 3]])
def test_join(pool: Pool, seed: int, counts: list[int]) -> None:
    """From its second step on, a replica reads at the other end; one of the two has only one."""
    results = pool.run(4, joined, 2, Contrary, counts, True, {}, seed)
    for name in {name for state, _ in results for name in state}:
        first, *others = [state[name] for state, _ in results if name in state]
        assert all(torch.equal(first, other) for other in others), name
