"""A whole model's forward and backward, timed: what its layers' times have to add up to."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smpar.runtime.measure import timed, undone
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
    forwards: list[float] = []
    backwards: list[float] = []
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), undone(model):
            for p, _ in gradients:  # as after `zero_grad`; later runs add to gradients, as later microbatches do
                p.grad = None
            begun = time.perf_counter()
            while len(forwards) <= _LEAST or (len(forwards) <= _MOST and time.perf_counter() - begun < enough):
                seconds, result = timed(functools.partial(fn, *call[0], **call[1]))
                forwards.append(seconds)
                roots = [t for t in tree.tensors(result) if t.requires_grad]
                starts = [torch.ones_like(t) for t in roots]
                backwards.append(timed(functools.partial(torch.autograd.backward, roots, starts))[0] if roots else 0.0)
                del result, roots
    finally:
        for p, gradient in gradients:
            p.grad = gradient
    return statistics.median(forwards[1:]), statistics.median(backwards[1:])
