"""Replicas have the gradients, parameters and buffers of torch's DistributedDataParallel, in every grid.

Both train in the same processes on the same batches, step by step; DistributedDataParallel accumulates the same
microbatches under ``no_sync`` over its whole model, smpar over pipeline x replicas.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness import Pool
from tests.replicas.models import Case, Complex, Frozen, Images, Layers, Normed, Sometimes, Tied, train_both

TINY = {"bucket_cap_mb": 1e-4}  # many buckets


def check(pool: Pool, ranks: int, case: Case, seed: int) -> dict[str, int]:
    """Both trainings agree on every rank; returns how much was compared, over all ranks."""
    every = pool.run(ranks, train_both, case, seed)
    total = {key: sum(one[key] for one in every) for key in every[0]}
    assert total["gradients"]
    return total


def config(degree: int, microbatches: int = 3, **more: object) -> dict[str, object]:
    return {"pipeline_parallel_degree": degree, "microbatches": microbatches, **more}


@pytest.mark.parametrize("model", [Layers, Tied, Sometimes, Normed])
@pytest.mark.parametrize(
    ("ranks", "degree"), [(2, 1), (4, 1), (4, 2), (4, 4), (3, 1)], ids=["1x2", "1x4", "2x2", "4x1", "1x3"]
)
def test_grids(pool: Pool, seed: int, ranks: int, degree: int, model: type) -> None:
    total = check(pool, ranks, Case(model, config(degree), TINY), seed)
    assert bool(total["buffers"]) == (model is Normed)
    assert bool(total["none"]) == (model is Sometimes)


@pytest.mark.parametrize("placement", ["DPT", "PDT", "TPD"])
def test_eight_processes(pool: Pool, seed: int, placement: str) -> None:
    check(pool, 8, Case(Tied, config(2, placement_strategy=placement), TINY), seed)


@pytest.mark.parametrize("model", [Layers, Tied])
@pytest.mark.parametrize("pipeline", ["simple", "gpipe", "1f1b", "interleaved_1f1b", "zb", "zbv"])
def test_schedules(pool: Pool, seed: int, pipeline: str, model: type) -> None:
    check(pool, 4, Case(model, config(2, 4, pipeline=pipeline), TINY), seed)


@pytest.mark.parametrize("pipeline", ["interleaved_1f1b", "zbv"])
def test_virtual_stages_of_one_rank(pool: Pool, seed: int, pipeline: str) -> None:
    check(pool, 2, Case(Tied, config(1, 4, pipeline=pipeline), TINY), seed)


@pytest.mark.parametrize("model", [Frozen, Complex, Images])
@pytest.mark.parametrize("degree", [1, 2])
def test_models(pool: Pool, seed: int, degree: int, model: type) -> None:
    check(pool, 2 * degree, Case(model, config(degree), TINY), seed)


@pytest.mark.parametrize("microbatches", [1, 3, 5])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_batch_that_microbatches_do_not_divide(pool: Pool, seed: int, degree: int, microbatches: int) -> None:
    check(pool, 2 * degree, Case(Layers, config(degree, microbatches), samples=7), seed)


@pytest.mark.parametrize(
    "options",
    [
        {"overlapping_allreduce": False},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, **TINY},
        {"broadcast_buffers": False},
        {},
    ],
    ids=["no overlap", "views", "views in tiny buckets", "own buffers", "one bucket"],
)
@pytest.mark.parametrize(("degree", "model"), [(1, Normed), (2, Normed), (2, Tied), (1, Sometimes)])
def test_options(pool: Pool, seed: int, degree: int, model: type, options: dict[str, object]) -> None:
    check(pool, 2 * degree, Case(model, config(degree), options), seed)


@pytest.mark.parametrize("zeroed", ["zero", "never"])
@pytest.mark.parametrize(("degree", "model"), [(1, Layers), (2, Tied), (1, Sometimes), (2, Sometimes)])
def test_gradients_that_stay(pool: Pool, seed: int, degree: int, model: type, zeroed: str) -> None:
    check(pool, 2 * degree, Case(model, config(degree), TINY, zeroed=zeroed), seed)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("degree", "model"), [(1, Layers), (2, Tied), (2, Normed), (1, Sometimes)])
def test_no_sync(pool: Pool, seed: int, degree: int, model: type, early: bool) -> None:
    options = {**TINY, "gradient_as_bucket_view": early}
    case = Case(model, config(degree), options, synced=(True, False, False, True, False, True))
    if model is Tied:  # its stages sum in each step, so that all holders have the same; what is not averaged differs
        case = Case(model, config(degree), options, synced=(False, True, False, True))
    check(pool, 2 * degree, case, seed)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 0.04), (torch.float16, 0.005)],
    ids=["float32", "bfloat16", "float16"],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_types(pool: Pool, seed: int, degree: int, dtype: torch.dtype, tolerance: float) -> None:
    case = Case(Layers, config(degree), TINY, dtype=dtype, tolerance=tolerance, synced=(True, True))
    check(pool, 2 * degree, case, seed)


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        ("allreduce_hook", 1e-9),
        ("fp16_compress_hook", 1e-3),
        ("bf16_compress_hook", 2e-2),
    ],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_communication_hooks(pool: Pool, seed: int, degree: int, hook: str, tolerance: float) -> None:
    case = Case(Layers, config(degree), hook=hook, tolerance=tolerance, dtype=torch.float32)
    check(pool, 2 * degree, case, seed)


def test_communication_hooks_and_parameters_without_gradient(pool: Pool, seed: int) -> None:
    check(pool, 2, Case(Sometimes, config(1), TINY, hook="allreduce_hook"), seed)
