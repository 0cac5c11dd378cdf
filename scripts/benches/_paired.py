"""Steps of several implementations in turn, started by all ranks at one moment, and what their times say.

::

    round 0   smpar  torch  compute        the order rotates from round to round
    round 1   torch  compute  smpar        pair = the two times of one round, milliseconds apart
    round 2   compute  smpar  torch        ratio = median over pairs, its interval by resampling pairs
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

_LEAD = 1e-3  # seconds until a common start: longer than a rank needs to wake up
_RESAMPLES = 4000


def start_together() -> float:
    """Wait for all ranks, then for one moment, the same on all; returns it, in `time.monotonic`'s seconds.

    Ranks that only wait for a barrier leave it up to 0.2 ms apart, and cold.
    """
    moment = torch.tensor([time.monotonic() + _LEAD], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(moment, dist.ReduceOp.MAX)
    at = float(moment)
    while time.monotonic() < at:
        pass
    return at


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection meanwhile; what there is now is never looked at again until the end."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def alternate(
    ways: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object], first: int = 0
) -> dict[str, list[float]]:
    """Seconds of ``rounds`` calls of each way on this rank, in turn.

    Args:
        before: called before each, untimed.
        first: number of the first round; it says which way begins.
    """
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in names}
    with quiet():
        for number in range(first, first + rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                before()
                start = start_together()
                ways[name]()
                taken[name].append(time.monotonic() - start)
    return taken


def slowest(own: Sequence[float]) -> list[float]:
    """For each step the time of the rank that took longest; all ranks call it together."""
    values = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(v) for v in values]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles, in seconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, middle, high = np.percentile(values, (25, 50, 75))
        return cls(float(middle), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median * 1e3:7.1f} ({self.low * 1e3:.1f}..{self.high * 1e3:.1f}) ms"


@dataclass(frozen=True)
class Ratio:
    """A ratio with its 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        """Median of the pairs' ratios; the interval holds 95 % of the medians of resampled pairs (bootstrap)."""
        ratios = np.asarray(above) / np.asarray(below)
        picks = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
        low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5))
        return cls(float(np.median(ratios)), float(low), float(high), len(ratios))

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.pairs} pairs"
