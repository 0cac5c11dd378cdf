"""Which ranks hold the same of a model, each with samples of its own or with a copy of another's.

With tensor-parallel degree 2 and two replicas, of the ranks of one stage (ranks 0 to 3, placement DPT):

    whole on every rank   dp  (0 1 2 3)      replicas ((0, 1), (2, 3))
    sliced                rdp (0 2), (1 3)   replicas ((0,), (1,))
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.distributed as dist

from smpar.comm.world import World
from smpar.mesh import Axis


@dataclass(frozen=True)
class Peers:
    """The ranks over which a gradient is averaged.

    Attributes:
        group: their process group; None if this rank is alone.
        replicas: the ranks of each replica, as numbers within the group.
    """

    group: dist.ProcessGroup | None = None
    replicas: tuple[tuple[int, ...], ...] = ((0,),)

    @classmethod
    def along(cls, world: World, axis: Axis) -> Peers:
        """This rank's group along ``dp`` or ``rdp``."""
        ranks = world.group(axis)
        if len(ranks) == 1:
            return cls()
        replica_of = [world.mesh.coords(rank).rdp for rank in ranks]
        replicas = (tuple(i for i, of in enumerate(replica_of) if of == replica) for replica in range(world.mesh.rdp))
        return cls(world.process_group(axis), tuple(replicas))

    @functools.cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.replicas))
