"""A whole model's forward and backward, timed: what its layers' times have to add up to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smpar.stage.split import Call
from smpar.trace import tree

_LEAST, _MOST = 3, 30  # runs, after one to warm up


def whole_seconds(
    fn: Callable[..., Any], call: Call, model: nn.Module, device: torch.device, enough: float
) -> tuple[float, float]:
    """Median seconds of a forward and of its backward, if there is one; the model is left as it was.

    Args:
        fn, call: what runs the model, and its arguments.
        device: where it runs.
        enough: seconds of timing.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    forwards: list[float] = []
    backwards: list[float] = []
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            for p, _ in gradients:  # as after `zero_grad`; later runs add to gradients, as later microbatches do
                p.grad = None
            begun = time.perf_counter()
            while len(forwards) <= _LEAST or (len(forwards) <= _MOST and time.perf_counter() - begun < enough):
                start = _now(device)
                result = fn(*call[0], **call[1])
                middle = _now(device)
                roots = [t for t in tree.tensors(result) if t.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
                forwards.append(middle - start)
                backwards.append(_now(device) - middle if roots else 0.0)
                del result, roots
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return statistics.median(forwards[1:]), statistics.median(backwards[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
