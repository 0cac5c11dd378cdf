"""Messages between ranks: any picklable object, tensors inside too. Synchronous.

    broadcast(x, g) on one rank ──▶ recv_from(that rank, ...) on every other rank of g     (SMP's form)
    broadcast(x, g, src=0) on all ranks of g: each gets rank 0-of-g's x                    (collective form)
    send(x, dest, t) on one     ──▶ recv_from(src, t) on the other
    allgather(x, g) on all      ──▶ [x of g's rank 0, x of g's rank 1, ...]

A rank in these calls counts within the group that the `RankType` names: ``send(x, 1, RankType.PP_RANK)`` goes to the
second rank of the sender's pipeline group. Messages from one rank to another arrive in order.

On the wire a message is its length (8 bytes) and its pickle. Tensors that were on an accelerator arrive on the
receiver's own device, and a view brings its own elements only, not the storage behind it.
"""

from __future__ import annotations

import enum
import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from smpar.comm.world import World, current
from smpar.errors import CommError
from smpar.mesh import Axis

# Tags apart from 0, the default of torch.distributed.send, so that a user's own transfers do not mix with messages.
TAG = 7100


class CommGroup(enum.Enum):
    """A set of ranks: all, or this rank's group along one axis of the mesh."""

    WORLD = "world"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """What a rank number counts within."""

    WORLD_RANK = "world"
    PP_RANK = "pp"
    TP_RANK = "tp"
    MP_RANK = "mp"
    DP_RANK = "dp"
    RDP_RANK = "rdp"


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits until all ranks of the group are here.

    Raises:
        PeerFailed: another rank failed meanwhile.
    """
    world = current()
    axis = _axis(group)
    if world.axis_size(axis) == 1:
        return
    with world.translating():
        # A reduction of a CPU tensor: dist.barrier would pick NCCL, and with it the device, where there is one.
        dist.all_reduce(torch.zeros(1), group=world.process_group(axis))


def pp_barrier() -> None:
    """`barrier` of this rank's pipeline group."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """`barrier` of this rank's tensor-parallel group."""
    barrier(CommGroup.TP_GROUP)


def mp_barrier() -> None:
    """`barrier` of this rank's model-parallel group (one replica)."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """`barrier` of this rank's data-parallel group (all ranks with the same stage)."""
    barrier(CommGroup.DP_GROUP)


def rdp_barrier() -> None:
    """`barrier` of this rank's reduced data-parallel group (replicas of one shard)."""
    barrier(CommGroup.RDP_GROUP)


def send(obj: Any, dest: int, rank_type: RankType) -> None:
    """Sends ``obj`` to one rank, which calls `recv_from`; returns once it is received (at once if that is this rank).

    Raises:
        CommError: there is no such rank.
        PeerFailed: another rank failed meanwhile.
    """
    world = current()
    _deliver(world, encode(obj), [_global(world, dest, rank_type)])


def recv_from(src: int, rank_type: RankType) -> Any:
    """Receives what rank ``src`` sent here, by `send` or `broadcast`; waits for it.

    Raises:
        CommError: there is no such rank, or it is this rank and nothing was sent to itself.
        PeerFailed: another rank failed meanwhile.
    """
    world = current()
    rank = _global(world, src, rank_type)
    if rank == world.rank:
        if not world.mailbox:
            raise CommError(
                "a rank receives from itself only what it has sent to itself before",
                f"recv_from({src}, {rank_type.name}) on rank {world.rank}, nothing sent",
                f"call send(obj, {src}, RankType.{rank_type.name}) first",
            )
        return decode(world.mailbox.popleft())
    group = world.process_group("world")
    with world.translating():
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=rank, group=group, tag=TAG)
        data = bytearray(int(length))
        dist.recv(_bytes_of(data), src=rank, group=group, tag=TAG)
    return decode(data)


def broadcast(obj: Any, group: CommGroup, src: int | None = None) -> Any:
    """Sends ``obj`` to all other ranks of the group.

    SMP's form, without ``src``: one rank calls this, the others call ``recv_from`` with that rank. With ``src``, a rank
    within the group, all ranks of the group call this, and what ``src`` passed is returned on all of them.

    Returns:
        The object: ``obj`` itself on the sender.

    Raises:
        CommError: there is no rank ``src`` in the group.
        PeerFailed: another rank failed meanwhile.
    """
    world = current()
    axis = _axis(group)
    if src is not None and _global(world, src, RankType(axis)) != world.rank:
        return recv_from(src, RankType(axis))
    others = [rank for rank in world.group(axis) if rank != world.rank]
    if others:
        _deliver(world, encode(obj), others)
    return obj


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """The objects of all ranks of the group, in the order of their ranks; all of them call this.

    Raises:
        PeerFailed: another rank failed meanwhile.
    """
    world = current()
    axis = _axis(group)
    if world.axis_size(axis) == 1:
        return [obj]
    pg = world.process_group(axis)
    data = encode(obj)
    with world.translating():
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in world.group(axis)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=pg)
        longest = max(int(length) for length in lengths)
        parts = [bytearray(longest) for _ in lengths]
        padded = bytearray(data.ljust(longest, b"\0"))
        dist.all_gather([_bytes_of(part) for part in parts], _bytes_of(padded), group=pg)
    return [decode(part) for part in parts]  # a pickle knows its end: padding is not read


def encode(obj: Any) -> bytes:
    """``obj`` pickled, tensors in their own elements only."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def decode(data: bytes | bytearray) -> Any:
    """Reads what `encode` wrote."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        if obj.device.type not in ("cpu", "meta"):
            return _on_own_device, (obj.detach().cpu(), obj.requires_grad)
        if obj.device.type == "cpu" and obj.numel() * obj.element_size() < obj.untyped_storage().nbytes():
            return _tensor, (obj.detach().clone(), obj.requires_grad)
        return NotImplemented


def _tensor(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return value.requires_grad_(requires_grad)


def _on_own_device(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return value.to(current().device).requires_grad_(requires_grad)


def _bytes_of(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)  # the same memory


def _deliver(world: World, data: bytes, ranks: list[int]) -> None:
    if world.rank in ranks:
        world.mailbox.append(data)
    ranks = [rank for rank in ranks if rank != world.rank]
    if not ranks:
        return
    group = world.process_group("world")
    payload = _bytes_of(bytearray(data))
    length = torch.tensor([payload.numel()])
    with world.translating():
        # All on their way before any is waited for: a receiver that comes late delays nobody else.
        works = [dist.isend(t, dst=rank, group=group, tag=TAG) for rank in ranks for t in (length, payload)]
        for work in works:
            if work is not None:
                work.wait()


def _axis(group: CommGroup) -> Axis:
    axis: Axis = group.value
    return axis


def _global(world: World, rank: int, rank_type: RankType) -> int:
    """The global rank of number ``rank`` among those that ``rank_type`` names."""
    ranks = world.group(rank_type.value)
    if not 0 <= rank < len(ranks):
        raise CommError(
            f"a {rank_type.name} is at least 0 and below the group's size",
            f"rank {rank}, with {len(ranks)} ranks: {ranks}",
            f"use a number from 0 to {len(ranks) - 1}, or another RankType",
        )
    return ranks[rank]
