"""``module.to(...)`` inside a trial run: PyTorch would swap fake parameters in place, but others refer to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """As ``nn.Module._apply``, with new parameters and buffers in place of the old ones where they change."""
    for child in module.children() if recurse else ():
        _apply(child, fn)
    with torch.no_grad():
        for group in (module._parameters, module._buffers):
            values: dict[str, Any] = group
            for name, tensor in list(values.items()):
                if tensor is None or (made := fn(tensor)) is tensor:
                    continue
                parameter = isinstance(tensor, nn.Parameter)
                values[name] = nn.Parameter(made, tensor.requires_grad) if parameter else made
    return module


@contextlib.contextmanager
def replacing() -> Iterator[None]:
    """While this lasts, conversions replace parameters instead of swapping them."""
    plain = nn.Module._apply
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]
