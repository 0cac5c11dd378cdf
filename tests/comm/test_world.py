"""Ranks, groups and messages on real processes, against the mesh, which test_mesh checks by brute force."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smpar import ranks
from smpar.comm import messages
from smpar.comm.messages import CommGroup, RankType
from smpar.comm.world import World, is_initialized, set_current
from smpar.config import Config
from smpar.errors import CommError, NotInitialized, SmparError
from smpar.mesh import AXES, Mesh
from tests.harness import Pool


def open_world(pp: int, tp: int = 1, placement: str = "cluster") -> World:
    degrees = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "placement_strategy": placement}
    world = World.open(Config.from_dict(degrees))
    set_current(world)
    return world


def groups_at_work(layouts: list[tuple[int, int, str]]) -> list[dict[str, Any]]:
    seen = []
    for pp, tp, placement in layouts:  # one process, several worlds after each other
        world = open_world(pp, tp, placement)
        found: dict[str, Any] = {"rank": ranks.rank(), "size": ranks.size()}
        for axis in AXES:
            total = torch.tensor([float(world.rank + 1)])
            dist.all_reduce(total, group=world.process_group(axis))
            found[axis] = (world.group(axis), world.axis_rank(axis), world.axis_size(axis), total.item())
        found["functions"] = (ranks.pp_rank(), ranks.tp_size(), ranks.get_mp_group(), ranks.dp_rank())
        found["sum over rdp"] = dist.get_process_group_ranks(ranks.get_rdp_process_group())
        seen.append(found)
        world.close()
        assert not dist.is_initialized() and not is_initialized()
    return seen


def test_groups_equal_the_mesh_and_can_be_made_anew(pool: Pool) -> None:
    layouts = [(2, 2, "cluster"), (4, 1, "spread"), (1, 2, "TDP"), (1, 1, "cluster"), (2, 1, "PDT")]
    for rank, seen in enumerate(pool.run(4, groups_at_work, layouts)):
        for (pp, tp, placement), found in zip(layouts, seen, strict=True):
            mesh = Mesh(4, pp, tp, placement)
            assert (found["rank"], found["size"]) == (rank, 4)
            for axis in AXES:
                group = mesh.group(axis, rank)
                expected = (list(group), mesh.index(axis, rank), len(group), float(sum(r + 1 for r in group)))
                assert found[axis] == expected, (axis, mesh)
            expected_functions = (mesh.coords(rank).pp, tp, list(mesh.group("mp", rank)), mesh.index("dp", rank))
            assert found["functions"] == expected_functions
            assert found["sum over rdp"] == list(mesh.group("rdp", rank))


def thing(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    big = torch.randn(1000, 10, generator=draw)
    return {"t": big, "view": big[3], "n": [seed, "é", None], "int8": torch.randint(0, 9, (5,), generator=draw).char()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["n"] == b["n"] and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in ("t", "view", "int8"))


def messages_at_work(seed: int) -> None:
    world = open_world(2, 2)  # cluster: ranks 0 1 are stage 0, ranks 2 3 stage 1
    me = world.rank
    try:
        # every rank gets every other's, in its group's order
        gathered = messages.allgather(thing(seed + me), CommGroup.WORLD)
        assert len(gathered) == 4 and all(same(x, thing(seed + r)) for r, x in enumerate(gathered))
        assert messages.allgather("x" * me, CommGroup.PP_GROUP) == ["x" * r for r in world.group("pp")]
        # two messages to the same rank stay in order, whatever the kind of rank
        if ranks.pp_rank() == 0:
            messages.send(thing(seed + me), 1, RankType.PP_RANK)
            messages.send("second", me + 2, RankType.WORLD_RANK)
        else:
            assert same(messages.recv_from(0, RankType.PP_RANK), thing(seed + me - 2))
            assert messages.recv_from(0, RankType.PP_RANK) == "second"
        # SMP's form of broadcast, and the collective one
        if ranks.tp_rank() == 1:
            messages.broadcast(("from", me), CommGroup.TP_GROUP)
        else:
            assert messages.recv_from(1, RankType.TP_RANK) == ("from", me + 1)
        got = messages.broadcast(("all", me), CommGroup.MP_GROUP, src=2)
        assert got == ("all", 2)
        # to itself
        messages.send(thing(seed), me, RankType.WORLD_RANK)
        assert same(messages.recv_from(ranks.tp_rank(), RankType.TP_RANK), thing(seed))
        with pytest.raises(CommError, match="itself"):
            messages.recv_from(me, RankType.WORLD_RANK)
        with pytest.raises(CommError, match="0 to 1"):
            messages.send(1, 2, RankType.PP_RANK)
        for barrier in (
            messages.barrier,
            messages.pp_barrier,
            messages.tp_barrier,
            messages.mp_barrier,
            messages.dp_barrier,
            messages.rdp_barrier,
        ):
            barrier()
    finally:
        world.close()


def test_messages(pool: Pool, seed: int) -> None:
    pool.run(4, messages_at_work, seed)


def test_a_view_does_not_bring_its_storage() -> None:
    big = torch.randn(100_000)
    assert len(messages.encode(big[:10])) < 5_000 < len(messages.encode(big))
    assert torch.equal(messages.decode(messages.encode(big[5:10])), big[5:10])
    assert messages.decode(messages.encode(torch.ones(9, requires_grad=True)[:3])).requires_grad


def barriers_wait(pause: float) -> float:
    import time

    world = open_world(1)
    try:
        messages.barrier()
        start = time.perf_counter()
        if world.rank == 1:
            time.sleep(pause)
        messages.barrier()
        return time.perf_counter() - start
    finally:
        world.close()


def test_a_barrier_waits_for_the_last(pool: Pool) -> None:
    assert min(pool.run(3, barriers_wait, 0.3)) >= 0.29


def alone() -> bool:
    world = open_world(1)
    try:
        assert (world.size, world.rank, world.watch) == (1, 0, None)
        assert messages.allgather("a", CommGroup.WORLD) == ["a"]
        assert messages.broadcast("b", CommGroup.MP_GROUP) == "b"
        assert messages.broadcast("b", CommGroup.MP_GROUP, src=0) == "b"
        messages.send("c", 0, RankType.PP_RANK)
        assert messages.recv_from(0, RankType.WORLD_RANK) == "c"
        messages.barrier()
        with world.guard(), world.translating():
            pass
        before = dist.is_initialized()
        total = torch.ones(2)
        dist.all_reduce(total, group=ranks.get_tp_process_group())
        return before
    finally:
        world.close()


def test_one_process_needs_no_torch_distributed(pool: Pool) -> None:
    assert pool.run(1, alone) == [False]


def joins(kind: str, path: str) -> None:
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind == "file":
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    for pp in (2, 1):
        world = open_world(pp)
        assert messages.allgather(rank, CommGroup.WORLD) == list(range(size))
        world.close()
        assert dist.is_initialized() and dist.group.WORLD is group  # the user's own stays
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["file", "environment"])
def test_a_process_group_that_exists_is_used_and_left(pool: Pool, kind: str, tmp_path: Any) -> None:
    pool.run(2, joins, kind, str(tmp_path / "store"))


def without_launcher() -> tuple[int, int, int]:
    import os

    for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(key)
    world = open_world(1)
    found = (world.local_rank, world.local_size, world.instance_id)
    world.close()
    return found


def test_local_ranks_are_found_by_host_name(pool: Pool) -> None:
    assert pool.run(3, without_launcher) == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]


def test_before_init_everything_says_so() -> None:
    for function in (ranks.rank, ranks.dp_size, ranks.get_pp_process_group, messages.barrier):
        with pytest.raises(NotInitialized, match="must run before"):
            function()
    assert not ranks.is_initialized()
    assert issubclass(NotInitialized, SmparError)


def test_encode_random_objects(seed: int) -> None:
    draw = random.Random(seed)
    obj = [draw.choice([draw.random(), "s" * draw.randint(0, 9), {draw.randint(0, 9): None}]) for _ in range(50)]
    assert messages.decode(bytearray(messages.encode(obj)) + b"\0\0") == obj
