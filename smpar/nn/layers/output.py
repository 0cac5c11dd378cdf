"""The MLP of a transformer layer, over the channels of a rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smpar.nn.layers.base import ResidualLayer
from smpar.nn.layers.options import ACTIVATIONS


class DistributedTransformerOutputLayer(ResidualLayer):
    """norm, MLP, dropout, sum with what went in, norm: hidden [N, S, H] -> [N, S, H].

    Its ``intermediate_size`` channels are divided. (arXiv 1909.08053, section 3.)

    Args:
        given: see ``Options``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        o = self.options
        self.dense1 = o.linear(o.hidden_size, o.intermediate_size, o.use_mlp_bias)
        self.gate = o.linear(o.hidden_size, o.intermediate_size, o.use_mlp_bias) if o.gated_mlp else None
        self.dense2 = o.linear(o.intermediate_size, o.hidden_size, o.use_mlp_bias)
        self.divide([self.dense1] if self.gate is None else [self.dense1, self.gate], self.dense2)
        self.activation = ACTIVATIONS[o.activation]

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        return self.around(self._worked, hidden)

    def _worked(self, hidden: Tensor) -> Tensor:
        if self.gate is None:
            return self.dense2(self.activation(self.dense1(hidden)))
        return self.dense2(self.activation(self.gate(hidden)) * self.dense1(hidden))
