"""The MLP of a transformer layer, over the channels of a rank."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from smpar.nn.layers.base import DividedLayer, dropped
from smpar.nn.layers.norm import norm_of
from smpar.nn.layers.options import ACTIVATIONS
from smpar.nn.linears import divide_columns, divide_rows

log = logging.getLogger("smpar")


class DistributedTransformerOutputLayer(DividedLayer):
    """norm, MLP, dropout, sum with what went in, norm: hidden [N, S, H] -> [N, S, H].

    Its ``intermediate_size`` channels are divided. (arXiv 1909.08053, section 3.)

    Args:
        given: see ``Options``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        o, group = self.options, self.tensor_group
        self.pre_layernorm = norm_of(o) if o.pre_layernorm else None
        self.dense1 = o.linear(o.hidden_size, o.intermediate_size, o.use_mlp_bias)
        self.gate = o.linear(o.hidden_size, o.intermediate_size, o.use_mlp_bias) if o.gated_mlp else None
        self.dense2 = o.linear(o.intermediate_size, o.hidden_size, o.use_mlp_bias)
        self.layernorm = norm_of(o) if o.post_layernorm else None
        self.divided = self.distributed and o.intermediate_size >= group.size
        if self.divided:
            for linear in (self.dense1, self.gate):
                if linear is not None:
                    divide_columns(linear, 1, group)
            divide_rows(self.dense2, 1, group)
        elif self.distributed:
            log.warning("an MLP of %d channels stays whole on each of %d ranks", o.intermediate_size, group.size)
        self.mark_partial(self.pre_layernorm, self.layernorm, self.dense2 if self.divided else None)
        self.activation = ACTIVATIONS[o.activation]

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        hidden = self.slice(hidden)
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        result = self.region(self._worked, normed, self.divided)
        total = self.sum(hidden, dropped(result, self.options.hidden_dropout_prob, self.training))
        return total if self.layernorm is None else self.layernorm(total)  # type: ignore[no-any-return]

    def _worked(self, hidden: Tensor) -> Tensor:
        if self.gate is None:
            return self.dense2(self.activation(self.dense1(hidden)))  # type: ignore[no-any-return]
        return self.dense2(self.activation(self.gate(hidden)) * self.dense1(hidden))  # type: ignore[no-any-return]
