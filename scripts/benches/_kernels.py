"""What layers do on a device: arithmetic, memory traffic, collectives; and a straight line of seconds by samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from smpar.planner.cluster import DeviceType
from smpar.planner.hardware import Kernels

HALF = 2.0
"""Bytes of an element in half precision."""


@dataclass(frozen=True)
class Work:
    """A layer's forward for one sample, undivided.

    Attributes:
        flops: of it.
        weighted: those of products with weights.
        traffic: bytes that it moves between its device and that device's memory.
        saved, whole_saved: as of `smpar.planner.profile.Layer`.
        collectives: elements of each of the two sums over a tensor-parallel group, of forward and backward each.
        divided: whether tensor parallelism divides its parameters.
        shrinks: and its work.
        logits: of a cross-entropy that follows.
    """

    flops: float
    traffic: float
    saved: float = 0.0
    whole_saved: float = 0.0
    weighted: float = 0.0
    collectives: float = 0.0
    divided: bool = False
    shrinks: bool = True
    logits: float = 0.0


class Line(NamedTuple):
    """``fixed + slope * samples`` seconds."""

    fixed: float
    slope: float

    def at(self, samples: float) -> float:
        return self.fixed + self.slope * samples


Lines = tuple[Line, Line, Line]
"""Of forward, backward, and the part of the backward that gives the weights' gradients."""


def kept(elements: float) -> float:
    """Bytes of so many elements kept for the backward."""
    return HALF * elements


def attention(rows: int, tokens: int, width: int, heads: int, score: float, shrinks: bool = True) -> Work:
    """A transformer block of `rows` tokens in sequences of `tokens`.

    ``24 r h^2 + 4 r s h`` FLOPs; unfused kernels of half precision move about 20 bytes per score (write, mask, softmax,
    dropout and its mask, read) and 100 per hidden element. Kept for the backward: ``r h (10 + 24 / tp)`` bytes and
    `score` bytes of each score (arXiv 2205.05198, equations 1 and 2).
    """
    hidden, scores = float(rows * width), float(rows * tokens * heads)
    return Work(
        24.0 * hidden * width + 4.0 * hidden * tokens,
        20.0 * scores + 100.0 * hidden,
        saved=34.0 * hidden + score * scores,
        whole_saved=10.0 * hidden + (0.0 if shrinks else score * scores),
        weighted=24.0 * hidden * width,
        collectives=hidden,
        divided=True,
        shrinks=shrinks,
    )


def stretched(
    measured: float, work: Work, passes: int, device: DeviceType, tp: int, intra: float, kernels: Kernels, limited: bool
) -> Lines:
    """Seconds of forward and backward by samples, from the measured seconds of the forward of one.

    Args:
        passes: forwards that one forward runs.
        intra: bytes per second of a ring among the tensor-parallel group.
        limited: whether the card slows down under a lasting load.
    """
    one = measured / passes
    share = tp if work.shrinks else 1
    sums = min(one, collective_seconds(work, tp, intra))
    calc = work.flops / share / (device.peak_flops * kernels.flops)
    move = work.traffic / share / (device.memory_bandwidth * kernels.memory)
    fits = min(1.0, (one - sums) / max(calc + move, 1e-12))  # the device was not longer at work than was measured
    calc, move = calc * fits, move * fits
    host = one - sums - calc - move
    if limited:
        calc, move = calc * kernels.lasting, move * kernels.lasting
    return lines(work, passes, host, calc, move, sums, device, tp, kernels)


def modelled(work: Work, host: float, device: DeviceType, tp: int, intra: float, kernels: Kernels) -> Lines:
    """The same where nothing was measured.

    Args:
        host: seconds that the host takes for a forward.
    """
    share = tp if work.shrinks else 1
    calc = work.flops / share / (device.peak_flops * kernels.flops)
    move = work.traffic / share / (device.memory_bandwidth * kernels.memory)
    return lines(work, 1, host, calc, move, collective_seconds(work, tp, intra), device, tp, kernels)


def collective_seconds(work: Work, tp: int, intra: float) -> float:
    """Two all-reduces in half precision, by a ring."""
    return 2 * HALF * work.collectives * 2 * (tp - 1) / tp / intra if tp > 1 else 0.0


def lines(
    work: Work,
    passes: int,
    host: float,
    calc: float,
    move: float,
    sums: float,
    device: DeviceType,
    tp: int,
    kernels: Kernels,
) -> Lines:
    """Forward and backward of a layer with these parts of one forward pass of one sample."""
    loss = work.logits / tp * kernels.logit_traffic / (device.memory_bandwidth * kernels.memory)
    back = kernels.back_flops * calc + kernels.back_bytes * move + sums
    return (
        Line(passes * host, passes * (calc + move + sums) + loss / 3),
        Line(kernels.back_host * host, back + 2 * loss / 3),
        Line(0.0, calc * work.weighted / work.flops if work.flops else 0.0),
    )
