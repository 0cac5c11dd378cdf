"""Replicas with unequal numbers of batches: those that are done take part in the others' collectives.

replica 0   step  step  step
replica 1   step  done  shadow   done   both leave with replica 0's parameters
            meet  meet  meet     meet   who is there; it starts each step, and ends when nobody is
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from smpar.errors import EndedEarly


class Joining:
    """What the replicas tell each other while one of them may have no more batches.

    Args:
        group, replicas: the data-parallel group and its size.
        device: of its tensors.
        by_replicas: whether gradients are divided by the number of replicas; else by those that have a batch.
        throw: whether all stop when the first has no more.

    Attributes:
        active: the replicas that are in the present step, as ranks of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, replicas: int, device: torch.device, by_replicas: bool, throw: bool
    ) -> None:
        self._group, self._replicas, self._device = group, replicas, device
        self._by_replicas, self._throw = by_replicas, throw
        self.active: list[int] = list(range(replicas))

    @property
    def divisor(self) -> int:
        """What sums over the replicas are divided by."""
        return self._replicas if self._by_replicas else max(1, len(self.active))

    def meet(self, here: bool) -> bool:
        """A step starts, or this replica has no more.

        Args:
            here: whether this replica has a batch.

        Returns:
            whether any has one, and the step goes on.
        """
        there = torch.zeros(self._replicas, dtype=torch.int32, device=self._device)
        there[dist.get_rank(self._group)] = here
        self._group.allreduce([there]).wait()
        self.active = [rank for rank, is_there in enumerate(there.tolist()) if is_there]
        return bool(self.active) and not self._stopped

    @property
    def _stopped(self) -> bool:
        return self._throw and 0 < len(self.active) < self._replicas

    def check(self) -> None:
        """After a meeting, and outside of any guard, as no rank has failed and the job may go on.

        Raises:
            EndedEarly: a replica has no more batches, others have, and all are to stop.
        """
        if self._stopped:
            done = [rank for rank in range(self._replicas) if rank not in self.active]
            raise EndedEarly(f"replicas {', '.join(map(str, done))} of {self._replicas} have no more batches")

    def announce(self, reduces: bool) -> bool:
        """A step has run its backwards: whether any replica reduces."""
        wanted = torch.tensor([int(reduces)], dtype=torch.int32, device=self._device)
        self._group.allreduce([wanted]).wait()
        return bool(wanted.item())

    def last_of_all(self, last: bool) -> int:
        """The rank in the group of the replica whose parameters are the newest: the highest of the last ones."""
        rank = torch.tensor([dist.get_rank(self._group) if last else -1], dtype=torch.int32, device=self._device)
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self._group)
        return int(rank.item())
