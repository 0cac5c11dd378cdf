"""Strange but legitimate models and step functions: over a pipeline they give what one process gives."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.harness import Pool
from tests.parity.features import FEATURES, alone, compare, piped

for _name in ("values", "glue", "steps"):
    importlib.import_module(f"tests.parity.features_{_name}")

RUNS = [pytest.param(n, d, id=f"{n}-{d}") for n, f in FEATURES.items() for d in f.degrees]


def check(pool: Pool, name: str, degree: int, seed: int, config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    want = alone(name, seed)
    ranks = pool.run(degree, piped, name, degree, seed, config, timeout=30.0)
    found = compare(ranks, want, FEATURES[name].tolerance)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("name", "degree"), RUNS)
def test_feature_equals_one_process(pool: Pool, seed: int, name: str, degree: int) -> None:
    check(pool, name, degree, seed, {})
