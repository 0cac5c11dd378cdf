"""Emulations made up to try the simulator on: every schedule, even and uneven chains, fast and slow links."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from smpar.emulate.emulation import Emulation, Tied, fastest
from smpar.emulate.predict import predicted
from smpar.emulate.processes import Emulator
from smpar.planner.pipeline import Pipeline
from smpar.schedule import placement

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb", "zbv")
FORWARD = 0.02
"""Mean seconds of a rank's forward of a microbatch: what a machine delays a sleep by is little beside it."""
ATTEMPTS = 4  # times that an emulation is executed again, while other work on the machine disturbs it


def trial(
    rng: random.Random,
    schedule: str,
    size: int,
    uneven: bool = True,
    slow: bool = True,
    microbatches: int = 8,
    replicas: int = 1,
) -> Emulation:
    """An emulation with times by chance.

    Args:
        size: ranks of a pipeline.
        uneven: stages differ by up to a factor of three, and each further replica is slower by a third; else all stages
            take equal times.
        slow: a message takes about as long as a stage's forward, much of it on its channel; else next to nothing.
    """
    pipelines = [_pipeline(rng, schedule, size, uneven, slow)]
    for replica in range(1, replicas):
        pipelines.append(_slower(pipelines[0], 1 + replica * uneven / 3))
    stages = len(pipelines[0].ranks)
    reduction = tuple(FORWARD * rng.uniform(0.5, 2) for _ in range(stages)) if replicas > 1 else ()
    optimizer = tuple(FORWARD * rng.uniform(0, 0.5) for _ in range(size))
    tied = (Tied((0, stages - 1), FORWARD * rng.uniform(0, 1)),) if replicas > 1 else ()
    return Emulation(schedule, microbatches, tuple(pipelines), reduction, optimizer, tied)


def trials(processes: int, rng: random.Random) -> Iterator[Emulation]:
    """Every schedule on even and uneven chains with fast and slow links; on four processes and more, two replicas, too.

    Args:
        processes: of each emulation.
    """
    for schedule, uneven, slow in itertools.product(SCHEDULES, (False, True), (False, True)):
        replicas = 2 if processes >= 4 and uneven and not slow else 1
        yield trial(rng, schedule, processes // replicas, uneven, slow, replicas=replicas)


def executed_error(emulator: Emulator, emulation: Emulation, within: float = 0.01) -> float:
    """How much longer a step took than predicted, as a share of the prediction; negative: shorter.

    Other work on the machine delays a step and never hastens it: of several steps the fastest counts, and while it is
    further off than `within`, some more are executed.
    """
    expected = predicted(emulation).seconds
    best = float("inf")
    for _ in range(ATTEMPTS):
        best = min(best, fastest(emulator.run(emulation, steps=2)).seconds)
        if best <= expected * (1 + within):
            break
    return best / expected - 1


class Tried(NamedTuple):
    """Seconds of a step."""

    predicted: float
    executed: float

    @property
    def error(self) -> float:
        """Between 0 and 1: by which part of the prediction they differ."""
        return abs(self.executed / self.predicted - 1)


def tried(processes: int, rng: random.Random) -> list[Tried]:
    """All `trials` of so many processes, predicted and executed."""
    results = []
    with Emulator() as emulator:
        for emulation in trials(processes, rng):
            expected = predicted(emulation).seconds
            results.append(Tried(expected, expected * (1 + executed_error(emulator, emulation))))
    return results


def in_order(results: Sequence[Tried], apart: float = 0.02) -> bool:
    """Whether of any two the one that is predicted to be faster, by more than `apart` of its time, is faster."""
    pairs = itertools.permutations(results, 2)
    return all(a.executed < b.executed for a, b in pairs if a.predicted * (1 + apart) < b.predicted)


def _pipeline(rng: random.Random, schedule: str, size: int, uneven: bool, slow: bool) -> Pipeline:
    ranks = placement(schedule, size)
    stages = len(ranks)
    mean = FORWARD * size / stages

    def times(count: int, share: float, spread: float) -> tuple[float, ...]:
        return tuple(mean * share * (rng.uniform(1 - spread, 1 + spread) if uneven else 1.0) for _ in range(count))

    forward, weight, inputs = times(stages, 1, 0.5), times(stages, 1, 0.3), times(stages, 1, 0.3)
    boundaries = stages - 1
    return Pipeline(
        ranks,
        forward,
        backward=tuple(i + w for i, w in zip(inputs, weight, strict=True)),
        weight=weight,
        saved=(1,) * stages,
        wire_forward=times(boundaries, 0.6 if slow else 0.02, 0.5),
        wire_backward=times(boundaries, 0.6 if slow else 0.02, 0.5),
        latency_forward=times(boundaries, 0.3 if slow else 0.02, 0.5),
        latency_backward=times(boundaries, 0.3 if slow else 0.02, 0.5),
    )


def _slower(pipeline: Pipeline, factor: float) -> Pipeline:
    """The same on a device that takes so much longer for everything."""
    return replace(
        pipeline,
        forward=tuple(factor * seconds for seconds in pipeline.forward),
        backward=tuple(factor * seconds for seconds in pipeline.backward),
        weight=tuple(factor * seconds for seconds in pipeline.weight),
    )
