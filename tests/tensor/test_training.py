"""Tensor, pipeline and data parallelism together train a model as a single process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.harness import Pool
from tests.tensor.training import MODELS, train, train_alone

JOINED, PRESCALED = {"prescaled_batch": False}, {"prescaled_batch": True}
SPEED, MEMORY = {"optimize": "speed"}, {"optimize": "memory"}
GRIDS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor_parallel_degree": 2, **JOINED, **SPEED}),
    (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, **JOINED, **MEMORY}),
    (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "pipeline": "zb", **PRESCALED, **SPEED}),
    (4, {"tensor_parallel_degree": 2, **PRESCALED, **MEMORY}),
    (8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, **JOINED, **MEMORY}),
    (8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, **PRESCALED, **SPEED}),
]


def _name(grid: tuple[int, dict[str, Any]]) -> str:
    words = [str(v) for k, v in grid[1].items() if isinstance(v, str)]
    return f"{grid[0]}-{'prescaled' if grid[1]['prescaled_batch'] else 'joined'}-{'-'.join(words)}"


@pytest.mark.parametrize("grid", GRIDS, ids=_name)
@pytest.mark.parametrize("name", MODELS)
def test_a_grid_trains_as_one_process(pool: Pool, seed: int, name: str, grid: tuple[int, dict[str, Any]]) -> None:
    ranks, config = grid
    want = train_alone(name, seed)
    runs = pool.run(ranks, train, name, seed, config, timeout=240.0)
    for run in runs:
        torch.testing.assert_close(run.losses, want.losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(run.norms, want.norms, rtol=1e-9, atol=0)
    assert runs[0].state.keys() == want.state.keys()
    for key, value in want.state.items():
        torch.testing.assert_close(
            runs[0].state[key], value, rtol=1e-8, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )
