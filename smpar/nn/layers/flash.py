"""Attention of some heads: softmax(q k' * scale + mask) v."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FlashAttentionLayer(nn.Module):
    """Scaled-dot-product attention by torch's fastest kernel for the device.

    Args:
        attention_dropout_prob: of the probabilities, in training.
        attention_head_size: D; the default of the scale is 1 / sqrt(D). None: that of the query.
        scale_attention_scores: False = no scale by D.
        scale_attn_by_layer_idx, layer_idx: a further scale of 1 / (layer_idx + 1).
        scale: the scale itself, instead of all that.
        causal: a position attends to itself and to those before it; the last query belongs to the last key.
        use_alibi: linear biases by distance (arXiv 2108.12409).
        heads: (first, number in the whole layer) of the heads at hand, for their biases; None: they are all.
        attention_in_fp32: computes in float32 where the inputs have less.
        triton_flash_attention: accepted; torch has kernels of its own.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int = 0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
        causal: bool = False,
        heads: tuple[int, int] | None = None,
        attention_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.dropout, self.causal = attention_dropout_prob, causal
        self.use_alibi, self.heads, self.in_fp32 = use_alibi, heads, attention_in_fp32
        if scale is None and scale_attention_scores and attention_head_size is not None:
            scale = 1 / math.sqrt(attention_head_size)
        elif scale is None and not scale_attention_scores:
            scale = 1.0
        self.scale = scale
        self.divisor = layer_idx + 1 if scale_attn_by_layer_idx else 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        causal: bool | None = None,
    ) -> Tensor:
        """[N, heads, S, D] three times -> [N, heads, S, D].

        Keys and values may have fewer heads, each for a group of consecutive query heads.

        Args:
            attention_mask: broadcasts to [N, heads, S, S']; added to the scores, or of bools: True attends.
            causal: overrides the layer's.
        """
        dtype = query.dtype
        if self.in_fp32 and dtype in (torch.float16, torch.bfloat16):
            query, key, value = query.float(), key.float(), value.float()
        causal = self.causal if causal is None else causal
        bias = None if attention_mask is None else _additive(attention_mask, query.dtype)
        lengths = query.shape[-2], key.shape[-2]
        if self.use_alibi:
            first, number = self.heads or (0, query.shape[1])
            slopes = alibi_slopes(number)[first : first + query.shape[1]].to(query)
            distances = slopes[:, None, None] * -_behind(*lengths, query.device).abs()
            bias = distances if bias is None else bias + distances
        alone = bias is None and lengths[0] == lengths[1]
        if causal and not alone:
            hidden = _behind(*lengths, query.device) < 0
            bias = query.new_zeros(hidden.shape) if bias is None else bias
            bias = bias.masked_fill(hidden, -math.inf)
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        result = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and alone,
            scale=scale / self.divisor,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return result.to(dtype)


def alibi_slopes(heads: int) -> Tensor:
    """[heads]: by how much each head's scores fall with distance, float64."""
    power = 1 << (heads.bit_length() - 1)  # a sequence for a power of two, then every other one of twice as many
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    more = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(first + more, dtype=torch.float64)


def _behind(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys]: by how many positions a key is behind a query."""
    at = torch.arange(keys - queries, keys, device=device)
    return at[:, None] - torch.arange(keys, device=device)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
