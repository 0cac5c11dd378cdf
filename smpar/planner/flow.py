"""Sums over neighbouring layers: their times, what they hold, and what crosses the edges of a stage of them.

::

    layers     0   1   2 | 3   4 | 5          a stage of layers 3 and 4: sums[5] - sums[3], and the tensors that
               └───────────▲───────▲          come in: one, however many of its layers use it
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smpar.planner.network import Way
from smpar.planner.profile import Divided, Profile, Seconds

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Sums of layers' times from the first one on: ``forward[i]`` is that of layers 0 to i - 1."""

    forward: Floats
    backward: Floats
    weight: Floats

    @property
    def whole(self) -> float:
        """Forward and backward of the whole model."""
        return float(self.forward[-1] + self.backward[-1])

    @classmethod
    def make(cls, seconds: Seconds, divided: Divided, microbatch: int, ring: Way) -> Rows:
        """From the times by layer, and what their collectives take.

        Args:
            divided: has the collectives.
            microbatch: samples.
            ring: what an all-reduce takes in a tensor-parallel group.
        """

        def collectives(nbytes: Sequence[float], calls: Sequence[float]) -> Floats:
            return _row(nbytes) * microbatch * ring.per_byte + _row(calls) * ring.latency

        return cls(
            _sums(_row(seconds.forward) + collectives(divided.forward_bytes, divided.forward_calls)),
            _sums(_row(seconds.backward) + collectives(divided.backward_bytes, divided.backward_calls)),
            _sums(_row(seconds.weight)),
        )


class Flow:
    """What crosses the edges of stages, and what layers keep on each device; per sample and element.

    Args:
        profile: the model.
        tp: the tensor-parallel degree.
    """

    def __init__(self, profile: Profile, tp: int) -> None:
        tensors, divided = profile.tensors, profile.at(tp)
        self._source = np.array([t.source for t in tensors for _ in t.targets], dtype=np.int64)
        self._target = np.array([i for t in tensors for i in t.targets], dtype=np.int64)
        self._tensor = np.array([k for k, t in enumerate(tensors) for _ in t.targets], dtype=np.int64)
        self.elements = divided.elements
        self._elements = np.array(divided.elements)
        self._graded = self._elements * np.array([t.gradient for t in tensors], dtype=np.float64)
        self._known: dict[tuple[int, int], tuple[float, float]] = {}
        self.tied = divided.tied
        self._tied = [(sorted(set(t.layers)), n) for t, n in zip(profile.tied, divided.tied, strict=True)]
        self._parameters, self._whole, self._saved = (
            _sums(row) for row in (divided.parameters, divided.whole_parameters, divided.saved)
        )
        self.transient = divided.transient
        self._any_transient = any(self.transient)
        self.usual_transient = statistics.median(self.transient)
        size = profile.size
        self.mean_boundary = sum(self.into(i, size)[0] for i in range(1, size)) / max(1, size - 1)

    def into(self, first: int, end: int) -> tuple[float, float]:
        """Elements per sample that layers `first` to `end` - 1 get from others, and of gradients that they return."""
        found = self._known.get((first, end))
        if found is None:
            outside = (self._source < first) | (self._source >= end)
            used = np.unique(self._tensor[outside & (self._target >= first) & (self._target < end)])
            found = self._known[first, end] = float(self._elements[used].sum()), float(self._graded[used].sum())
        return found

    def most_transient(self, first: int, end: int) -> float:
        """Bytes per sample that the largest of these layers needs while it runs."""
        return max(self.transient[first:end]) if self._any_transient else 0.0

    def parameters_of(self, first: int, end: int) -> float:
        """Parameters on a device that holds these layers; what several of them share is there once."""
        again = sum(n * max(0, sum(first <= i < end for i in layers) - 1) for layers, n in self._tied)
        return float(self._parameters[end] - self._parameters[first]) - again

    def whole_of(self, first: int, end: int) -> float:
        """Those of them that every rank of a tensor-parallel group has."""
        return float(self._whole[end] - self._whole[first])

    def saved_of(self, first: int, end: int) -> float:
        """Bytes per sample kept there until the backward."""
        return float(self._saved[end] - self._saved[first])


def _row(values: Sequence[float]) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _sums(row: Sequence[float] | Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.asarray(row, dtype=np.float64))))
