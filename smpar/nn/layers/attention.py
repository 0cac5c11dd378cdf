"""Attention over the heads of a rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smpar.nn import collectives
from smpar.nn.layers.base import ResidualLayer
from smpar.nn.layers.flash import FlashAttentionLayer
from smpar.nn.layers.rotary import rotated


class DistributedAttentionLayer(ResidualLayer):
    """norm, attention, dropout, sum with what went in, norm: (hidden [N, S, H], mask) -> [N, S, H].

    The mask is added to the scores and broadcasts to [N, 1, S, S], as [N, 1, 1, S] does; None = none. With
    ``cross_attention`` the input is (hidden, states [N, S', H] to attend to, their mask). Heads are divided, those of
    queries together with those of keys that they use. (arXiv 1909.08053, section 3.)

    Args:
        given: see ``Options``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        o, group = self.options, self.tensor_group
        width, kv_width = (heads * o.attention_head_size for heads in (o.num_attention_heads, o.kv_heads))
        self.query = o.linear(o.hidden_size, width, o.use_qkv_bias)
        self.key = o.linear(o.hidden_size, kv_width, o.use_qkv_bias)
        self.value = o.linear(o.hidden_size, kv_width, o.use_qkv_bias)
        self.dense = o.linear(width, o.hidden_size, o.use_attn_dense_bias)
        self.divide((self.query, self.key, self.value), self.dense, o.attention_head_size)
        first = 0
        if self.shares is not None:
            first = self.shares.bounds[group.rank][0] * (o.num_attention_heads // self.shares.units)
        self.attention = FlashAttentionLayer(
            o.attention_dropout_prob,
            o.attention_head_size,
            o.scale_attention_scores,
            o.scale_attn_by_layer_idx,
            o.layer_idx,
            use_alibi=o.use_alibi,
            causal=o.causal_mask_size is not None and not o.cross_attention,
            heads=(first, o.num_attention_heads),
            attention_in_fp32=o.attention_in_fp32 or o.query_key_layer_scaling,
        )

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        states, mask = (*others, None)[:2] if self.options.cross_attention else (None, *others, None)[:2]
        return self.around(lambda whole: self._attended(whole, states, mask), hidden)

    def _attended(self, hidden: Tensor, states: Tensor | None, mask: Tensor | None) -> Tensor:
        o = self.options
        source = hidden if states is None else self._used(states)
        query, key, value = (
            linear(x).unflatten(-1, (-1, o.attention_head_size)).transpose(1, 2)
            for linear, x in ((self.query, hidden), (self.key, source), (self.value, source))
        )
        if o.rotary_dim and states is None:
            query, key = (rotated(x, o.rotary_dim, o.rotary_base, o.gpt_neox_type_rotary) for x in (query, key))
        if mask is not None and mask.requires_grad:
            mask = self._used(mask)
        return self.dense(self.attention(query, key, value, mask).transpose(1, 2).flatten(2))

    def _used(self, tensor: Tensor) -> Tensor:
        """A whole tensor, besides the hidden state, that the region works with."""
        return tensor if self.shares is None else collectives.copy(tensor, self.tensor_group)
