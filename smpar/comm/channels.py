"""Tensors from rank to rank: one channel per directed pair, first in, first out, no metadata.

    rank 0: send(1, a), send(1, b)          rank 1: x = post_recv(0, buffer), y = post_recv(0, other)
                                                    x.wait() has a, y.wait() has b: the n-th receive gets the n-th send

Directions and pairs are independent of each other. Both ends take order, shapes and types from the schedule.
A send never waits for its consumer, on either kind of channel:

    GlooChannels    one gloo group for all pairs; its tags and pairs keep messages apart
    NcclChannels    one communicator per directed pair: a queue of its own, on CUDA a stream of its own

What gloo does, measured on torch 2.13: ``send`` returns after some 10 us, and completes only once the peer has posted
the matching receive, whatever the size; whether it has completed cannot be asked, only waited for. So a send must not
be waited for where the peer may still be busy, and what was sent is kept until it may.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
import torch.distributed as dist

from smpar.comm.world import World
from smpar.errors import CommError

TAG = 7200
KEPT = 32  # sends to one peer kept before a thread starts to wait for the oldest and let them go


class Handle(Protocol):
    """A receive under way."""

    def wait(self) -> torch.Tensor:
        """The tensor, filled.

        Raises:
            CommError: the connection ended.
        """
        ...


class Channels(Protocol):
    """Point-to-point transfers of one rank with its peers, named by global rank."""

    def post_recv(self, src: int, tensor: torch.Tensor) -> Handle:
        """Starts the next receive from ``src`` into ``tensor`` (contiguous); do not read it before ``wait``."""
        ...

    def send(self, dst: int, tensor: torch.Tensor) -> None:
        """Starts the next send to ``dst`` and returns; do not change ``tensor`` before ``finish``."""
        ...

    def received(self, dst: int, count: int) -> None:
        """Tells that ``dst`` has received the first ``count`` sends since the last ``finish``: they may be let go."""
        ...

    def finish(self) -> None:
        """Waits until all sends are received: at the end of a step."""
        ...


# Device type -> the backend whose communicators are queues, each in one order; gloo carries what is not named here.
IN_ORDER = {"cuda": "nccl"}


def open_channels(world: World, device: torch.device) -> Channels | None:
    """Channels for tensors on ``device``, among all ranks of this rank's pipeline group; None if it is alone there.

    All ranks of the world call this together.
    """
    if world.axis_size("pp") == 1:
        return None
    backend = IN_ORDER.get(device.type)
    return GlooChannels(world) if backend is None else NcclChannels(world, device, backend)


class _Transfers(Protocol):
    """The two members of torch's gloo backend that are used; its stub lacks them."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> dist.Work: ...


class _GlooHandle:
    __slots__ = ("_tensor", "_work")

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> torch.Tensor:
        _wait(self._work)
        return self._tensor


class GlooChannels:
    """Channels over the world's gloo group, tag `TAG`."""

    def __init__(self, world: World) -> None:
        # The backend itself: torch.distributed.isend adds checks and look-ups, some 10 us each.
        self._gloo = cast(_Transfers, world.process_group("world")._get_backend(torch.device("cpu")))
        self._sent: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}
        self._gone: dict[int, int] = {}  # sends to each peer that are not kept any more
        self._reapers: dict[int, _Reaper] = {}

    def post_recv(self, src: int, tensor: torch.Tensor) -> _GlooHandle:
        """See `Channels.post_recv`."""
        return _GlooHandle(_start(self._gloo.recv, tensor, src), tensor)

    def send(self, dst: int, tensor: torch.Tensor) -> None:
        """See `Channels.send`."""
        tensor = tensor.contiguous()
        sent = self._sent.get(dst)
        if sent is None:
            sent = self._sent[dst] = deque()
        sent.append((_start(self._gloo.send, tensor, dst), tensor))
        if len(sent) > KEPT:
            if dst not in self._reapers:
                self._reapers[dst] = _Reaper(dst)
            self._reapers[dst].take(*sent.popleft())
            self._gone[dst] = self._gone.get(dst, 0) + 1

    def received(self, dst: int, count: int) -> None:
        """See `Channels.received`; waiting for these sends takes no time.

        Raises:
            CommError: the connection ended.
        """
        sent, gone = self._sent.get(dst, ()), self._gone.get(dst, 0)
        while sent and gone < count:
            _wait(sent.popleft()[0])
            gone += 1
        self._gone[dst] = gone

    def finish(self) -> None:
        """See `Channels.finish`.

        Raises:
            CommError: a connection ended.
        """
        for reaper in self._reapers.values():
            reaper.finish()
        self._reapers.clear()
        self._gone.clear()
        for sent in self._sent.values():
            while sent:
                _wait(sent.popleft()[0])


class _Reaper:
    """A thread that waits for old sends to one peer, so that their memory goes before the step ends.

    Only a rank that is far ahead of its peer gets one (`KEPT`), and it costs the main thread nothing but the start.
    """

    def __init__(self, dst: int) -> None:
        self._queue: queue.SimpleQueue[tuple[dist.Work, torch.Tensor] | None] = queue.SimpleQueue()
        self._error: CommError | None = None
        self._thread = threading.Thread(target=self._run, name=f"smpar-sends-to-{dst}", daemon=True)
        self._thread.start()

    def take(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._queue.put((work, tensor))

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                _wait(item[0])
            except CommError as error:
                self._error = error
            del item


class _NcclHandle:
    __slots__ = ("_open", "_stream", "_tensor", "_work")

    def __init__(self, work: dist.Work, tensor: torch.Tensor, unfinished: set[_NcclHandle]) -> None:
        self._work, self._tensor, self._open = work, tensor, unfinished
        self._stream = _current_stream(tensor)
        unfinished.add(self)

    def wait(self) -> torch.Tensor:
        _wait(self._work)
        self._open.discard(self)
        here = _current_stream(self._tensor)
        if here is not None and here != self._stream:
            # It was allocated on the stream of its post: when freed, that stream would take it again at once.
            self._tensor.record_stream(here)
        return self._tensor


class NcclChannels:
    """Channels whose communicators are queues: one of two ranks, hence one stream, per directed pair of a pipeline.

    One communicator for both directions, or for all pairs, would order what must be independent, and hang.

        rank 0's host    send(1, a) ── post_recv(1, b) ─────────── b.wait() ── next work ── finish()
        its streams
          current        makes a ─┐                                ┌▶ uses b             ┌▶ step ends
          0 to 1                  └▶ sends a (blocked till rank 1 receives) ─────────────┘
          1 to 0                        receives b ────────────────┘

    Every arrow is an event on which a stream waits; the host waits for none of them. So memory must outlive what the
    host has long asked for:

    * What is sent is kept until the send is done. The current stream may free it only behind an event that says so:
      at `finish` it waits for the send, so that memory freed after that is reused behind it.
    * What is received is allocated on the current stream, which the communicator's stream waits for before it writes:
      earlier users of that memory are done by then. It is kept until `wait` has put the current stream behind the
      write; a handle that is dropped before, as when a step fails, leaves it here.

    NCCL connects a communicator when it is first used, and its host waits there for the peer's: in the midst of a
    schedule two ranks could each wait in another pair. So all pairs connect here, in one order.

    Args:
        world: all its ranks make channels together.
        device: where the tensors are.
        backend: name of a backend of torch.distributed.
    """

    def __init__(self, world: World, device: torch.device, backend: str = "nccl") -> None:
        self._rank = world.rank
        self._out: dict[int, dist.ProcessGroup] = {}
        self._in: dict[int, dist.ProcessGroup] = {}
        self._sent: deque[tuple[dist.Work, torch.Tensor, torch.cuda.Stream | None]] = deque()
        self._unfinished: set[_NcclHandle] = set()
        for ranks in world.mesh.groups("pp"):
            for src, dst in itertools.permutations(ranks, 2):
                pair = world.new_group([src, dst], backend, f"smpar {src} to {dst}")
                if world.rank == src:
                    self._out[dst] = pair
                    self.send(dst, torch.zeros(1, device=device))
                elif world.rank == dst:
                    self._in[src] = pair
                    self.post_recv(src, torch.empty(1, device=device)).wait()
        self.finish()

    def post_recv(self, src: int, tensor: torch.Tensor) -> _NcclHandle:
        """See `Channels.post_recv`.

        Raises:
            CommError: the connection ended.
        """
        with _translated():
            work = self._in[src].recv([tensor], int(src > self._rank), 0)
        return _NcclHandle(work, tensor, self._unfinished)

    def send(self, dst: int, tensor: torch.Tensor) -> None:
        """See `Channels.send`.

        Raises:
            CommError: the connection ended.
        """
        tensor = tensor.contiguous()
        with _translated():
            work = self._out[dst].send([tensor], int(dst > self._rank), 0)
        self._sent.append((work, tensor, _current_stream(tensor)))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def received(self, dst: int, count: int) -> None:
        """See `Channels.received`: a finished send is seen as such here."""

    def finish(self) -> None:
        """See `Channels.finish`; on CUDA the current stream waits, not the host.

        Raises:
            CommError: a connection ended.
        """
        kept: deque[tuple[dist.Work, torch.Tensor, torch.cuda.Stream | None]] = deque()
        while self._sent:
            work, tensor, stream = self._sent.popleft()
            _wait(work)
            if stream != _current_stream(tensor) and not work.is_completed():
                kept.append((work, tensor, stream))  # its own stream is not behind the send, and would reuse it
        self._sent = kept


def _current_stream(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _start(transfer: Callable[[list[torch.Tensor], int, int], dist.Work], tensor: torch.Tensor, peer: int) -> dist.Work:
    try:
        return transfer([tensor], peer, TAG)
    except RuntimeError as error:
        raise _ended(error) from error


def _wait(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _ended(error) from error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _ended(error) from error


def _ended(error: RuntimeError) -> CommError:
    return CommError(
        "both ranks of a transfer must go on until it is done",
        str(error).split("\n")[0],
        "look for the first error among the other ranks' logs",
    )
