"""Models for the benches: a chain of layers, cut into stages between any two of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Chain(nn.Module):
    """Layers one after another; each takes and gives one tensor."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def part(self, start: int, end: int) -> Chain:
        """Layers ``start`` to ``end - 1`` as a chain of their own, with the same parameters."""
        return Chain([self.layers[i] for i in range(start, end)])


class Embed(nn.Module):
    """Token and position embeddings: int64 ``[N, length]`` to ``[N, length, width]``."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    """A transformer block with the norm before each half, ``[N, length, width]`` in and out."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.mix(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Final norm and the projection to ``classes``."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))


class Convolution(nn.Module):
    """A 3x3 convolution with its norm, ``[N, inner, size, size]`` to ``[N, outer, size/stride, size/stride]``."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(inner, outer, 3, stride, padding=1)
        self.norm = nn.GroupNorm(4, outer)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.convolve(x)))


class Patches(nn.Module):
    """Pixels as tokens: ``[N, inner, size, size]`` to ``[N, (size/patch)**2, width]``."""

    def __init__(self, inner: int, width: int, patch: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(inner, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2)


class Pool(nn.Module):
    """The mean over tokens, and the projection of it: ``[N, length, width]`` to ``[N, classes]``."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x.mean(1))


def gpt(blocks: int, width: int, heads: int, length: int, vocabulary: int) -> Chain:
    """A small GPT: ``blocks + 2`` layers."""
    middle = [Block(width, heads) for _ in range(blocks)]
    return Chain([Embed(vocabulary, length, width), *middle, Head(width, vocabulary)])


def conv_transformer(convolutions: int, blocks: int, width: int, heads: int, classes: int) -> Chain:
    """A convolutional front of 32 channels on images ``[N, 3, 32, 32]``, 64 patches of it, a transformer behind."""
    front = [Convolution(3 if i == 0 else 32, 32, 1) for i in range(convolutions)]
    middle = [Block(width, heads, causal=False) for _ in range(blocks)]
    return Chain([*front, Patches(32, width, 4), *middle, Pool(width, classes)])


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over ``[..., classes]``."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def even_cuts(model: Chain, stages: int) -> tuple[int, ...]:
    """The first layer of each stage, and the end: repeated layers (`Block`, `Convolution`) in equal numbers.

    The other layers go with their neighbours, as one does by hand: what comes before the first and after the last.
    """
    repeated = [i for i, layer in enumerate(model.layers) if isinstance(layer, (Block, Convolution))]
    if len(repeated) < stages:
        raise ValueError(f"{len(repeated)} repeated layers cannot fill {stages} stages; give more --blocks")
    firsts = [repeated[len(repeated) * stage // stages] for stage in range(1, stages)]
    return (0, *firsts, len(model.layers))


def stage_of_layer(cuts: Sequence[int]) -> list[int]:
    """Layer -> its stage."""
    return [stage for stage, (start, end) in enumerate(pairwise(cuts)) for _ in range(start, end)]


def token_batch(samples: int, length: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, both int64 ``[samples, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, vocabulary, (samples, length), generator=generator),
        torch.randint(0, vocabulary, (samples, length), generator=generator),
    )


def image_batch(samples: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random images ``[samples, 3, 32, 32]`` and classes, int64 ``[samples]``."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, 3, 32, 32, generator=generator),
        torch.randint(0, classes, (samples,), generator=generator),
    )
