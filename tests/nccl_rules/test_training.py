"""Every schedule, kind of program and grid trains under NCCL's rules: no deadlock, and one process's numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from smpar.comm.channels import NcclChannels
from smpar.config import Config
from smpar.errors import ConfigError, NotBuiltYet
from tests.harness import Pool, RanksFailed
from tests.nccl_rules.install import under_rules
from tests.nccl_rules.training import KINDS, Seen, alone, differences, on_grid, with_one_communicator


def _schedules() -> list[dict[str, Any]]:
    """All pipelines that smpar.init takes, each with its default of virtual stages, and with more where it can."""
    with pytest.raises(ConfigError) as listed:
        Config.from_dict({"pipeline": "?"})
    names = listed.value.rule.split("one of ")[1].split(", ")
    options: list[dict[str, Any]] = [{"pipeline": name} for name in sorted(names)]
    options += [{"pipeline": "interleaved_1f1b", "virtual_stages": 4}, {"active_microbatches": 1}]
    return [each for each in options if _built(each)]


def _built(options: dict[str, Any]) -> bool:
    try:
        Config.from_dict({"pipeline_parallel_degree": 2, **options})
    except NotBuiltYet:
        return False
    return True


def _name(options: Any) -> str | None:
    return " ".join(str(value) for value in options.values()) if isinstance(options, dict) else None


SCHEDULES = _schedules()


@cache
def expected(kind: str, seed: int) -> Seen:
    torch.set_num_threads(1)
    return alone(kind, seed)


def check(pool: Pool, seed: int, kind: str, degree: int, replicas: int, options: dict[str, Any]) -> None:
    size = degree * replicas
    options = {"pipeline_parallel_degree": degree, "placement_strategy": "DPT", **options}
    ranks = pool.run(size, under_rules, on_grid, kind, options, seed, timeout=120.0)
    found = differences(ranks, expected(kind, seed), [rank // degree for rank in range(size)])
    assert not found, "; ".join(found[:8])
    assert {rank.channels for rank in ranks} == ({NcclChannels.__name__} if degree > 1 else {""})


@pytest.mark.parametrize("options", SCHEDULES, ids=_name)
@pytest.mark.parametrize("kind", KINDS)
def test_schedules_and_programs(pool: Pool, seed: int, kind: str, options: dict[str, Any]) -> None:
    check(pool, seed, kind, 2, 1, options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("degree", "replicas"), [(4, 1), (2, 2)])
def test_grids_and_programs(pool: Pool, seed: int, kind: str, degree: int, replicas: int) -> None:
    check(pool, seed, kind, degree, replicas, {})


@pytest.mark.parametrize("options", SCHEDULES, ids=_name)
@pytest.mark.parametrize(("degree", "replicas"), [(4, 1), (2, 2)])
def test_grids_and_schedules(pool: Pool, seed: int, degree: int, replicas: int, options: dict[str, Any]) -> None:
    check(pool, seed, "tied", degree, replicas, options)


@pytest.mark.parametrize("kind", ["chain", "tied"])
def test_replicas_without_a_pipeline(pool: Pool, seed: int, kind: str) -> None:
    check(pool, seed, kind, 1, 4, {})


@pytest.mark.parametrize("kind", ["skips", "tied"])
def test_eight_ranks(pool: Pool, seed: int, kind: str) -> None:
    check(pool, seed, kind, 2, 4, {})


def test_one_communicator_for_both_directions_would_not_do(pool: Pool, seed: int) -> None:
    """The rules bite in a whole training step: 1F1B's stages send to each other at the same time."""
    options = {"pipeline_parallel_degree": 2, "pipeline": "1f1b"}
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, under_rules, with_one_communicator, "chain", options, seed)
    assert any("RuleBroken" in outcome.text and "smpar 0 to 1" in outcome.text for outcome in failed.value.outcomes)
