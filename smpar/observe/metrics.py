"""A line per step on rank 0.

    step 12  loss 2.3451  812.4 samples/s  bubble 18.2 %  peak 312 MB | 287 MB  0.0394 s

``bubble`` is the part of the step in which a stage computes nothing (it waits, agrees, reduces or shares), on average
over the stages; ``peak`` the most memory each stage has held so far: tensors of the device on CUDA, else the process's
resident memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from smpar.comm.messages import CommGroup, allgather
from smpar.comm.world import World
from smpar.observe.spans import Spans
from smpar.stage.split import Batch
from smpar.trace import tree
from smpar.trace.graph import size


@dataclasses.dataclass(frozen=True)
class Line:
    """What one step was like.

    Attributes:
        step: its number, from 0.
        loss: the mean over the batch of the first scalar that the step returned; None if it returned none.
        samples: in this pipeline's batch, times the replicas; None if the step had no tensors to split.
        seconds: from the call of the step to its end on the first rank.
        bubble: idle part of the stages' time, 0 to 1.
        peaks: bytes by stage.
    """

    step: int
    loss: float | None
    samples: int | None
    seconds: float
    bubble: float
    peaks: tuple[int, ...]

    def __str__(self) -> str:
        parts = [f"step {self.step}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.5g}")
        if self.samples is not None:
            parts.append(f"{self.samples / self.seconds:.4g} samples/s")
        parts.append(f"bubble {100 * self.bubble:.1f} %")
        parts.append("peak " + " | ".join(map(size, self.peaks)))
        parts.append(f"{self.seconds:.4g} s")
        return "  ".join(parts)


def report_step(
    spans: Spans, world: World, step: int, results: Sequence[Any], batch: Batch, samples: int | None, elapsed: int
) -> Line | None:
    """Gather what a step was like over this rank's pipeline, and print it on rank 0; all its ranks call this.

    Args:
        results: of the step function, by microbatch.
        batch: this rank's.
        samples: of this rank's replica.
        elapsed: nanoseconds of the step on this rank.

    Returns:
        the line, on rank 0.
    """
    idle = 1.0 - spans.totals().busy / max(elapsed, 1)
    stages = allgather((idle, peak_memory(world.device)), CommGroup.PP_GROUP)
    if world.rank != 0:
        return None
    line = Line(
        step,
        first_scalar(results, batch.weights),
        None if samples is None else samples * world.axis_size("rdp"),
        elapsed / 1e9,
        max(0.0, sum(i for i, _ in stages) / len(stages)),
        tuple(peak for _, peak in stages),
    )
    print(line, flush=True)
    return line


def first_scalar(results: Sequence[Any], weights: Sequence[float]) -> float | None:
    """The first tensor among the step's results that is one number per microbatch, averaged over the batch."""
    columns = [tree.tensors(result) for result in results]
    for tensors in zip(*columns, strict=False):
        if all(t.numel() == 1 for t in tensors):
            return sum(w * float(t.detach()) for t, w in zip(tensors, weights, strict=True)) / sum(weights)
    return None


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: of tensors on a CUDA device, else resident memory of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # not Linux: no process of ours is told its own peak everywhere
        return int(psutil.Process().memory_info().rss)
