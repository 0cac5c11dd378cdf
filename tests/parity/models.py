"""Small models, each with one feature that pipelines get wrong; seeded, in float64 unless stated.

Sizes: vocabulary 23, width 16, sequence 6, batch 8; regression models map [B, 16] to [B, 4].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH, BATCH, OUT = 23, 16, 6, 8, 4
IGNORE = -100


def seeded(build: Callable[..., nn.Module], *args: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights on each call; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build(*args).to(dtype)


class Mlp(nn.Module):
    """Residual, normalised first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Attention(nn.Module):
    """One causal head, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        return h + self.out(scores.masked_fill(later, -1e4).softmax(-1) @ v)


class LanguageModel(nn.Module):
    """Embedding, four blocks, norm, head; ``tied``: the head's weight is the embedding's."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Mlp(), Attention(), Mlp(), Attention()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class LossInside(nn.Module):
    """Logits, or (loss, logits) where labels are given: an input that only the last stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LanguageModel()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm(ids)
        return logits if labels is None else (token_loss(logits, labels), logits)


class Stack(nn.Module):
    """A regression through ``layers``; the same object may stand there several times."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


def mlps(count: int) -> Stack:
    return Stack([Mlp() for _ in range(count)])


def shared_block() -> Stack:
    return Stack([Mlp()] * 6)


def dropout_stack() -> Stack:
    return Stack([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)])


def batchnorm_stack() -> Stack:
    return Stack([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(4)])


class GatedUnit(nn.Module):
    """``chunk``: one autograd node with two outputs of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(torch.tanh(self.inp(x))).chunk(2, -1)
        return self.out(value * torch.sigmoid(gate))


class LongSkips(nn.Module):
    """U-shaped: what the first stage made is used again by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Mlp() for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], -1)))
        return self.out(x)


class Adapted(nn.Module):
    """A frozen block, with a low-rank adapter or without."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = Mlp()
        self.a = nn.Linear(WIDTH, rank, bias=False) if rank else None
        self.b = nn.Linear(rank, WIDTH, bias=False) if rank else None

    def forward(self, h: Tensor) -> Tensor:
        y = self.base(h)
        return y if self.a is None or self.b is None else y + self.b(torch.tanh(self.a(h)))


class Adapters(nn.Module):
    """Only the adapters of the last two of six blocks train: the first stages have nothing to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Adapted(4 if i >= 4 else 0) for i in range(6))
        self.head = nn.Linear(WIDTH, VOCAB)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".a." in name or ".b." in name)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Dtypes(nn.Module):
    """Under autocast bfloat16 leaves one layer and float32 another; ``seen`` notes each layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, OUT)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = x * self.scale  # a float32 parameter: the product is float32
            self.seen.append(x.dtype)
        return self.out(x)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over the tokens that are not IGNORE; NaN without any."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE)
