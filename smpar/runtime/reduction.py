"""Gradients that several ranks share: tied over stages, or replicated over data-parallel ranks.

A step's own gradients are reduced once, at its end. What the parameters held before (from earlier steps, when
the user accumulates) is set aside meanwhile, since it has been reduced already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from smpar.runtime.wires import Channels
from smpar.stage.layout import Layout

_BUCKET = 25 << 20  # bytes that are reduced at once


@contextmanager
def own_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Set the present gradients aside, and add them to the new ones at the end."""
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    for p, _ in before:
        p.grad = None
    yield
    with torch.no_grad():
        for p, grad in before:
            assert grad is not None
            p.grad = grad if p.grad is None else grad.add_(p.grad)


def sum_tied(parameters: Sequence[torch.nn.Parameter], layout: Layout, channels: Channels, rank: int) -> None:
    """Sum the gradients of parameters that several ranks of a pipeline hold; each holder ends with the same bits.

    The lowest holder adds the others' in the order of their ranks and sends the sum back.
    """
    groups: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
    for p in parameters:
        holders = layout.holding(p)
        if len(holders) > 1 and p.requires_grad:
            groups.setdefault(holders, []).append(p)
    for holders, members in sorted(groups.items(), key=lambda item: item[0]):
        if rank not in holders:
            continue
        owner = holders[0]
        mine = torch.tensor([p.grad is not None for p in members], dtype=torch.uint8)
        if rank != owner:
            channels.send(owner, mine)
            _send_gradients(channels, owner, members)
            total = _receive(channels, owner, torch.empty_like(mine))
        else:
            total = mine.clone()
            for other in holders[1:]:
                theirs = _receive(channels, other, torch.empty_like(mine))
                with torch.no_grad():
                    for p, has in zip(members, theirs.tolist(), strict=True):
                        if has:
                            grad = _receive(channels, other, torch.empty(p.shape, dtype=p.dtype, device=p.device))
                            p.grad = grad if p.grad is None else _dense(p.grad).add(grad)
                total |= theirs
            for other in holders[1:]:
                channels.send(other, total)
                _send_gradients(channels, other, members)
        if rank != owner:
            for p, has in zip(members, total.tolist(), strict=True):
                if has:
                    p.grad = _receive(channels, owner, torch.empty(p.shape, dtype=p.dtype, device=p.device))


def _send_gradients(channels: Channels, stage: int, parameters: Iterable[torch.nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            channels.send(stage, _dense(p.grad).contiguous())


def _receive(channels: Channels, stage: int, into: torch.Tensor) -> torch.Tensor:
    channels.post_recv(stage, into).wait()
    return into


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.layout is not torch.strided else grad


def average_replicas(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup, size: int) -> None:
    """Average gradients over the data-parallel group, in buckets of one dtype.

    A parameter that has a gradient on some replicas only counts as zero on the others.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if not wanted:
        return
    present = torch.tensor([p.grad is not None for p in wanted], dtype=torch.int32, device=wanted[0].device)
    dist.all_reduce(present, group=group)
    buckets: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for p, count in zip(wanted, present.tolist(), strict=True):
        if count:
            buckets.setdefault(p.dtype, []).append(p)
    for same in buckets.values():
        bucket: list[torch.nn.Parameter] = []
        filled = 0
        for p in same:
            bucket.append(p)
            filled += p.numel() * p.element_size()
            if filled >= _BUCKET:
                _reduce(bucket, group, size)
                bucket, filled = [], 0
        if bucket:
            _reduce(bucket, group, size)


@torch.no_grad()
def _reduce(bucket: list[torch.nn.Parameter], group: dist.ProcessGroup, size: int) -> None:
    grads = [torch.zeros_like(p) if p.grad is None else _dense(p.grad) for p in bucket]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    flat /= size
    for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        p.grad = part.view_as(p)  # a new tensor: the old one may still be on its way to another stage
