"""Both ends of a transfer agree on type and size from the meta alone, and the receiver gets the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from smpar.comm.buffers import BufferPool
from smpar.runtime.wires import receive, send
from smpar.trace.outcome import meta_of


class Loop:
    """Channels to oneself: memory goes as it is, to a receiver that must ask for the same type and size."""

    def __init__(self) -> None:
        self._sent: list[Tensor] = []
        self.buffers = BufferPool()

    def send(self, dst: int, tensor: Tensor) -> None:
        assert tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        self._sent.append(tensor)

    def post_recv(self, src: int, tensor: Tensor, about: object = None) -> Loop:
        (sent,) = self._sent
        assert (sent.dtype, sent.numel()) == (tensor.dtype, tensor.numel())
        tensor.view(-1).copy_(sent.view(-1))
        return self

    def wait(self) -> None: ...

    def received(self, dst: int, count: int) -> None: ...

    def finish(self) -> None: ...


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t[:, :1].expand(-1, 7),
        lambda t: torch._neg_view(t),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t.view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        lambda t: t > 0,
        lambda t: t[0, 0],
        lambda t: t.bfloat16()[1:],
        lambda t: t.argsort(1),
        lambda t: t[:0],
    ],
)
def test_what_arrives_is_what_was_sent(view: Callable[[Tensor], Tensor], seed: int) -> None:
    tensor = view(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)))
    channels, meta = Loop(), meta_of(tensor)
    send(channels, 0, tensor, meta)
    got = receive(channels, 0, meta)
    assert torch.equal(got, tensor) and got.dtype == tensor.dtype
