"""Attention over the heads of a rank."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from smpar.nn import collectives
from smpar.nn.layers.base import DividedLayer, dropped
from smpar.nn.layers.flash import FlashAttentionLayer
from smpar.nn.layers.norm import norm_of
from smpar.nn.layers.rotary import rotated
from smpar.nn.linears import divide_columns, divide_rows
from smpar.slices import bounds_of

log = logging.getLogger("smpar")


class DistributedAttentionLayer(DividedLayer):
    """norm, attention, dropout, sum with what went in, norm: (hidden [N, S, H], mask) -> [N, S, H].

    The mask is added to the scores and broadcasts to [N, heads, S, S], as [N, 1, 1, S] does; None = none. With
    ``cross_attention`` the input is (hidden, states [N, S', H] to attend to, their mask). Heads are divided, those of
    queries together with those of keys that they use; with fewer of these than ranks, every rank does all.
    (arXiv 1909.08053, section 3.)

    Args:
        given: see ``Options``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        o, group = self.options, self.tensor_group
        width, kv_width = (n * o.attention_head_size for n in (o.num_attention_heads, o.kv_heads))
        self.pre_layernorm = norm_of(o) if o.pre_layernorm else None
        self.query = o.linear(o.hidden_size, width, o.use_qkv_bias)
        self.key = o.linear(o.hidden_size, kv_width, o.use_qkv_bias)
        self.value = o.linear(o.hidden_size, kv_width, o.use_qkv_bias)
        self.dense = o.linear(width, o.hidden_size, o.use_attn_dense_bias)
        self.layernorm = norm_of(o) if o.post_layernorm else None
        self.divided = self.distributed and o.kv_heads >= group.size
        if self.divided:
            divide_columns(self.query, width // o.kv_heads, group)
            divide_columns(self.key, o.attention_head_size, group)
            divide_columns(self.value, o.attention_head_size, group)
            divide_rows(self.dense, width // o.kv_heads, group)
        elif self.distributed:
            log.warning("an attention of %d heads stays whole on each of %d ranks", o.kv_heads, group.size)
        self.mark_partial(self.pre_layernorm, self.layernorm, self.dense if self.divided else None)
        first = bounds_of(o.kv_heads, group.size)[group.rank][0] if self.divided else 0
        self.attention = FlashAttentionLayer(
            o.attention_dropout_prob,
            o.attention_head_size,
            o.scale_attention_scores,
            o.scale_attn_by_layer_idx,
            o.layer_idx,
            use_alibi=o.use_alibi,
            causal=o.causal_mask_size is not None and not o.cross_attention,
            heads=(first * o.num_attention_heads // o.kv_heads, o.num_attention_heads),
            attention_in_fp32=o.attention_in_fp32 or o.query_key_layer_scaling,
        )

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        states, mask = (*others, None)[:2] if self.options.cross_attention else (None, *others, None)[:2]
        hidden = self.slice(hidden)
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        result = self.region(lambda whole: self._attended(whole, states, mask), normed, self.divided)
        total = self.sum(hidden, dropped(result, self.options.hidden_dropout_prob, self.training))
        return total if self.layernorm is None else self.layernorm(total)  # type: ignore[no-any-return]

    def _attended(self, hidden: Tensor, states: Tensor | None, mask: Tensor | None) -> Tensor:
        if states is None:
            source = hidden
        else:
            source = collectives.copy(states, self.tensor_group) if self.divided else states
        query, key, value = (
            self._heads(self.query(hidden)),
            self._heads(self.key(source)),
            self._heads(self.value(source)),
        )
        o = self.options
        if o.rotary_dim and states is None:
            query = rotated(query, o.rotary_dim, o.rotary_base, o.gpt_neox_type_rotary)
            key = rotated(key, o.rotary_dim, o.rotary_base, o.gpt_neox_type_rotary)
        return self.dense(self.attention(query, key, value, mask).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, features: Tensor) -> Tensor:
        """[N, S, heads * D] -> [N, heads, S, D]"""
        return features.unflatten(-1, (-1, self.options.attention_head_size)).transpose(1, 2)
