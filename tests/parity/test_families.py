"""Unedited models of many families train as in a single process, cut automatically over two and four stages."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.harness import Pool
from tests.parity.families import FAMILIES, WITHOUT_CACHE
from tests.parity.family_training import Steps, differences, train, train_alone

MICROBATCHES = {2: 2, 4: 4}


@cache
def expected(name: str, microbatches: int) -> Steps:
    torch.set_num_threads(1)
    return train_alone(name, microbatches)


def check(pool: Pool, name: str, degree: int, microbatches: int, config: dict[str, Any] | None = None) -> None:
    want = expected(name, microbatches)
    found = differences(name, pool.run(degree, train, name, degree, microbatches, config or {}, timeout=120.0), want)
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_trains_as_in_one_process(pool: Pool, name: str, degree: int) -> None:
    check(pool, name, degree, MICROBATCHES[degree])


@pytest.mark.parametrize(
    "config",
    [{"pipeline": "zbv"}, {"pipeline": "interleaved_1f1b"}, {"pipeline": "zb"}],
    ids=lambda c: c["pipeline"],
)
@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "vit"])
def test_family_under_virtual_stages_and_split_backwards(pool: Pool, name: str, config: dict[str, Any]) -> None:
    check(pool, name, 2, 4, config)


@pytest.mark.parametrize("name", WITHOUT_CACHE)
def test_family_without_cache(pool: Pool, name: str) -> None:
    check(pool, name, 2, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_comparison_sees_one_wrong_gradient(name: str) -> None:
    """Half a percent on the smallest gradient that is more than rounding must be seen."""
    want = expected(name, 2)
    assert not differences(name, [want], want)
    last = {n: g for n, g in want.gradients[-1].items() if g is not None}
    sizes = {n: float(g.abs().max()) for n, g in last.items()}
    weakest = min((n for n in sizes if sizes[n] > 1e-3 * max(sizes.values())), key=lambda n: sizes[n])
    wrong = {**want.gradients[-1], weakest: last[weakest] * 1.005}
    broken = Steps(want.losses, [*want.gradients[:-1], wrong], want.state)
    assert [d for d in differences(name, [broken], want) if weakest in d]
