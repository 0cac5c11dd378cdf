"""Channels of a pipeline that can be watched: each message gets a number, the same at both ends, without being asked.

rank 0   send(1, a)   is message 0>1#0             post_recv(0, b)   receives message 0>1#0   on rank 1
         send(1, c)   is message 0>1#1             post_recv(0, d)   receives message 0>1#1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from smpar.comm.buffers import BufferPool
from smpar.comm.channels import Channels
from smpar.comm.world import World
from smpar.observe.spans import Spans

if TYPE_CHECKING:
    from smpar.schedule import Message


class _Pending(Protocol):
    def wait(self) -> Any: ...


class StageChannels:
    """Channels of this rank whose ends are named by their place in the pipeline.

    Args:
        channels: between ranks.
        world: says which ranks these are.
        spans: where messages and waits are noted, while it is on.

    Attributes:
        buffers: memory to receive into.
    """

    def __init__(self, channels: Channels, world: World, spans: Spans) -> None:
        self.buffers = BufferPool()
        self._channels = channels
        self._ranks = world.group("pp")
        self._rank = world.rank
        self._device = world.device
        self._spans = spans
        self._sent = [0] * len(self._ranks)
        self._received = [0] * len(self._ranks)

    def post_recv(self, src: int, tensor: torch.Tensor, about: Message | None = None) -> _Pending:
        """Start the next receive from ``src``; ``about`` is what it will be called."""
        pending: _Pending
        if tensor.device.type == self._device.type:
            pending = self._channels.post_recv(self._ranks[src], tensor)
        else:
            staged = torch.empty_like(tensor, device=self._device)
            pending = _Staged(self._channels.post_recv(self._ranks[src], staged), staged, tensor)
        number = self._received[src]
        self._received[src] = number + 1
        if not self._spans.on:
            return pending
        peer = self._ranks[src]
        what = f"{about.kind} {about.flow} of microbatch {about.microbatch}" if about is not None else "message"
        return _Watched(pending, self._spans, f"wait for {what} from rank {peer}", f"{peer}>{self._rank}#{number}")

    def send(self, dst: int, tensor: torch.Tensor) -> None:
        """Start the next send to ``dst``."""
        tensor = tensor.to(self._device)  # small messages about a program are made on the CPU
        number = self._sent[dst]
        self._sent[dst] = number + 1
        peer = self._ranks[dst]
        if not self._spans.on:
            self._channels.send(peer, tensor)
            return
        size = tensor.numel() * tensor.element_size()
        with self._spans.send(f"send to rank {peer}", flow=f"{self._rank}>{peer}#{number}", bytes=size):
            self._channels.send(peer, tensor)

    def received(self, dst: int, count: int) -> None:
        """``dst`` has received the first ``count`` sends of this step."""
        self._channels.received(self._ranks[dst], count)

    def finish(self) -> None:
        """Wait until all sends are received."""
        with self._spans.wait("wait for sends to be received"):
            self._channels.finish()
        self.buffers.trim()


class _Staged:
    """A receive into memory of the device that the channel needs, then copied to where it was asked for."""

    __slots__ = ("_into", "_pending", "_staged")

    def __init__(self, pending: _Pending, staged: torch.Tensor, into: torch.Tensor) -> None:
        self._pending, self._staged, self._into = pending, staged, into

    def wait(self) -> None:
        self._pending.wait()
        self._into.copy_(self._staged)


class _Watched:
    """A receive whose wait is noted."""

    __slots__ = ("_flow", "_name", "_pending", "_spans")

    def __init__(self, pending: _Pending, spans: Spans, name: str, flow: str) -> None:
        self._pending, self._spans, self._name, self._flow = pending, spans, name, flow

    def wait(self) -> None:
        with self._spans.wait(self._name, flow=self._flow):
            self._pending.wait()
