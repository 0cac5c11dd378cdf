"""The test backend catches what NCCL would hang at; here each mistake is made once, without smpar."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness import Pool, RanksFailed
from tests.nccl_rules.backend import BACKEND, register

Talk = Callable[[dist.ProcessGroup, int, torch.Generator], None]


def talk(how: Talk, seed: int, patience: str = "1.5") -> None:
    os.environ["NCCL_RULES_PATIENCE"] = patience
    try:
        dist.init_process_group("gloo")
        register()
        group = dist.new_group(backend=BACKEND, group_desc="all")
        how(group, dist.get_rank(), torch.Generator().manual_seed(seed))
        dist.barrier(group)
    finally:
        del os.environ["NCCL_RULES_PATIENCE"]


def a_and_b(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 5, generator=draw), torch.randint(0, 9, (7,), generator=draw)


def right(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    a, b = a_and_b(draw)
    if rank == 0:
        works = [group.send([a], 1, 0), group.send([b], 1, 0)]
    else:
        x, y = torch.empty_like(a), torch.empty_like(b)
        works = [group.recv([x], 0, 0), group.recv([y], 0, 0)]
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success()
    if rank == 1:
        assert torch.equal(x, a) and torch.equal(y, b)
    for dtype in (torch.float32, torch.float64, torch.int64):
        mine = torch.arange(6, dtype=dtype).view(2, 3) * (rank + 1)
        total, largest, average = mine.clone(), mine.clone(), mine.clone()
        dist.all_reduce(total, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        assert torch.equal(total, torch.arange(6, dtype=dtype).view(2, 3) * 3)
        assert torch.equal(largest, torch.arange(6, dtype=dtype).view(2, 3) * 2)
        if dtype.is_floating_point:
            dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
            assert torch.equal(average, total / 2)
    root = a.clone() if rank == 1 else torch.zeros_like(a)
    work = dist.broadcast(root, 1, group=group, async_op=True)
    work.get_future().wait()
    assert torch.equal(root, a)
    parts = [torch.empty(4), torch.empty(4)]
    dist.all_gather(parts, torch.full((4,), float(rank)), group=group)
    assert [p.mean() for p in parts] == [0.0, 1.0]


def test_what_is_right_goes_through(pool: Pool, seed: int) -> None:
    pool.run(2, talk, right, seed, "20")


def swapped_sends(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    a, b = a_and_b(draw)
    transfer = group.send if rank == 0 else group.recv
    for t in (b, a) if rank == 0 else (a, b):
        transfer([t], 1 - rank, 0).wait()


def swapped_receives(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    """All is queued before anything is waited for."""
    a, b = a_and_b(draw)
    transfer = group.send if rank == 0 else group.recv
    for work in [transfer([t], 1 - rank, 0) for t in ((a, b) if rank == 0 else (b, a))]:
        work.wait()


def both_send_first(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    a, _ = a_and_b(draw)
    for work in (group.send([a], 1 - rank, 0), group.recv([a.clone()], 1 - rank, 0)):
        work.wait()


def other_size(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    (group.send if rank == 0 else group.recv)([torch.zeros(6 + rank)], 1 - rank, 0).wait()


def other_dtype(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    dtype = (torch.float32, torch.int32)[rank]
    (group.send if rank == 0 else group.recv)([torch.zeros(6, dtype=dtype)], 1 - rank, 0).wait()


def other_collective(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(4), group=group)
    else:
        dist.broadcast(torch.zeros(4), 0, group=group)


def int16(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    dist.all_reduce(torch.zeros(4, dtype=torch.int16), group=group)


def strided(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    (group.send if rank == 0 else group.recv)([torch.zeros(6, 4).t()], 1 - rank, 0).wait()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (swapped_sends, ["send int64[7] to rank 1", "recv float32[15] from rank 0"]),
        (swapped_receives, ["send float32[15] to rank 1", "recv int64[7] from rank 0"]),
        (both_send_first, ["rank 0: send float32[15] to rank 1", "rank 1: send float32[15] to rank 0"]),
        (other_size, ["send float32[6] to rank 1", "recv float32[7] from rank 0"]),
        (other_dtype, ["send float32[6] to rank 1", "recv int32[6] from rank 0"]),
        (other_collective, ["rank 0: allreduce float32[4]", "rank 1: broadcast float32[4]"]),
        (int16, ["torch.int16, which NCCL has no type for"]),
        (strided, ["strides (1, 4)"]),
    ],
)
def test_what_does_not_match_is_an_error_that_names_both(pool: Pool, seed: int, how: Talk, named: list[str]) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, talk, how, seed)
    for outcome in failed.value.outcomes:
        assert outcome.error == "RuleBroken", outcome
        assert all(text in outcome.text for text in named), outcome


def missing_receive(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    a, b = a_and_b(draw)
    if rank == 0:
        group.send([a], 1, 0).wait()
        group.send([b], 1, 0).wait()
    else:
        group.recv([torch.empty_like(a)], 0, 0).wait()
        dist.recv(torch.zeros(1), 0)  # busy elsewhere, and never comes to the other receive


def in_a_ring(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    """Each sends to the next before it receives: the queue of a common communicator does not get to the receives."""
    a, _ = a_and_b(draw)
    for work in (group.send([a], (rank + 1) % 3, 0), group.recv([a.clone()], (rank - 1) % 3, 0)):
        work.wait()


def first_operations_cross(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    """Two communicators, each first used by one rank while the other connects the other one."""
    pair = [group, dist.new_group(backend=BACKEND)]
    dist.barrier()  # a rank that came late to its first operation would have nothing queued when patience ends
    works = [pair[i].send([torch.zeros(2)], 1 - rank, 0) if i == rank else None for i in (rank, 1 - rank)]
    works += [pair[1 - rank].recv([torch.zeros(2)], 1 - rank, 0)]
    for work in filter(None, works):
        work.wait()


@pytest.mark.parametrize(
    ("ranks", "how", "queued"),
    [
        (2, missing_receive, ["rank 0:\n    communicator 1 (all): rank 0: send int64[7] to rank 1", "nothing queued"]),
        (3, in_a_ring, [f"rank {r}: send float32[15] to rank {(r + 1) % 3} | rank {r}: recv" for r in range(3)]),
        (2, first_operations_cross, ["rank 0: connect", "rank 1: connect"]),
    ],
)
def test_a_deadlock_ends_with_the_queues_of_all_ranks(
    pool: Pool, seed: int, ranks: int, how: Talk, queued: list[str]
) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(ranks, talk, how, seed)
    (first, *_) = [o for o in failed.value.outcomes if o.error == "RuleBroken"]
    assert all(text in first.text for text in queued), first


def test_a_sent_tensor_must_stay_as_it_is(pool: Pool, seed: int) -> None:
    with pytest.raises(RanksFailed, match=r"changed before it was sent"):
        pool.run(2, talk, sent_then_changed, seed)


def sent_then_changed(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    dist.barrier(group)
    tensor = torch.ones(4)
    if rank == 0:
        work = group.send([tensor.detach()], 1, 0)
        tensor.mul_(2)
        dist.send(torch.zeros(1), 1)  # rank 1 may receive now
    else:
        dist.recv(torch.zeros(1), 0)
        work = group.recv([tensor], 0, 0)
    work.wait()


def read_too_early(group: dist.ProcessGroup, rank: int, draw: torch.Generator) -> None:
    dist.barrier(group)
    tensor = torch.ones(4)
    if rank == 1:
        work = group.recv([tensor], 0, 0)
        assert tensor.isnan().all()
        dist.send(torch.zeros(1), 0)
    else:
        dist.recv(torch.zeros(1), 1)
        work = group.send([tensor], 1, 0)
    work.wait()
    assert tensor.sum() == 4


def test_memory_holds_nothing_until_it_is_received(pool: Pool, seed: int) -> None:
    pool.run(2, talk, read_too_early, seed, "20")
