"""Strange but legitimate models and step functions: over a pipeline they give what one process gives."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.harness import Pool
from tests.parity.features import FEATURES, alone, compare, piped

for _name in ("values", "glue", "views", "steps", "more"):
    importlib.import_module(f"tests.parity.features_{_name}")

TOGETHER = {name: f for name, f in FEATURES.items() if not f.apart}
RUNS = [pytest.param(n, d, id=f"{n}-{d}") for n, f in TOGETHER.items() for d in f.degrees if not f.refused]
# Four stages on one rank, where nothing is sent, and on two, in a V with split backwards.
VIRTUAL: list[tuple[int, dict[str, Any]]] = [
    (1, {"pipeline": "interleaved_1f1b", "virtual_stages": 4}),
    (2, {"pipeline": "zbv"}),
]
REFUSALS = [name for name, f in TOGETHER.items() if f.refused]


def check(pool: Pool, name: str, degree: int, seed: int, config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    want = alone(name, seed)
    ranks = pool.run(degree, piped, name, degree, seed, config, timeout=30.0)
    found = compare(ranks, want, FEATURES[name].tolerance)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("name", "degree"), RUNS)
def test_feature_equals_one_process(pool: Pool, seed: int, name: str, degree: int) -> None:
    check(pool, name, degree, seed, {})


@pytest.mark.parametrize(("degree", "config"), VIRTUAL, ids=str)
@pytest.mark.parametrize("name", [name for name, f in TOGETHER.items() if not f.refused and f.most >= 4])
def test_feature_over_virtual_stages(pool: Pool, seed: int, name: str, degree: int, config: dict[str, Any]) -> None:
    check(pool, name, degree, seed, config)


@pytest.mark.parametrize("name", ["OddTensorsOverThree", "ViewsWritten", "WeightNormByHand"])
def test_feature_over_eight_virtual_stages(pool: Pool, seed: int, name: str) -> None:
    """Most of them empty."""
    check(pool, name, 2, seed, {"pipeline": "interleaved_1f1b", "virtual_stages": 4})


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_is_refused_clearly(pool: Pool, seed: int, name: str) -> None:
    """One error of smpar's own, with a way out, on the rank that saw it; the others name that rank."""
    feature = FEATURES[name]
    ends = pool.attempt(feature.degrees[0], piped, name, feature.degrees[0], seed, {}, timeout=20.0)
    assert all(end.kind == "error" and end.error in (feature.refused, "PeerFailed") for end in ends), ends
    told = next(end.text for end in ends if end.error == feature.refused)
    assert "found:" in told and "to fix:" in told
