"""Each case trains to what a single process gives, for every pipeline degree and schedule, seen from every rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.harness import Pool
from tests.parity.cases import CASES
from tests.parity.reference import Trained, differences, first_names, gap, train_alone
from tests.parity.train import (
    autocast_around_the_call,
    losses_under_dropout,
    one_step_with_outputs,
    train,
)

SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "simple": {"pipeline": "simple"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved": {"pipeline": "interleaved", "active_microbatches": 2},
    "dynamic": {"static_mode": False},
}
# Those with virtual stages or split backwards run on two ranks, and with virtual stages also in one process.
VIRTUAL: dict[str, dict[str, Any]] = {
    "interleaved_1f1b": {"pipeline": "interleaved_1f1b", "virtual_stages": 2},
    "four_virtual": {"pipeline": "interleaved_1f1b", "virtual_stages": 4},
    "zbv": {"pipeline": "zbv"},
}
SPLIT: dict[str, dict[str, Any]] = {"zb": {"pipeline": "zb"}}
ALL_SCHEDULES = SCHEDULES | VIRTUAL | SPLIT


def _runs() -> list[Any]:
    runs = []
    for name, case in CASES.items():
        for degree in (1, *case.stages):
            names = [n for n in SCHEDULES if case.chain or n != "1f1b"] if degree > 1 else ["default"]
            fitting = [n for n, options in VIRTUAL.items() if degree * options.get("virtual_stages", 2) <= case.most]
            names += fitting if degree < 3 else []
            names += [*SPLIT] if degree == 2 else []
            runs += [pytest.param(name, degree, schedule, id=f"{name}-{degree}-{schedule}") for schedule in names]
    return runs


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Any:
    """Case -> what a single process gives; where the random stream is smpar's own, smpar in one process."""

    @cache
    def expect(name: str) -> Trained:
        torch.set_num_threads(1)
        return pool.run(1, train, name, 1, {})[0] if CASES[name].reference == "self" else train_alone(CASES[name])

    return expect


def assert_copies_agree(ranks: list[Trained], name: str) -> None:
    """A parameter that several ranks hold is bitwise the same on all of them, and in the whole state dict."""
    first = first_names(CASES[name].model())
    for rank, seen in enumerate(ranks):
        for local, value in seen.copies.items():
            assert torch.equal(value, ranks[0].state[first[local]]), f"rank {rank}'s copy of {local} went its own way"
    held = {first[local] for seen in ranks for local in seen.copies}
    assert held == set(first.values()), f"on no rank: {set(first.values()) - held}"


@pytest.mark.parametrize(("name", "degree", "schedule"), _runs())
def test_training_equals_one_process(pool: Pool, expected: Any, name: str, degree: int, schedule: str) -> None:
    case, want = CASES[name], expected(name)
    ranks = pool.run(degree, train, name, degree, ALL_SCHEDULES[schedule])
    for rank, got in enumerate(ranks):
        found = differences(got, want, case.tolerance)
        assert not found, f"rank {rank}: " + "; ".join(found)
        assert got.seen == want.seen, f"rank {rank}: dtypes {got.seen}, not {want.seen}"
    assert_copies_agree(ranks, name)
    first = first_names(case.model())
    learned = {first[local] for got in ranks for local in got.learned}
    assert learned == want.learned, f"had a gradient on one side only: {learned ^ want.learned}"


def test_frozen_parameters_stay_bitwise_the_same(pool: Pool) -> None:
    start = CASES["lora_frozen_first_stages"].model()
    (got, *_) = pool.run(2, train, "lora_frozen_first_stages", 2, {})
    for name, p in start.named_parameters():
        assert torch.equal(got.state[name], p) == (not p.requires_grad), name


@pytest.mark.parametrize("degree", [2, 4])
def test_tied_names_stay_one_parameter(pool: Pool, degree: int) -> None:
    for got in pool.run(degree, train, "tied_embedding_head", degree, {}):
        assert torch.equal(got.state["head.weight"], got.state["embedding.weight"])


@pytest.mark.parametrize("degree", [2, 4])
def test_step_returns_losses_and_joined_outputs_on_every_rank(pool: Pool, degree: int) -> None:
    case = CASES["labels_kwarg_loss_inside"]
    batch = case.batch(0)
    loss, logits = case.model()(*batch.args, labels=batch.target)
    for mean, joined, parts in pool.run(degree, one_step_with_outputs, "labels_kwarg_loss_inside", degree, {}):
        assert gap(mean, loss.detach()) < case.tolerance
        assert gap(joined, logits.detach()) < case.tolerance
        assert [len(part) for part in parts] == [2, 2, 2, 2] and not joined.requires_grad


def test_autocast_around_the_step_reaches_every_stage(pool: Pool, expected: Any) -> None:
    want = expected("bf16_autocast_boundary")
    assert want.seen == ["torch.bfloat16", "torch.float32", "torch.bfloat16", "torch.bfloat16"]
    for loss, seen in pool.run(2, autocast_around_the_call, "bf16_autocast_boundary", 2):
        assert gap(loss, want.losses[0]) < CASES["bf16_autocast_boundary"].tolerance and seen == want.seen


def test_dropout_draws_anew_for_each_microbatch_step_and_seed(pool: Pool, seed: int) -> None:
    """Equal samples throughout: only the masks can make losses differ."""
    (first, *others), (second, *_) = (pool.run(2, losses_under_dropout, 2, s) for s in (seed, seed + 1))
    assert all(other == first for other in others), "ranks saw different losses"
    drawn = [loss for step in (*first, *second) for loss in step]
    assert len(set(drawn)) == len(drawn), f"masks repeat: {drawn}"
    (alone,) = pool.run(1, losses_under_dropout, 1, seed)
    assert gap(alone, first) < 1e-9, f"the degree changed the masks: {first}, not {alone}"


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 2)])
def test_resuming_under_another_degree(pool: Pool, expected: Any, before: int, after: int) -> None:
    """One step, all state through state dicts, then the rest: as if never interrupted."""
    name = "resume_new_partition"
    case, want = CASES[name], expected(name)
    start = pool.run(before, train, name, before, {}, case.phases[:1])
    saved = start[0].saved
    for got in pool.run(after, train, name, after, {}, case.phases[1:], saved, 1):
        got.losses.insert(0, start[0].losses[0])
        found = differences(got, want, case.tolerance)
        assert not found, "; ".join(found)


def test_whole_state_dicts_load_in_plain_pytorch(pool: Pool, expected: Any) -> None:
    """Model, optimizer and schedule, by the original names and positions."""
    name = "resume_new_partition"
    case, want = CASES[name], expected(name)
    saved = pool.run(2, train, name, 2, {}, case.phases[:1])[0].saved
    model = case.model()
    optimizer = case.optimizer(model)
    assert case.scheduler is not None
    scheduler = case.scheduler(optimizer)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    for step in (1, 2):
        batch = case.batch(step)
        optimizer.zero_grad()
        loss = case.loss(model(*batch.args), batch.target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        assert gap(loss.detach(), want.losses[step]) < case.tolerance
    assert all(gap(value, want.state[key]) < case.tolerance for key, value in model.state_dict().items())
