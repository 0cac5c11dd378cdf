"""Rotary positions (arXiv 2104.09864): pairs of features turn by an angle that grows with the position.

::

    neighbours (GPT-J)    x0 x1 | x2 x3 | x4 x5        halves apart (GPT-NeoX, LLaMA)    x0 x3 | x1 x4 | x2 x5
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, dim: int, base: float, halves: bool) -> Tensor:
    """Heads with their first ``dim`` features turned: [N, heads, S, D] -> the same shape."""
    turning, rest = x[..., :dim], x[..., dim:]
    steps = torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float64), base**-steps)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    shape = (2, dim // 2) if halves else (dim // 2, 2)
    pair = -2 if halves else -1
    a, b = turning.unflatten(-1, shape).unbind(pair)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), pair).flatten(-2)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)
