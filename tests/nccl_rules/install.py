"""Makes smpar treat CPU tensors as it treats a GPU's: its channels and groups follow NCCL's rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

import smpar
from smpar.comm import channels
from smpar.comm.world import TIMEOUT, World
from smpar.config import Config
from smpar.mesh import Axis
from tests.nccl_rules.backend import BACKEND, register

_open, _process_group = World.open, World.process_group


@contextlib.contextmanager
def nccl_rules() -> Iterator[None]:
    """Within, ``smpar.init`` opens such a world.

    Under NCCL the groups of a world carry a GPU's tensors by NCCL, small messages by gloo. Here all of a group's
    collectives go by the rules, which is stricter: they are in one queue. Only the world's own group stays with gloo,
    as it carries messages from rank to rank, which are always the CPU's.
    """
    register()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def opened(config: Config, timeout: timedelta = TIMEOUT) -> World:
        world = _open(config, timeout)
        groups.clear()
        for axis in ("pp", "dp", "mp"):
            for ranks in world.mesh.groups(axis):
                if len(ranks) > 1 and ranks not in groups:
                    groups[ranks] = world.new_group(ranks, BACKEND, f"{axis} group {list(ranks)}")
        return world

    def process_group(world: World, axis: Axis) -> dist.ProcessGroup:
        ranks = tuple(world.group(axis))
        return groups[ranks] if axis != "world" and ranks in groups else _process_group(world, axis)

    with (
        mock.patch.dict(channels.IN_ORDER, {"cpu": BACKEND}),
        mock.patch.object(World, "open", opened),
        mock.patch.object(World, "process_group", process_group),
    ):
        try:
            yield
        finally:
            smpar.shutdown()


def under_rules(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)``, in a process where NCCL's rules hold; itself callable by name in another process."""
    with nccl_rules():
        return fn(*args)
