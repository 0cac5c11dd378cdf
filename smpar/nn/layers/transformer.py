"""A transformer layer, and a stack of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from smpar.nn.layers.attention import DistributedAttentionLayer
from smpar.nn.layers.base import DividedLayer, inner, unpacked
from smpar.nn.layers.output import DistributedTransformerOutputLayer


class _Tupled(DividedLayer):
    """Takes a tuple and gives it back with the hidden state changed; of a tensor alone, a tensor."""

    def forward(self, *inputs: Any) -> Any:
        hidden, *others = unpacked(inputs)
        result = self.ran(hidden, *others)
        return result if isinstance(inputs[0], Tensor) and not others else (result, *others)


class DistributedTransformerLayer(_Tupled):
    """Attention, attention to other states, MLP: (hidden [N, S, H], mask [N, 1, 1, S]) -> the same.

    With ``add_cross_attention`` (hidden, states [N, S', H], mask, mask of the states [N, 1, 1, S']). Masks are added to
    scores, and may be None. Forward moves 2 all-reduces, or in memory mode 2 all-gathers and 2 reduce-scatters.

    Args:
        given: see ``Options``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        o = self.options
        self.attention = inner(DistributedAttentionLayer(**o.given(cross_attention=False)))
        self.cross_attention = (
            inner(DistributedAttentionLayer(**o.given(cross_attention=True, use_alibi=False)))
            if o.add_cross_attention
            else None
        )
        self.output = inner(DistributedTransformerOutputLayer(**o.given()))

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        if self.cross_attention is None:
            hidden = self.attention(hidden, *others)
        else:
            states, mask, states_mask = (*others, None, None)[:3]
            hidden = self.cross_attention(self.attention(hidden, mask), states, states_mask)
        return self.output(hidden)


class DistributedTransformer(_Tupled):
    """``num_layers`` layers; takes and gives what each of them does.

    Between layers, in memory mode, each rank holds a slice of the sequence.

    Args:
        given: see ``Options``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        o = self.options
        self.seq_layers = nn.Sequential(
            *(inner(DistributedTransformerLayer(**o.given(layer_idx=index))) for index in range(o.num_layers))
        )

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        return self.seq_layers((self.slice(hidden), *others))[0]
