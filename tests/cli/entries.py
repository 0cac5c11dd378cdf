"""Entry points for the commands: small models with a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = 20


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """A class token of its own, an embedding tied to the head, blocks between."""

    def __init__(self, dim: int = 64, words: int = 50) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.embed = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(BLOCKS)])
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.token
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def tower() -> tuple[nn.Module, Any, Any]:
    ids = torch.randint(50, (3, 16))
    return Tower(), (ids, ids.roll(-1)), step


def by_name() -> tuple[nn.Module, Any]:
    return Tower(16), {"ids": torch.randint(50, (2, 4))}


def nothing() -> str:
    return "a model, one day"


def no_batch() -> tuple[nn.Module, Any]:
    return nn.Linear(2, 2), torch.tensor(1.0)


def not_alone() -> tuple[nn.Module, Any]:
    """Batch norm has no variance of one sample."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4)


def on_meta() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return nn.Linear(2, 2), torch.zeros(1, 2, device="cpu")


class Remembering(nn.Module):
    """Looks at all that was put into a cache so far, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.kept.append(self.inner(x))
        return torch.stack(cache.kept).sum(0)


class Cache:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Chat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), Remembering(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x), Cache()))


def chat() -> tuple[nn.Module, Any]:
    return Chat(), torch.randn(4, 8)
