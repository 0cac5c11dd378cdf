"""Mixtures of experts: each rank of a tensor-parallel group holds some of them.

Tokens stay where they are. All ranks route all tokens alike, and each computes what its experts add to them::

    tokens ─▶ router ─▶ (token, expert, weight) ─┬─▶ experts 0 1 2 of rank 0 ─┐
                                                 └─▶ experts 3 4   of rank 1 ─┴─▶ sum, where the region ends
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smpar.nn.module import DistributedModule
from smpar.trace.draws import sharded


class Experts(DistributedModule):
    """A module that holds its experts' parameters stacked; this rank has ``num_experts``, from ``first`` on.

    It is called with tokens [T, H], the numbers of each token's experts [T, K] and their weights [T, K]. A number that
    is not this rank's becomes ``num_experts``, for which such modules do nothing (transformers' convention).
    """

    first: int
    num_experts: int
    _is_expert_parallel: bool = True

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.distributed:
            return super().forward(hidden, index, weights, *args, **kwargs)
        mine = (index >= self.first) & (index < self.first + self.num_experts)
        local = torch.where(mine, index - self.first, self.num_experts)
        with sharded(self.tensor_group.rank + 1):
            result: Tensor = super().forward(hidden, local, weights.masked_fill(~mine, 0.0), *args, **kwargs)
        if torch.is_grad_enabled() and not result.requires_grad:
            # no token came: the others' backward meets this rank in collectives all the same
            result = result + sum(t[:0].sum() for t in (hidden, weights, *self.parameters()))
        return result
