"""Models that are no transformer: convolutional U-Net, LSTM language model, experts, collaborative filtering."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Images [B, 1, 16, 16] -> class maps [B, classes, 16, 16]; three skips, each as long as its level is high."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(ConvBlock(a, b) for a, b in zip([1, *widths[:-1]], widths, strict=True))
        self.middle = ConvBlock(widths[-1], widths[-1])
        self.lift = nn.ModuleList(nn.ConvTranspose2d(w, w, 2, stride=2) for w in reversed(widths))
        self.up = nn.ModuleList(ConvBlock(2 * w, max(w // 2, width)) for w in reversed(widths))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = image, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([lift(x), skips.pop()], 1))
        return self.head(x)


class LstmLm(nn.Module):
    """ids [B, S] -> logits [B, S, vocab]; each layer starts from the state in which the one below ended."""

    def __init__(self, vocab: int = 61, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        h, state = self.embedding(ids), None
        for layer in self.layers:
            h, state = layer(h, state)
        return self.head(h)


class Experts(nn.Module):
    """Each token goes to its two best experts; how many an expert gets depends on the data, and may be none."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if token.numel():
                out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return h + out.view_as(h)


class ExpertLm(nn.Module):
    """ids [B, S] -> logits [B, S, vocab]."""

    def __init__(self, vocab: int = 61, width: int = 32, layers: int = 4, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.moe = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for mix, norm, moe in zip(self.mix, self.norm, self.moe, strict=True):
            past = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, device=h.device)[:, None]
            h = moe(norm(h + mix(past)))
        return self.head(h)


class NeuralFiltering(nn.Module):
    """(user [B], item [B]) -> logit [B]: a factor model and a perceptron on embeddings of their own.

    Neural collaborative filtering, the fourth model of the SMP paper.
    """

    def __init__(self, users: int = 40, items: int = 60, width: int = 16) -> None:
        super().__init__()
        self.user_factor, self.item_factor = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_deep, self.item_deep = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.tower = nn.ModuleList(nn.Linear(a * width, b * width) for a, b in ((4, 4), (4, 2), (2, 1)))
        self.predict = nn.Linear(2 * width, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        factors = self.user_factor(user) * self.item_factor(item)
        h = torch.cat([self.user_deep(user), self.item_deep(item)], -1)
        for layer in self.tower:
            h = F.relu(layer(h))
        return self.predict(torch.cat([factors, h], -1)).squeeze(-1)
