"""FlashAttentionLayer computes attention, by formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from smpar.nn import FlashAttentionLayer, FusedLayerNorm
from smpar.nn.layers.flash import alibi_slopes
from tests.tensor.undivided import slope


def drawn(seed: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (queries, keys, keys))
    return q, k, v


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | float = 0.0) -> Tensor:
    return (q @ k.transpose(-1, -2) * scale + bias).softmax(-1) @ v


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 0.5),
        ({"attention_head_size": 16}, 0.25),
        ({"scale_attention_scores": False}, 1.0),
        ({"scale_attn_by_layer_idx": True, "layer_idx": 3}, 0.125),
        ({"scale": 0.3}, 0.3),
    ],
)
def test_scores_are_scaled(seed: int, options: dict[str, Any], scale: float) -> None:
    q, k, v = drawn(seed, 5, 7)
    torch.testing.assert_close(FlashAttentionLayer(0.0, **options)(q, k, v), attended(q, k, v, scale))


@pytest.mark.parametrize("keys", [5, 8])
def test_a_causal_query_sees_no_later_keys(seed: int, keys: int) -> None:
    q, k, v = drawn(seed, 5, keys)
    mask = torch.rand(2, 1, 1, keys) < 0.8
    mask[..., 0] = True
    later = torch.ones(5, keys).triu(keys - 4) * -math.inf
    later = later.nan_to_num(nan=0.0, neginf=-math.inf)
    layer = FlashAttentionLayer(0.0, causal=True)
    torch.testing.assert_close(layer(q, k, v), attended(q, k, v, 0.5, later))
    left_out = torch.zeros(2, 1, 1, keys).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(layer(q, k, v, mask), attended(q, k, v, 0.5, later + left_out))
    torch.testing.assert_close(layer(q, k, v, left_out, causal=False), attended(q, k, v, 0.5, left_out))


def test_biases_are_those_of_the_heads_at_hand(seed: int) -> None:
    q, k, v = drawn(seed, 6, 6)
    distances = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    bias = torch.stack([-slope(head, 7) * distances for head in (2, 3, 4)])
    layer = FlashAttentionLayer(0.0, use_alibi=True, heads=(2, 7))
    torch.testing.assert_close(layer(q, k, v), attended(q, k, v, 0.5, bias))


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_slopes_are_the_papers(heads: int) -> None:
    assert alibi_slopes(heads).tolist() == pytest.approx([slope(head, heads) for head in range(heads)])


def test_scores_in_float32_are_nearer(seed: int) -> None:
    q, k, v = (t.bfloat16() for t in drawn(seed, 6, 6))
    result = FlashAttentionLayer(0.0, attention_in_fp32=True)(q, k, v)
    assert result.dtype is torch.bfloat16
    assert torch.equal(result, attended(q.float(), k.float(), v.float(), 0.5).bfloat16()) or torch.allclose(
        result.float(), attended(q.float(), k.float(), v.float(), 0.5), rtol=2**-8, atol=1e-6
    )


def test_dropout_is_off_in_evaluation(seed: int) -> None:
    q, k, v = drawn(seed, 6, 6)
    layer = FlashAttentionLayer(0.5)
    assert not torch.equal(layer(q, k, v), attended(q, k, v, 0.5))
    torch.testing.assert_close(layer.eval()(q, k, v), attended(q, k, v, 0.5))


def test_fused_layer_norm_is_layer_norm(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, 5, dtype=torch.float64)
    ours = FusedLayerNorm(5, eps=1e-3, dtype=torch.float64)
    want = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(ours(x), want)
