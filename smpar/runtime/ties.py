"""Parameters that several ranks of a pipeline hold: their gradients are summed, and all holders get the same bits.

    rank        0           1           2          holders (0, 1, 2) of one that rank 0 owns
    offer                   g ────────┐ g
    gather      sum  ◀──────┴─────────┘
    replicas    average
    hand back   p.grad ───▶ p.grad
                p.grad ───────────────▶ p.grad

Every rank sends all that it has for others before it waits for anything: so none waits in a circle, though each may own
what the other holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from smpar.runtime.wires import Channels

Gradients = dict[int, "Tensor | None"]  # id of a parameter -> its gradient


def tied_groups(
    holders: Mapping[int, Collection[int]], owner: Mapping[int, int]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Ranks that share parameters, the owner first -> the parameters' keys.

        {a: {0}, b: {0, 2}, c: {1, 2}, d: {2, 0}} owned by 0, 0, 2, 0   ->   {(0, 2): (b, d), (2, 1): (c,)}

    Args:
        holders: key of a parameter -> the ranks that hold it.
        owner: key of a parameter -> the one of them that owns it.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for key, ranks in holders.items():
        others = sorted(set(ranks) - {owner[key]})
        if others:
            groups.setdefault((owner[key], *others), []).append(key)
    return {ranks: tuple(groups[ranks]) for ranks in sorted(groups)}


class Ties:
    """The tied parameters of one rank.

    Args:
        parameters: candidates, in an order that all ranks have alike.
        holders: the ranks that hold a parameter.
        everywhere: those of them that hold it on every replica; the owner is one.
        owner: the rank that owns a parameter.
        channels: to the other ranks of the pipeline.
        rank: this one.

    Attributes:
        parameters: those that other ranks hold, too.
        owned: those of them whose sums are made here.
        here: ids of those of them that this rank holds, or that other ranks hold, too, on this replica only.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        holders: Callable[[nn.Parameter], Collection[int]],
        everywhere: Callable[[nn.Parameter], Collection[int]],
        owner: Callable[[nn.Parameter], int],
        channels: Channels,
        rank: int,
    ) -> None:
        self._channels, self._rank = channels, rank
        tied = {i: ranks for i, p in enumerate(parameters) if len(ranks := holders(p)) > 1}
        found = tied_groups(tied, {i: owner(parameters[i]) for i in tied})
        self._groups = [(ranks, [parameters[i] for i in members]) for ranks, members in found.items() if rank in ranks]
        self.parameters = [p for _, members in self._groups for p in members]
        self.owned = [p for ranks, members in self._groups if ranks[0] == rank for p in members]
        self.here = {id(p) for p in self.parameters if rank not in (known := everywhere(p)) or len(known) == 1}

    def offer(self, gradients: Gradients) -> None:
        """Send the gradients of what other ranks own; comes before whatever may wait for another rank.

        Args:
            gradients: this rank's, of all tied parameters.
        """
        for ranks, members in self._groups:
            if ranks[0] != self._rank:
                self._send(ranks[0], [gradients[id(p)] for p in members])

    def gather(self, gradients: Gradients, dtype: Callable[[torch.dtype], torch.dtype]) -> None:
        """Sum the gradients of each owned parameter, in the order of the ranks, in place of this rank's own.

        Args:
            gradients: as for `offer`.
            dtype: the type in which gradients of a type are summed.
        """
        for ranks, members in self._groups:
            if ranks[0] != self._rank:
                continue
            for other in ranks[1:]:
                theirs = self._receive(other, members, dtype)
                for p, grad in zip(members, theirs, strict=True):
                    mine = gradients[id(p)]
                    if grad is not None:
                        gradients[id(p)] = grad if mine is None else _dense(mine).add(grad)

    def hand_back(self) -> None:
        """Give the owners' gradients to all holders."""
        for ranks, members in self._groups:
            if ranks[0] == self._rank:
                for other in ranks[1:]:
                    self._send(other, [p.grad for p in members])
        for ranks, members in self._groups:
            if ranks[0] != self._rank:
                for p, grad in zip(members, self._receive(ranks[0], members, lambda own: own), strict=True):
                    p.grad = grad

    def _send(self, rank: int, gradients: Sequence[Tensor | None]) -> None:
        self._channels.send(rank, torch.tensor([g is not None for g in gradients], dtype=torch.uint8))
        for grad in gradients:
            if grad is not None:
                self._channels.send(rank, _dense(grad).detach().contiguous())

    def _receive(
        self, rank: int, parameters: Sequence[nn.Parameter], dtype: Callable[[torch.dtype], torch.dtype]
    ) -> list[Tensor | None]:
        there = torch.empty(len(parameters), dtype=torch.uint8)
        self._channels.post_recv(rank, there).wait()
        gradients: list[Tensor | None] = []
        for p, has in zip(parameters, there.tolist(), strict=True):
            grad = torch.empty(p.shape, dtype=dtype(p.dtype), device=p.device) if has else None
            if grad is not None:
                self._channels.post_recv(rank, grad).wait()
            gradients.append(grad)
        return gradients


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.layout is not torch.strided else grad
