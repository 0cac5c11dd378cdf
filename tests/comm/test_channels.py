"""Channels: the n-th receive from a rank gets its n-th send, each direction for itself, and nothing waits in send."""

from __future__ import annotations

import random
import threading
import time

import torch

from smpar.comm.channels import KEPT, Channels, GlooChannels, open_channels
from smpar.comm.world import World
from smpar.config import Config
from tests.harness import Pool


def payload(seed: int, src: int, dst: int, n: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed + 1009 * src + 9176 * dst + 31 * n)
    sizes = (1, 7, 1000, 100_000)
    return torch.randn(sizes[(seed + src + 3 * dst + n) % 4], 2, generator=draw)


def mixed(kind: type[Channels], seed: int, count: int) -> None:
    """Four ranks, each with each, in orders of their own."""
    world = World.open(Config.from_dict({"partitions": 4}))
    channels, rank = open_channels(world, torch.device("cpu")), world.rank
    assert isinstance(channels, kind)
    try:
        _mixed(channels, rank, seed, count)
    finally:
        world.close()


def _mixed(channels: Channels, rank: int, seed: int, count: int) -> None:
    draw = random.Random(seed + rank)  # each rank mixes its own sends and receives differently
    for step in range(2):
        peers = [r for r in range(4) if r != rank]
        to_send = [dst for dst in peers for _ in range(count)]
        draw.shuffle(to_send)
        handles = {}
        for n in range(count):
            for src in draw.sample(peers, 3):
                buffer = torch.empty_like(payload(seed + step, src, rank, n))
                handles[src, n] = channels.post_recv(src, buffer)
        sent = dict.fromkeys(peers, 0)
        for dst in to_send:
            channels.send(dst, payload(seed + step, rank, dst, sent[dst]))
            sent[dst] += 1
        order = list(handles)
        draw.shuffle(order)
        for src, n in order:
            assert torch.equal(handles[src, n].wait(), payload(seed + step, src, rank, n)), (src, n)
        channels.finish()


def test_every_pair_keeps_its_order(pool: Pool, seed: int) -> None:
    pool.run(4, mixed, GlooChannels, seed % 10_000, 9)


def answers_late(channels: Channels, seed: int, count: int) -> None:
    """Rank 1, while rank 0 is far ahead: a second late, it answers, and only then receives."""
    time.sleep(1.0)
    channels.send(0, torch.arange(6.0)[::2] / 2)  # not contiguous
    for n in range(count):
        expected = payload(seed, 0, 1, n)
        assert torch.equal(channels.post_recv(0, torch.empty_like(expected)).wait(), expected), n
    channels.finish()


def far_ahead(seed: int, count: int) -> int:
    """Rank 0 sends before rank 1 posts anything, then rank 1 answers in the other direction before it receives."""
    world = World.open(Config.from_dict({"partitions": 2}))
    channels = GlooChannels(world)
    threads = 0
    try:
        if world.rank == 0:
            start = time.perf_counter()
            answer = channels.post_recv(1, torch.empty(3))
            for n in range(count):
                channels.send(1, payload(seed, 0, 1, n))
            took = time.perf_counter() - start
            assert took < 0.5, took
            assert torch.equal(answer.wait(), torch.arange(3.0))
            threads = sum(t.name.startswith("smpar-sends") for t in threading.enumerate())
            channels.finish()
            assert not any(t.name.startswith("smpar-sends") for t in threading.enumerate())
        else:
            answers_late(channels, seed, count)
    finally:
        world.close()
    return threads


def test_a_sender_far_ahead_does_not_wait(pool: Pool, seed: int) -> None:
    assert pool.run(2, far_ahead, seed % 10_000, 5)[0] == 0  # few sends: no thread
    assert pool.run(2, far_ahead, seed % 10_000, KEPT + 20)[0] == 1


def memory_goes(count: int) -> None:
    import weakref

    world = World.open(Config.from_dict({"partitions": 2}))
    channels = GlooChannels(world)
    try:
        if world.rank == 0:
            alive = []
            for _ in range(count):
                tensor = torch.ones(1000)
                alive.append(weakref.ref(tensor))
                channels.send(1, tensor)
                del tensor
            end = time.perf_counter() + 10
            while (kept := sum(ref() is not None for ref in alive)) > KEPT + 1 and time.perf_counter() < end:
                time.sleep(0.01)
            assert KEPT <= kept <= KEPT + 1, kept  # received ones go before finish; the reaper may hold one
            channels.finish()
            assert not any(ref() is not None for ref in alive)
        else:
            for _ in range(count):
                channels.post_recv(0, torch.empty(1000)).wait()
    finally:
        world.close()


def test_what_was_received_is_let_go_before_the_step_ends(pool: Pool) -> None:
    pool.run(2, memory_goes, 100)


def test_a_pipeline_of_one_has_no_channels(pool: Pool) -> None:
    pool.run(1, one)


def one() -> None:
    world = World.open(Config.from_dict({}))
    assert open_channels(world, torch.device("cpu")) is None
    world.close()
