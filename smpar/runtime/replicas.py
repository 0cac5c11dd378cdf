"""The data-parallel side of one model on one rank: gradients, buffers, and replicas with unequal numbers of batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpar.comm.peers import Peers
from smpar.comm.world import World
from smpar.errors import JoinError
from smpar.runtime.join import Joining
from smpar.runtime.reducer import Reducer
from smpar.slices import slicing_of

_AT_ONCE = 250 << 20  # bytes of buffers that are broadcast as one


class Replicas:
    """What a step does together with the other replicas, besides its reductions.

    Args:
        reducer: of the model's gradients.
        buffers: gives those of this rank; None if they are not to be kept equal.
    """

    def __init__(self, world: World, reducer: Reducer, buffers: Callable[[], Sequence[Tensor]] | None) -> None:
        self.world, self.reducer = world, reducer
        self._buffers = buffers
        self._differ = False  # whether the last step reduced gradients, hence ran forwards that may have set buffers

    def meet(self) -> None:
        """Inside ``join``, at the very start of a step: tell the others that this replica has a batch.

        Raises:
            EndedEarly: another one has no more, and all are to stop.
        """
        joining = self.reducer.joining
        if joining is not None:
            with self.world.guard():
                joining.meet(True)
            joining.check()

    def start_step(self) -> None:
        """Before a step's forwards: take the first replica's buffers if the last step reduced."""
        self._share_buffers()

    def end_step(self) -> None:
        """After a step."""
        self._differ = self.reducer.reduced

    def _share_buffers(self) -> None:
        differ, self._differ = self._differ, False
        if not differ or self._buffers is None:
            return
        reducer, joining = self.reducer, self.reducer.joining
        replica = 0 if joining is None else joining.active[-1]
        buffers = list(self._buffers())
        for peers, some in (
            (reducer.peers, [b for b in buffers if slicing_of(b) is None]),
            (reducer.sliced, [b for b in buffers if slicing_of(b) is not None]),
        ):
            if some and peers.group is not None:
                with torch.no_grad():
                    dist._broadcast_coalesced(peers.group, some, _AT_ONCE, peers.replicas[replica][0])

    @contextlib.contextmanager
    def join(
        self,
        by_replicas: bool,
        throw: bool,
        prepare: Callable[[], bool],
        state: Callable[[], Iterable[Tensor]],
        ended: Callable[[], None],
    ) -> Iterator[None]:
        """Around a training loop of uneven length; see ``DistributedModel.join``.

        Args:
            by_replicas: divide by the number of replicas, not of those that still have batches.
            throw: stop all when the first has no more batches.
            prepare: lays out the reducer's buckets; False if nothing is known of them.
            state: parameters and buffers that this rank has on all replicas.
            ended: called when these are the same on all.

        Raises:
            JoinError: it is in use already, or this replica has no batch at all and cannot follow the others.
        """
        reducer, world = self.reducer, self.world
        if reducer.joining is not None:
            raise JoinError("join inside a join")
        if len(reducer.peers.replicas) == 1:
            yield
            return
        joining = reducer.joining = Joining(reducer.peers, world.device, by_replicas, throw)
        try:
            yield
            with world.guard():
                last = self._follow(joining, prepare)
            joining.check()
            with world.guard():
                broadcast(state(), reducer.peers_of, joining.last_of_all(last))
                ended()
        finally:
            reducer.joining = None
            reducer.restart()
            self._differ = False

    def _follow(self, joining: Joining, prepare: Callable[[], bool]) -> bool:
        """This replica has no more batches: do what the others' steps need of it; True if they have none either."""
        last = True
        while joining.meet(False):
            if last and not prepare():
                raise JoinError("a replica without any batch, whose pipeline is not partitioned therefore")
            last = False
            self._share_buffers()
            self._differ = joining.announce(False)
            if self._differ:
                self.reducer.shadow()
        return last


def broadcast(tensors: Iterable[Tensor], peers_of: Callable[[Tensor], Peers], replica: int) -> None:
    """Give all ranks that hold a tensor what it is on a replica's (first) rank.

    Args:
        peers_of: the ranks that hold it.
    """
    with torch.no_grad():
        for tensor in tensors:
            peers = peers_of(tensor)
            if peers.group is not None and not tensor.is_meta:
                data = tensor.detach().contiguous()
                bits = data.view(-1).view(torch.uint8) if data.numel() else data
                origin = dist.get_global_rank(peers.group, peers.replicas[replica][0])
                dist.broadcast(bits, origin, group=peers.group)
                tensor.copy_(data)


def module_state(module: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()
