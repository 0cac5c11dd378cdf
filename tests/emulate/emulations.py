"""Random emulations: kernels of some 10 to 40 ms, so that a busy machine's delays are small beside them."""

from __future__ import annotations

import random

from smpar.emulate import Emulation, Pipeline
from smpar.schedule import placement

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb", "zbv")


def pipeline(rng: random.Random, schedule: str, size: int, uneven: bool, slow: bool, speed: float = 1.0) -> Pipeline:
    """A chain of forwards of 10 ms on average per rank; with slow links a message takes as long as half of one."""
    ranks = placement(schedule, size)
    stages = len(ranks)
    share = 0.02 * size / stages * speed
    forward = [share * (rng.uniform(0.5, 1.5) if uneven else 1.0) for _ in range(stages)]
    weight = [f * (rng.uniform(0.7, 1.2) if uneven else 1.0) for f in forward]
    wire = [share * (rng.uniform(0.2, 0.6) if slow else 0.02) for _ in range(stages - 1)]
    latency = [share * (rng.uniform(0.1, 0.5) if slow else 0.02) for _ in range(stages - 1)]
    return Pipeline(
        ranks,
        forward=tuple(forward),
        backward=tuple(f + w for f, w in zip(forward, weight, strict=True)),
        weight=tuple(weight),
        saved=(1.0,) * stages,
        wire_forward=tuple(wire),
        wire_backward=tuple(w * (rng.uniform(0.8, 1.2) if uneven else 1.0) for w in wire),
        latency_forward=tuple(latency),
        latency_backward=tuple(latency),
    )


def emulation(
    rng: random.Random, schedule: str, size: int, uneven: bool, slow: bool, microbatches: int, replicas: int = 1
) -> Emulation:
    pipelines = tuple(
        pipeline(rng, schedule, size, uneven, slow, 1.0 + 0.3 * replica * uneven) for replica in range(replicas)
    )
    stages = len(pipelines[0].ranks)
    several = replicas > 1
    return Emulation(
        schedule,
        microbatches,
        pipelines,
        reduction=tuple(rng.uniform(0.01, 0.04) for _ in range(stages * several)),
        optimizer=tuple(rng.uniform(0.005, 0.01) for _ in range(stages)),
    )
