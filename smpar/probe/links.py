"""Bandwidth and latency between ranks, as a pipeline sees them: over the channels that its transfers take.

first  ──── message ───▶ second        half a round trip, for each of several sizes;
       ◀─── message ────               seconds = latency + bytes / bandwidth goes through them
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from smpar.comm.channels import Channels
from smpar.comm.messages import CommGroup, allgather, barrier
from smpar.comm.world import World
from smpar.planner.cluster import Link
from smpar.probe.rounds import rounds

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)  # bytes of a message
_ENOUGH = 0.05  # seconds of round trips of one size, and not fewer than
_LEAST, _MOST = 5, 50  # round trips


@dataclass(frozen=True)
class Measured:
    """A link, and how far its measurements scatter: half of the largest messages' seconds lie within ``noise`` of
    their median, as a share of it."""

    link: Link
    noise: float


def measure_links(
    world: World,
    channels: Channels,
    host_of: Sequence[Hashable],
    done: Callable[[], None],
    sizes: Sequence[int] = SIZES,
) -> dict[tuple[int, int], Measured]:
    """Measure all pairs of ranks; both directions of a pair count as one. All ranks call this together.

    Args:
        world: one pipeline of all ranks.
        channels: of all its ranks.
        host_of: each rank's machine: pairs that share one are measured one after the other.
        done: called after each round.
        sizes: of messages, in bytes.

    Returns:
        on every rank, for each pair (a, b) with a < b.
    """
    found: dict[tuple[int, int], Measured] = {}
    for pairs in rounds(host_of):
        for pair in pairs:
            if world.rank in pair:
                seconds = [_half_trips(channels, world, pair, size) for size in sizes]
                if world.rank == pair[0]:
                    found[pair] = summary(sizes, seconds)
        barrier()
        done()
    return {pair: m for part in allgather(found, CommGroup.WORLD) for pair, m in part.items()}


def _half_trips(channels: Channels, world: World, pair: tuple[int, int], size: int) -> list[float]:
    """Seconds one way. The first rank of the pair decides how often, from a first trip that warms up."""
    leads, other = world.rank == pair[0], pair[world.rank == pair[0]]
    message = torch.zeros(size, dtype=torch.uint8, device=world.device)
    buffer = torch.empty_like(message)
    count = torch.zeros(1, dtype=torch.int64, device=world.device)

    def trip() -> float:
        _wait_for(world.device)
        start = time.perf_counter()
        if leads:
            channels.send(other, message)
            channels.post_recv(other, buffer).wait()
        else:
            channels.post_recv(other, buffer).wait()
            channels.send(other, buffer)
        _wait_for(world.device)
        seconds = time.perf_counter() - start
        channels.finish()
        return seconds / 2

    trip()
    if leads:
        count.fill_(min(_MOST, max(_LEAST, int(_ENOUGH / (2 * trip())))))
        channels.send(other, count)
    else:
        trip()
        channels.post_recv(other, count).wait()
    seconds = [trip() for _ in range(int(count))]
    channels.finish()
    return seconds


def measure_cards(world: World, channels: Channels, host_of: Sequence[Hashable], size: int) -> dict[Hashable, int]:
    """How many network cards each machine has for its ranks, as far as it shows: how many single streams' worth all
    its ranks can send at once. All ranks call this together.

        one     0 ═══▶ 2          all     0 ═══▶ 2      as fast each as the one: two cards;
                                          1 ═══▶ 3      half as fast: they share one

    Args:
        world: one pipeline of all ranks.
        channels: of all its ranks.
        host_of: each rank's machine.
        size: of messages, in bytes.

    Returns:
        for each machine that has several ranks and another such machine to send to.
    """
    hosts: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(host_of):
        hosts.setdefault(host, []).append(rank)
    several = [host for host, ranks in hosts.items() if len(ranks) > 1]
    if len(several) < 2:
        return {}
    found: dict[Hashable, int] = {}
    meetings = [(several[i], several[i + 1]) for i in range(0, len(several) - 1, 2)]
    for batch in (meetings, [(several[-1], several[0])] if len(several) % 2 else []):
        streams = [list(zip(hosts[a], hosts[b], strict=False)) for a, b in batch]
        one = _speeds(world, channels, [pairs[0] for pairs in streams], size)
        all_ = _speeds(world, channels, [pair for pairs in streams for pair in pairs], size)
        for meeting, pairs in zip(batch, streams, strict=True):
            cards = round(sum(all_[pair] for pair in pairs) / one[pairs[0]])
            for host in meeting:
                found.setdefault(host, min(len(pairs), max(1, cards)))
    return found


def _speeds(
    world: World, channels: Channels, pairs: Sequence[tuple[int, int]], size: int
) -> dict[tuple[int, int], float]:
    """Bytes/s of streams that run at the same time, as their first ranks see it; each rank is in one pair."""
    barrier()
    mine = {pair: _stream(channels, world, pair, size) for pair in pairs if world.rank in pair}
    parts = allgather({pair: speed for pair, speed in mine.items() if world.rank == pair[0]}, CommGroup.WORLD)
    return {pair: speed for part in parts for pair, speed in part.items()}


def _stream(channels: Channels, world: World, pair: tuple[int, int], size: int) -> float:
    """Bytes/s of messages from the first rank of the pair to the second, one behind the other."""
    leads, other = world.rank == pair[0], pair[world.rank == pair[0]]
    message = torch.zeros(size, dtype=torch.uint8, device=world.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=world.device)
    start = time.perf_counter()
    if leads:
        for _ in range(_LEAST):
            channels.send(other, message)
        channels.post_recv(other, answer).wait()
    else:
        for _ in range(_LEAST):
            channels.post_recv(other, message).wait()
        channels.send(other, answer)
    _wait_for(world.device)
    seconds = time.perf_counter() - start
    channels.finish()
    return _LEAST * size / seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(sizes: Sequence[int], seconds: Sequence[Sequence[float]]) -> Measured:
    """What the seconds of several trips for each size amount to."""
    largest = sorted(seconds[-1])
    middle = statistics.median(largest)
    noise = statistics.median(abs(s - middle) for s in largest) / middle
    return Measured(fit(sizes, [statistics.median(s) for s in seconds]), noise)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The straight line ``latency + bytes / bandwidth`` with the least sum of squared relative errors.

    Args:
        sizes: bytes, at least two different ones.
        seconds: of each, above 0.
    """
    # Each equation divided by its seconds: latency / s + (1 / bandwidth) * bytes / s = 1.
    a = sum(1 / s**2 for s in seconds)
    b = sum(n / s**2 for n, s in zip(sizes, seconds, strict=True))
    c = sum((n / s) ** 2 for n, s in zip(sizes, seconds, strict=True))
    p = sum(1 / s for s in seconds)
    q = sum(n / s for n, s in zip(sizes, seconds, strict=True))
    determinant = a * c - b * b
    latency, per_byte = (c * p - b * q) / determinant, (a * q - b * p) / determinant
    if latency < 0:  # long messages are slower than they should be
        latency, per_byte = 0.0, statistics.median(s / n for n, s in zip(sizes, seconds, strict=True))
    elif per_byte <= 0:  # the largest is no slower than the smallest: it gives a bound
        latency, per_byte = 0.0, seconds[-1] / sizes[-1]
    return Link(1 / per_byte, latency)
