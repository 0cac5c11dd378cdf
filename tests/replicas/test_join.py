"""Replicas with unequal numbers of batches: as under DistributedDataParallel's ``join``."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.harness import Pool
from tests.replicas.models import Case, Layers, Normed, Sometimes, Tied, accumulate, batch, close, make


def joined(
    degree: int, model: type, counts: list[int], by_replicas: bool, options: dict[str, Any], seed: int
) -> tuple[dict[str, Tensor], int]:
    """Train with ``join`` under both, compare parameters and buffers; returns ours, and how many were compared."""
    import smpar as smp

    # under DistributedDataParallel's join each forward is a meeting, so it takes each batch as one, as norms notice
    config = {"pipeline_parallel_degree": degree, "microbatches": 1 if model is Normed else 2}
    smp.init(config)
    replica, group = smp.dp_rank(), smp.get_dp_process_group()
    case = Case(model, config)
    reference = DistributedDataParallel(
        make(case, seed), process_group=group, find_unused_parameters=model is Sometimes
    )
    ours = smp.DistributedModel(make(case, seed), bucket_cap_mb=1e-4, **options)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, extra: bool) -> Tensor:
        loss = F.mse_loss(model(x, extra), y)
        model.backward(loss)
        return loss

    for epoch in range(2):
        given = [(*batch(case, seed, 10 * epoch + step, replica), step % 2 == 0) for step in range(counts[replica])]
        with ours.join(divide_by_initial_world_size=by_replicas):
            for x, y, extra in given:
                train(ours, x, y, extra)
                optimizer.step()
                optimizer.zero_grad()
        with reference.join(divide_by_initial_world_size=by_replicas):
            for x, y, extra in given:
                accumulate(case, reference, x, y, extra, True, 1)
                theirs.step()
                theirs.zero_grad()
    compared = 0
    wanted = dict([*reference.module.named_parameters(), *reference.module.named_buffers()])
    for name, tensor in (*ours.local_named_parameters(), *ours.local_named_buffers()):
        close(tensor, wanted[name], 1e-9, name)
        compared += 1
    return {n: t.detach().clone() for n, t in (*ours.local_named_parameters(), *ours.local_named_buffers())}, compared


@pytest.mark.parametrize("by_replicas", [True, False])
@pytest.mark.parametrize(
    ("ranks", "degree", "model", "counts"),
    [
        (2, 1, Layers, [1, 4]),
        (2, 1, Layers, [4, 1]),
        (2, 1, Layers, [3, 3]),
        (2, 1, Layers, [0, 2]),
        (2, 1, Sometimes, [2, 3]),
        (4, 1, Tied, [3, 1, 4, 2]),
        (4, 2, Layers, [1, 3]),
        (4, 2, Tied, [3, 1]),
        (4, 2, Normed, [3, 1]),
    ],
)
def test_parameters_are_those_of_distributed_data_parallel(
    pool: Pool, seed: int, ranks: int, degree: int, model: type, counts: list[int], by_replicas: bool
) -> None:
    results = pool.run(ranks, joined, degree, model, counts, by_replicas, {}, seed)
    assert all(count for _, count in results)
    for name in {name for state, _ in results for name in state}:
        first, *others = [state[name] for state, _ in results if name in state]
        assert all(torch.equal(first, other) for other in others), name  # all leave with the same


@pytest.mark.parametrize("options", [{"overlapping_allreduce": False}, {"gradient_as_bucket_view": True}])
def test_with_options(pool: Pool, seed: int, options: dict[str, Any]) -> None:
    pool.run(2, joined, 1, Layers, [1, 3], True, options, seed)


def stops(degree: int, counts: list[int], throw: bool, enable: bool, seed: int) -> tuple[int, str]:
    """Steps that this replica ran, and the error that ended them."""
    import smpar as smp

    smp.init({"pipeline_parallel_degree": degree})
    model = smp.DistributedModel(make(Case(), seed))

    @smp.step
    def train(model: Any, x: Tensor) -> None:
        model.backward(model(x, True).mean())

    ran, error = 0, ""
    with contextlib.suppress(smp.SmparError):
        try:
            with model.join(enable=enable, throw_on_early_termination=throw):
                for step in range(counts[smp.dp_rank()]):
                    train(model, batch(Case(), seed, step, 0)[0])
                    ran += 1
        except smp.SmparError as caught:
            error = f"{type(caught).__name__}: {caught}"
            raise
    if "EndedEarly" in error:  # no rank has failed: the job goes on
        assert len(smp.allgather(ran, smp.WORLD)) == 2
    return ran, error


def test_throwing_stops_all_replicas_together(pool: Pool, seed: int) -> None:
    for ran, error in pool.run(2, stops, 1, [1, 3], True, True, seed):
        assert ran == 1 and "replicas 0 of 2 have no more batches" in error


def test_throwing_without_need(pool: Pool, seed: int) -> None:
    assert pool.run(2, stops, 1, [2, 2], True, True, seed) == [(2, ""), (2, "")]


def test_disabled(pool: Pool, seed: int) -> None:
    assert pool.run(2, stops, 1, [2, 2], False, False, seed) == [(2, ""), (2, "")]


def test_one_replica(pool: Pool, seed: int) -> None:
    assert pool.run(1, stops, 1, [2], True, True, seed) == [(2, "")]
    assert pool.run(2, stops, 2, [2], True, True, seed) == [(2, "")] * 2


def test_a_pipeline_without_any_batch_cannot_follow(pool: Pool, seed: int) -> None:
    errors = [error for _, error in pool.run(4, stops, 2, [0, 1], False, True, seed)]
    assert any("JoinError" in error and "without any batch" in error for error in errors)
    assert all(error for error in errors)
