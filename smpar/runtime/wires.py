"""Tensors between stages: packing, the inbox of expected messages, and the two kinds of wire."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import torch

from smpar.comm.buffers import BufferPool
from smpar.schedule import Message
from smpar.stage.record import MicrobatchProgram
from smpar.trace.outcome import Meta


class Pending(Protocol):
    def wait(self) -> None: ...


class Channels(Protocol):
    """One first-in-first-out channel per directed pair of the pipeline's ranks; memory to receive into."""

    buffers: BufferPool

    def post_recv(self, src: int, tensor: torch.Tensor, about: Message | None = None) -> Pending: ...

    def send(self, dst: int, tensor: torch.Tensor) -> None: ...

    def received(self, dst: int, count: int) -> None: ...

    def finish(self) -> None: ...


class NoChannels:
    """Those of a pipeline of one rank: nothing ever leaves it."""

    def post_recv(self, src: int, tensor: torch.Tensor) -> NoReturn:
        raise AssertionError(f"a pipeline of one rank receives from rank {src}")

    def send(self, dst: int, tensor: torch.Tensor) -> NoReturn:
        raise AssertionError(f"a pipeline of one rank sends to rank {dst}")

    def received(self, dst: int, count: int) -> None:
        pass

    def finish(self) -> None:
        pass


_SENT_AS_IS = frozenset({torch.float32, torch.float64, torch.int64})


def buffer_for(meta: Meta) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor to receive into, and its memory as flat bytes."""
    tensor = torch.empty_strided(meta.shape, _dense_stride(meta), dtype=meta.dtype, device=meta.device)
    return tensor, _flat(tensor)


def _buffer(meta: Meta, buffers: BufferPool) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor to receive into, and what the channel fills: the tensor itself where that is simple."""
    tensor = buffers.take(meta.shape, _dense_stride(meta), meta.dtype, meta.device)
    return tensor, tensor if _goes_as_it_is(meta) else _flat(tensor)


def pack(tensor: torch.Tensor, meta: Meta) -> torch.Tensor:
    """The tensor's memory as flat bytes, laid out as the receiver expects; copied only if it must be."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    stride = _dense_stride(meta)
    if tensor.stride() != stride:
        laid_out = torch.empty_strided(meta.shape, stride, dtype=meta.dtype, device=tensor.device)
        laid_out.copy_(tensor)
        tensor = laid_out
    return _flat(tensor)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@functools.lru_cache(maxsize=4096)
def _dense_stride(meta: Meta) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill a block of memory, else those of a contiguous one."""
    expected = 1
    for size, stride in sorted(zip(meta.shape, meta.stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(meta.shape, device="meta").stride()
        expected *= size
    return meta.stride


@functools.lru_cache(maxsize=4096)
def _goes_as_it_is(meta: Meta) -> bool:
    return meta.dtype in _SENT_AS_IS and _dense_stride(meta) == torch.empty(meta.shape, device="meta").stride()


class Inbox:
    """Messages in the order in which the schedule says they come, received ahead into buffers.

    Args:
        orders: sender's rank -> its messages to this one, first in first out.
        programs: by microbatch.
        done: message -> how many of this rank's own to its sender are received when it comes.
    """

    def __init__(
        self,
        channels: Channels,
        orders: Mapping[int, Sequence[Message]],
        programs: Sequence[MicrobatchProgram],
        done: Mapping[Message, int],
    ) -> None:
        self._done = done
        self._channels = channels
        self._programs = programs
        self._expected = {src: deque(messages) for src, messages in orders.items()}
        self._source = {message: src for src, messages in orders.items() for message in messages}
        self._posted: dict[Message, tuple[torch.Tensor, Pending | None]] = {}
        self._ahead: list[Message] = []

    def expect(self, message: Message) -> None:
        """Post the receive of a message, and of those that come before it."""
        if message in self._posted:
            return
        src = self._source[message]
        queue = self._expected[src]
        while queue:
            due = queue.popleft()
            program = self._programs[due.microbatch]
            meta = program.metas[program.shape.flows[due.flow].tensor]
            tensor, flat = _buffer(meta, self._channels.buffers)
            self._posted[due] = tensor, self._channels.post_recv(src, flat, due) if flat.numel() else None
            if due == message:
                return

    def prepare(self, messages: Iterable[Message]) -> None:
        """Messages to `expect` before this rank's next send, or at the next `catch_up`.

        gloo's thread holds a pair's lock while it writes what was sent: who then asks for a receive, waits for it.
        """
        self._ahead += messages

    def catch_up(self) -> None:
        """Expect what was prepared."""
        if self._ahead:
            for message in self._ahead:
                self.expect(message)
            self._ahead.clear()

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message's tensor."""
        self.expect(message)
        tensor, pending = self._posted.pop(message)
        if pending is not None:
            pending.wait()
            self._channels.received(self._source[message], self._done[message])
        return tensor


def send(channels: Channels, rank: int, tensor: torch.Tensor, meta: Meta) -> None:
    """Send a tensor to a rank without waiting for it."""
    tensor = tensor.detach()
    # The receiver knows the meta alone, so that must decide: both ends of a transfer name the same type and size.
    flat = tensor.resolve_neg().contiguous() if _goes_as_it_is(meta) else pack(tensor, meta)
    if flat.numel():
        channels.send(rank, flat)


def receive(channels: Channels, rank: int, meta: Meta) -> torch.Tensor:
    """Wait for a tensor from a rank."""
    tensor, flat = _buffer(meta, channels.buffers)
    if flat.numel():
        channels.post_recv(rank, flat).wait()
    return tensor


class ReplayWire:
    """Transfers of a microbatch that follows its program."""

    def __init__(self, channels: Channels, rank: int, inbox: Inbox, microbatch: int) -> None:
        self.rank = rank
        self._channels = channels
        self._inbox = inbox
        self._microbatch = microbatch

    def send(self, rank: int, tensor: torch.Tensor, meta: Meta) -> None:
        self._inbox.catch_up()
        send(self._channels, rank, tensor, meta)

    def receive(self, rank: int, flow: int, meta: Meta) -> torch.Tensor:
        return self._inbox.take(Message("activation", flow, self._microbatch))


class LiveWire:
    """Transfers of a microbatch in program order: both ends come to them at the same point of the program."""

    def __init__(self, channels: Channels, rank: int) -> None:
        self.rank = rank
        self._channels = channels

    def send(self, rank: int, tensor: torch.Tensor, meta: Meta) -> None:
        send(self._channels, rank, tensor, meta)

    def receive(self, rank: int, flow: int, meta: Meta) -> torch.Tensor:
        return receive(self._channels, rank, meta)
