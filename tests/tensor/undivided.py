"""The layers of smpar.nn as one process computes them, by formula, of whole weights. Written for tests only."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
ACTIVATIONS: dict[str, Any] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


def part(weights: Weights, name: str) -> Weights:
    return {k.removeprefix(name + "."): v for k, v in weights.items() if k.startswith(name + ".")}


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("...k,hk->...h", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def norm(w: Weights, name: str, x: Tensor, o: dict[str, Any]) -> Tensor:
    if o.get("norm") == "rmsnorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def wrapped(w: Weights, o: dict[str, Any], x: Tensor, work: Any) -> Tensor:
    """Norm, work, sum, norm."""
    y = x + work(norm(w, "pre_layernorm", x, o) if o.get("pre_layernorm") else x)
    return norm(w, "layernorm", y, o) if o.get("post_layernorm", True) else y


def turned(x: Tensor, dim: int, base: float, halves: bool) -> Tensor:
    """Rotary positions by complex numbers."""
    first = x[..., :dim]
    pairs = first.unflatten(-1, (2, dim // 2)).transpose(-1, -2) if halves else first.unflatten(-1, (dim // 2, 2))
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), base ** (-torch.arange(0, dim, 2) / dim))
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(product)
    return torch.cat(((pairs.transpose(-1, -2) if halves else pairs).flatten(-2), x[..., dim:]), -1)


def slope(head: int, heads: int) -> float:
    """ALiBi's slope of a head (arXiv 2108.12409, and its code for numbers that are no power of two)."""
    power = 2 ** int(math.log2(heads))
    if head < power:
        return float(2 ** (-(2 ** -(math.log2(power) - 3)) * (head + 1)))
    return slope(2 * (head - power), 2 * power)


def attention(w: Weights, o: dict[str, Any], x: Tensor, states: Tensor | None, mask: Tensor | None = None) -> Tensor:
    heads, kv, size = o["num_attention_heads"], o.get("num_key_value_heads"), o["attention_head_size"]
    kv = kv or heads

    def work(x: Tensor) -> Tensor:
        source = x if states is None else states
        q = linear(w, "query", x).unflatten(-1, (heads, size))
        k, v = (linear(w, name, source).unflatten(-1, (kv, size)) for name in ("key", "value"))
        if o.get("rotary_dim") and states is None:
            base, halves = o.get("rotary_base", 10000.0), o.get("gpt_neox_type_rotary", False)
            q, k = (turned(t, o["rotary_dim"], base, halves) for t in (q, k))
        scale = size**-0.5 if o.get("scale_attention_scores", True) else 1.0
        results = []
        for head in range(heads):
            at = head * kv // heads
            scores = q[:, :, head] @ k[:, :, at].transpose(1, 2) * scale
            behind = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[2])
            if o.get("use_alibi") and states is None:
                scores = scores - slope(head, heads) * behind.abs()
            if o.get("causal_mask_size") and states is None:
                scores = scores.masked_fill(behind < 0, -math.inf)
            if mask is not None:
                scores = scores + mask[:, 0]
            results.append(scores.softmax(-1) @ v[:, :, at])
        return linear(w, "dense", torch.cat(results, -1))

    return wrapped(w, o, x, work)


def output(w: Weights, o: dict[str, Any], x: Tensor) -> Tensor:
    act = ACTIVATIONS[o.get("activation", "gelu")]

    def work(x: Tensor) -> Tensor:
        if o.get("gated_mlp"):
            return linear(w, "dense2", act(linear(w, "gate", x)) * linear(w, "dense1", x))
        return linear(w, "dense2", act(linear(w, "dense1", x)))

    return wrapped(w, o, x, work)


def layer(w: Weights, o: dict[str, Any], x: Tensor, *others: Any) -> Tensor:
    if o.get("add_cross_attention"):
        states, mask, states_mask = others
        x = attention(part(w, "attention"), o, x, None, mask)
        x = attention(part(w, "cross_attention"), o, x, states, states_mask)
    else:
        x = attention(part(w, "attention"), o, x, None, *others)
    return output(part(w, "output"), o, x)


def transformer(w: Weights, o: dict[str, Any], x: Tensor, *others: Any) -> Tensor:
    for index in range(o["num_layers"]):
        x = layer(part(w, f"seq_layers.{index}"), o, x, *others)
    return x


def hidden_states(w: Weights, o: dict[str, Any], ids: Tensor, types: Tensor | None, *others: Any) -> Tensor:
    """The language model without its head."""
    x = w["word_embedding.weight"][ids] + w["position_embedding.weight"][: ids.shape[1]]
    if types is not None:
        x = x + w["token_type_embedding.weight"][types]
    x = transformer(part(w, "transformer"), o, x, *others)
    return norm(w, "layernorm", x, o) if o.get("pre_layernorm") else x


def logits(w: Weights, o: dict[str, Any], ids: Tensor) -> Tensor:
    x = hidden_states(w, o, ids, None)
    return x @ w["word_embedding.weight" if o.get("tie_input_output_embedding", True) else "lm_head.weight"].T


def loss(o: dict[str, Any], told: Tensor, labels: Tensor) -> Tensor:
    if o.get("causal_mask_size"):
        told, labels = told[:, :-1], labels[:, 1:]
    return F.cross_entropy(told[labels != -100], labels[labels != -100])
