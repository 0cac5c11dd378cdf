"""The layers of smpar.nn, divided, are the layers that one process has."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Pool
from tests.tensor import undivided
from tests.tensor.divided import Case, run_cases

MODES = [
    {"prescaled_batch": prescaled, "optimize": optimize}
    for prescaled in (True, False)
    for optimize in ("speed", "memory")
]


def _mode(config: dict[str, Any]) -> str:
    return f"{'prescaled' if config['prescaled_batch'] else 'joined'}-{config['optimize']}"


def layer_cases(draw: random.Random, ranks: int) -> dict[str, Case]:
    """Each layer with options of today's models, in random sizes."""
    import smpar.nn as nn

    heads, size, length, other = (
        ranks + draw.randint(0, 2),
        2 * draw.randint(1, 3),
        draw.randint(4, 9),
        draw.randint(3, 6),
    )
    hidden, vocabulary = draw.randint(7, 12), draw.randint(ranks, 40)
    sizes: dict[str, Any] = {
        "num_attention_heads": heads, "attention_head_size": size, "hidden_size": hidden, "num_layers": 2,
        "intermediate_size": draw.randint(ranks, 3 * ranks), "vocab_size": vocabulary, "num_positions": length + 2,
        "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0,
    }  # fmt: skip
    gpt = {"pre_layernorm": True, "post_layernorm": False, "causal_mask_size": 64}
    llama = {
        **gpt, "norm": "rmsnorm", "rotary_dim": size, "gpt_neox_type_rotary": True, "gated_mlp": True,
        "activation": "silu", "num_attention_heads": 2 * heads, "num_key_value_heads": heads,
        "use_qkv_bias": False, "use_attn_dense_bias": False, "use_mlp_bias": False,
    }  # fmt: skip
    gptj = {**gpt, "rotary_dim": 2, "rotary_base": 500.0}

    def state(rows: int) -> Tensor:
        return torch.randn(rows, length, hidden)

    def states(rows: int) -> Tensor:
        return torch.randn(rows, other, hidden)

    def mask(rows: int, length: int = length) -> Tensor:
        return torch.zeros(rows, 1, 1, length).masked_fill(torch.rand(rows, 1, 1, length) < 0.3, -1e4)

    def ids(rows: int, count: int = vocabulary) -> Tensor:
        return torch.randint(0, count, (rows, length))

    def attention(**more: Any) -> Case:
        o = {**sizes, **more}
        if more.get("cross_attention"):
            return Case(
                lambda: nn.DistributedAttentionLayer(**o),
                lambda w, x, s, m: undivided.attention(w, o, x, s, m),
                lambda rows: [state(rows), states(rows), mask(rows, other)],
                lambda module, *given: module(given),
            )
        return Case(
            lambda: nn.DistributedAttentionLayer(**o),
            lambda w, x, m: undivided.attention(w, o, x, None, m),
            lambda rows: [state(rows), mask(rows)],
            lambda module, *given: module(given),
        )

    def output(**more: Any) -> Case:
        o = {**sizes, **more}
        return Case(
            lambda: nn.DistributedTransformerOutputLayer(**o),
            lambda w, x: undivided.output(w, o, x),
            lambda rows: [state(rows)],
        )

    def layer(kind: Any, truth: Any, **more: Any) -> Case:
        o = {**sizes, **more}
        both = more.get("add_cross_attention")
        return Case(
            lambda: kind(**o),
            lambda w, *given: truth(w, o, *given),
            lambda rows: (
                [state(rows), states(rows), mask(rows), mask(rows, other)] if both else [state(rows), mask(rows)]
            ),
            lambda module, *given: module(given)[0],
        )

    def model(**more: Any) -> Case:
        o = {**sizes, "add_lm_head": False, **more}
        return Case(
            lambda: nn.DistributedTransformerLMHead(**o),
            lambda w, *given: undivided.hidden_states(w, o, *given),
            lambda rows: [ids(rows), mask(rows), ids(rows, 3) if o.get("num_token_types") else None],
        )

    def linear(features: int, out: int, bias: bool) -> Case:
        return Case(
            lambda: nn.DistributedLinear(features, out, bias),
            lambda w, x: x @ w["weight"].T + (w["bias"] if bias else 0.0),
            lambda rows: [torch.randn(rows, length, features)],
        )

    one, two = draw.randint(1, 2 * ranks), draw.randint(2 * ranks + 1, 4 * ranks)
    return {
        "attention": attention(),
        "attention, causal": attention(**gpt),
        "attention, both norms, alibi": attention(pre_layernorm=True, use_alibi=True),
        "attention, grouped, rotary": attention(**llama),
        "attention, shared keys": attention(
            **{**llama, "num_key_value_heads": ranks // 2, "num_attention_heads": 3 * ranks}
        ),
        "attention, rotary in part": attention(**gptj),
        "attention, to others": attention(cross_attention=True),
        "attention, whole": attention(num_attention_heads=ranks - 1, pre_layernorm=True, use_alibi=True),
        "attention to others, whole": attention(num_attention_heads=ranks - 1, cross_attention=True),
        "mlp": output(),
        "mlp, gated": output(**llama),
        "mlp, whole": output(intermediate_size=ranks - 1, activation="relu"),
        "layer": layer(nn.DistributedTransformerLayer, undivided.layer),
        "layer, with others": layer(nn.DistributedTransformerLayer, undivided.layer, add_cross_attention=True, **gpt),
        "stack": layer(nn.DistributedTransformer, undivided.transformer, **llama),
        "stack, with others": layer(nn.DistributedTransformer, undivided.transformer, add_cross_attention=True),
        "model": model(num_token_types=3),
        "model, causal": model(**gpt),
        "linear, more out": linear(one, two, True),
        "linear, more in": linear(two, one, True),
        "linear, no bias": linear(one, two, False),
        "embedding": Case(
            lambda: nn.DistributedEmbedding(vocabulary, hidden), lambda w, x: w["weight"][x], lambda rows: [ids(rows)]
        ),
    }


@pytest.mark.parametrize("config", MODES, ids=_mode)
@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_layers_equal_undivided_ones(pool: Pool, seed: int, ranks: int, config: dict[str, Any]) -> None:
    for found in pool.run(ranks, run_cases, f"{__name__}:layer_cases", seed, config, timeout=120.0):
        wrong = {name: errors for name, errors in found.items() if errors.largest > 1e-9}
        assert not wrong
