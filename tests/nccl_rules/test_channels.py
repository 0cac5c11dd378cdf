"""`NcclChannels`, its own code, under NCCL's rules."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from smpar.comm.channels import NcclChannels, open_channels
from smpar.comm.world import World
from smpar.config import Config
from smpar.errors import CommError
from tests.comm.test_channels import answers_late, mixed, payload
from tests.harness import Pool, RanksFailed
from tests.nccl_rules.install import under_rules


def opened(degree: int) -> tuple[World, NcclChannels]:
    world = World.open(Config.from_dict({"partitions": degree}))
    channels = open_channels(world, torch.device("cpu"))
    assert isinstance(channels, NcclChannels)
    return world, channels


def test_every_pair_keeps_its_order(pool: Pool, seed: int) -> None:
    pool.run(4, under_rules, mixed, NcclChannels, seed % 10_000, 9)


def far_ahead(seed: int, count: int) -> None:
    """Rank 0 sends all before rank 1 posts anything; both directions at once."""
    world, channels = opened(2)
    try:
        if world.rank == 0:
            start = time.perf_counter()
            answer = channels.post_recv(1, torch.empty(3))
            kept = [payload(seed, 0, 1, n) for n in range(count)]
            alive = [weakref.ref(t) for t in kept]
            for t in kept:
                channels.send(1, t)
            del kept, t
            assert time.perf_counter() - start < 0.5
            assert all(ref() is not None for ref in alive), "memory let go before it was sent"
            assert torch.equal(answer.wait(), torch.arange(3.0))
            channels.finish()
            assert all(ref() is None for ref in alive), "memory kept after it was sent"
        else:
            answers_late(channels, seed, count)
    finally:
        world.close()


def test_a_sender_far_ahead_does_not_wait(pool: Pool, seed: int) -> None:
    pool.run(2, under_rules, far_ahead, seed % 10_000, 50)


def dropped_handle(seed: int) -> None:
    world, channels = opened(2)
    try:
        mine = payload(seed, 0, 1, 0)
        if world.rank == 0:
            buffer = torch.empty_like(mine)
            alive = weakref.ref(buffer)
            handle = channels.post_recv(1, buffer)
            del handle, buffer
            assert alive() is not None, "the communicator may still write there"
        else:
            channels.send(0, mine)
            channels.finish()
    finally:
        world.close()


def test_memory_to_receive_into_outlives_its_handle(pool: Pool, seed: int) -> None:
    pool.run(2, under_rules, dropped_handle, seed % 10_000)


def crossed(seed: int) -> None:
    """Receives in another order than the sends, to show that this is noticed through smpar's own channels."""
    world, channels = opened(2)
    try:
        a, b = torch.zeros(3), torch.zeros(5)
        if world.rank == 0:
            channels.send(1, a)
            channels.send(1, b)
            channels.finish()
        else:
            for handle in [channels.post_recv(0, b), channels.post_recv(0, a)]:
                handle.wait()
    finally:
        world.close()


def test_a_swapped_pair_is_an_error(pool: Pool, seed: int) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, under_rules, crossed, seed)
    for outcome in failed.value.outcomes:
        assert outcome.error == CommError.__name__ and "smpar 0 to 1" in outcome.text, outcome
        assert "send float32[3] to rank 1" in outcome.text and "recv float32[5] from rank 0" in outcome.text
