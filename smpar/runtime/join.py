"""Replicas with unequal numbers of batches: those that are done take part in the others' collectives.

replica 0   step  step  step
replica 1   step  done  shadow   done   both leave with replica 0's parameters
            meet  meet  meet     meet   who is there; it starts each step, and ends when nobody is
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from smpar.comm.peers import Peers
from smpar.errors import EndedEarly, JoinError


class Joining:
    """What the replicas tell each other while one of them may have no more batches.

    Args:
        peers: the data-parallel group.
        device: of its tensors.
        by_replicas: whether gradients are divided by the number of replicas; else by those that have a batch.
        throw: whether all stop when the first has no more.

    Attributes:
        active: the replicas that are in the present step.
    """

    def __init__(self, peers: Peers, device: torch.device, by_replicas: bool, throw: bool) -> None:
        assert peers.group is not None
        self._peers, self._group, self._device = peers, peers.group, device
        self._by_replicas, self._throw = by_replicas, throw
        self._rank = dist.get_rank(self._group)
        self.active: list[int] = list(range(len(peers.replicas)))

    def divisor(self, peers: Peers) -> int:
        """What sums over these ranks, as many of each replica, are divided by."""
        replicas = len(peers.replicas)
        return peers.size // replicas * (replicas if self._by_replicas else max(1, len(self.active)))

    def meet(self, here: bool) -> bool:
        """A step starts, or this replica has no more.

        Args:
            here: whether this replica has a batch.

        Returns:
            whether any has one, and the step goes on.

        Raises:
            JoinError: of some replica one tensor-parallel rank has a batch, another has none.
        """
        there = torch.zeros(self._peers.size, dtype=torch.int32, device=self._device)
        there[self._rank] = here
        self._group.allreduce([there]).wait()
        has = there.tolist()
        replicas = [[has[rank] for rank in ranks] for ranks in self._peers.replicas]
        for replica, ranks in enumerate(replicas):
            if len(set(ranks)) > 1:
                raise JoinError(f"replica {replica}, where {sum(ranks)} of {len(ranks)} tensor-parallel ranks have one")
        self.active = [replica for replica, ranks in enumerate(replicas) if ranks[0]]
        return bool(self.active) and not self._stopped

    @property
    def _stopped(self) -> bool:
        return self._throw and 0 < len(self.active) < len(self._peers.replicas)

    def check(self) -> None:
        """After a meeting, and outside of any guard, as no rank has failed and the job may go on.

        Raises:
            EndedEarly: a replica has no more batches, others have, and all are to stop.
        """
        if self._stopped:
            replicas = range(len(self._peers.replicas))
            done = [replica for replica in replicas if replica not in self.active]
            raise EndedEarly(f"replicas {', '.join(map(str, done))} of {len(replicas)} have no more batches")

    def announce(self, reduces: bool) -> bool:
        """A step has run its backwards: whether any replica reduces."""
        wanted = torch.tensor([int(reduces)], dtype=torch.int32, device=self._device)
        self._group.allreduce([wanted]).wait()
        return bool(wanted.item())

    def last_of_all(self, last: bool) -> int:
        """The replica whose parameters are the newest: the highest of the last ones."""
        mine = next(replica for replica, ranks in enumerate(self._peers.replicas) if self._rank in ranks)
        replica = torch.tensor([mine if last else -1], dtype=torch.int32, device=self._device)
        dist.all_reduce(replica, dist.ReduceOp.MAX, group=self._group)
        return int(replica.item())
