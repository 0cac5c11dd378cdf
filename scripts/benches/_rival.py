"""The same model under ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benches._chains import Chain, loss_of


@dataclass(frozen=True)
class Match:
    """A schedule that both have.

    Attributes:
        config: smpar's keys for it.
        virtual: stages of each rank.
        placed: stage -> rank, on a number of ranks.
        make: torch's class for it.
        single: whether torch's class takes one stage instead of a list.
    """

    config: dict[str, Any]
    virtual: int
    placed: Callable[[int, int], int]
    make: Callable[..., Any]
    single: bool


def loop(stage: int, ranks: int) -> int:
    """Stages go round and round over the ranks."""
    return stage % ranks


def vee(stage: int, ranks: int) -> int:
    """Stages go down the ranks and up again."""
    return min(stage, 2 * ranks - 1 - stage)


MATCHES = {
    "gpipe": Match({"pipeline": "gpipe"}, 1, loop, ScheduleGPipe, True),
    "1f1b": Match({"pipeline": "1f1b"}, 1, loop, Schedule1F1B, True),
    "interleaved_1f1b": Match(
        {"pipeline": "interleaved_1f1b", "virtual_stages": 2}, 2, loop, ScheduleInterleaved1F1B, False
    ),
    "zb": Match({"pipeline": "zb"}, 1, loop, ScheduleInterleavedZeroBubble, False),
    "zbv": Match({"pipeline": "zbv", "virtual_stages": 2}, 2, vee, ScheduleZBVZeroBubble, False),
}


class Rival:
    """One step of ``torch.distributed.pipelining``.

    The loss carries the mean over microbatches, which spares torch its own pass over the gradients; the outputs are
    not gathered, since nobody wants them.

    Raises:
        ValueError: torch does not take this schedule on these stages.
    """

    def __init__(self, match: Match, model: Chain, cuts: Sequence[int], microbatches: int) -> None:
        rank, ranks, stages = dist.get_rank(), dist.get_world_size(), len(cuts) - 1
        self.parts = {
            s: model.part(cuts[s], cuts[s + 1]) for s in range(stages) if match.placed(s, ranks) == rank
        }  # fmt: skip
        self.has_loss = stages - 1 in self.parts
        held = [PipelineStage(part, s, stages, torch.device("cpu")) for s, part in self.parts.items()]
        self._first = 0 in self.parts

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return loss_of(output, target) / microbatches

        self._schedule = match.make(
            held[0] if match.single else held, n_microbatches=microbatches, loss_fn=loss, scale_grads=False
        )

    def step(self, x: Tensor, target: Tensor) -> list[Tensor]:
        """Forward and backward of a batch; gives the microbatches' losses over their number, where they are."""
        losses: list[Tensor] = []
        inputs = (x,) if self._first else ()
        if self.has_loss:
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*inputs, return_outputs=False)
        return losses
