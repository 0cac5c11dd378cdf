"""The harness keeps its promises: ranks, results, readable failures, and a usable pool after each of them."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import Pool, RanksFailed


def identify() -> tuple[int, int, int, int, int]:
    e = os.environ
    return (
        os.getpid(),
        int(e["RANK"]),
        int(e["WORLD_SIZE"]),
        torch.get_num_threads(),
        len(os.listdir("/proc/self/task")),
    )


def summed(values: torch.Tensor) -> torch.Tensor:
    """The process group is left open: ending the call must close it."""
    dist.init_process_group("gloo")
    mine = values * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    return mine


def fail_on(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        raise KeyError("the tensor of stage 7")
    return "fine"


def die_on(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def hang_here(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        time.sleep(60)
    return "fine"


def unpicklable() -> object:
    return lambda: None


def test_workers_are_kept_and_start_clean(pool: Pool) -> None:
    first, second = pool.run(3, identify), pool.run(2, identify)
    assert [(rank, world) for _, rank, world, *_ in first] == [(0, 3), (1, 3), (2, 3)]
    assert [(rank, world) for _, rank, world, *_ in second] == [(0, 2), (1, 2)]
    assert [pid for pid, *_ in second] == [pid for pid, *_ in first[:2]], "workers were replaced without need"
    assert all(threads == 1 for *_, threads, _ in first)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_process_groups_open_again_in_each_call(pool: Pool, world_size: int, seed: int) -> None:
    values = torch.randn(5, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        for result in pool.run(world_size, summed, values):
            torch.testing.assert_close(result, values * sum(range(1, world_size + 1)))


def test_an_exception_comes_back_with_its_traceback(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="stage 7") as caught:
        pool.run(2, fail_on, 1)
    assert "in fail_on" in str(caught.value), "the message shows no traceback"
    assert [o.kind for o in caught.value.outcomes] == ["result", "error"]
    assert caught.value.outcomes[1].error == "KeyError"
    assert pool.run(2, fail_on, -1) == ["fine", "fine"]


def test_a_dead_worker_is_named_and_replaced(pool: Pool) -> None:
    outcomes = pool.attempt(2, die_on, 0)
    assert [o.kind for o in outcomes] == ["killed", "result"]
    assert str(-signal.SIGKILL) in outcomes[0].text
    assert pool.run(2, die_on, -1) == ["fine", "fine"]


def test_a_hung_worker_shows_its_stack_and_is_replaced(pool: Pool) -> None:
    outcomes = pool.attempt(2, hang_here, 1, timeout=1.0)
    assert [o.kind for o in outcomes] == ["result", "timeout"]
    assert "hang_here" in outcomes[1].text
    assert pool.run(2, hang_here, -1) == ["fine", "fine"]


def test_a_result_that_cannot_travel_is_an_error(pool: Pool) -> None:
    (outcome,) = pool.attempt(1, unpicklable)
    assert outcome.kind == "error" and "pickle" in outcome.text.lower()


def test_fresh_processes_report_how_they_end(pool: Pool) -> None:
    kept = pool.run(1, identify)[0][0]
    fresh = pool.run_fresh(2, identify)
    assert all(o.kind == "result" and o.value[0] != kept for o in fresh)
    killed = pool.run_fresh(2, die_on, 1)
    assert [o.kind for o in killed] == ["result", "killed"]
    assert all(o.seconds < 5.0 for o in killed)
    hung = pool.run_fresh(2, hang_here, 0, timeout=1.5)
    assert [o.kind for o in hung] == ["timeout", "result"] and 1.4 < hung[0].seconds < 4.0


def test_the_fork_server_has_no_threads(pool: Pool) -> None:
    """A worker's threads at its first call are its own: one, plus what torch starts for it."""
    (outcome,) = pool.run_fresh(1, identify)
    assert outcome.value[4] == 1, f"{outcome.value[4]} threads in a newly forked process"
    assert "torch" in sys.modules
