"""How fast a step can be: the computations of one rank alone, and what the schedule leaves idle.

    bound = the larger rank's own computation  x  makespan / busiest rank's work, on the simulated clock

Each rank runs the computations of its timetable in their order, without a message, while the other one does the same:
two busy cores slow each other, so what one process takes alone is no bound.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from benches._chains import Chain, loss_of
from smpar.schedule import Action, Kind, Schedule
from smpar.schedule.program import Program
from smpar.schedule.simulate import makespan, times


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one microbatch on one stage; ``weight`` is the part of ``backward`` that may run later."""

    forward: float
    backward: float
    weight: float


class Alone:
    """This rank's computations of one step, in the timetable's order.

    Args:
        parts: stage -> its layers, of this rank.
        inputs: stage -> a microbatch of its input.
        target: of a microbatch, for the last stage.
        actions: this rank's timetable.
        stage_of: segment -> stage.
    """

    def __init__(
        self,
        parts: Mapping[int, Chain],
        inputs: Mapping[int, Tensor],
        target: Tensor,
        actions: tuple[Action, ...],
        stage_of: tuple[int, ...],
    ) -> None:
        self.parts, self._inputs, self._target = parts, inputs, target
        self._actions, self._stage_of = actions, stage_of
        self._last = max(stage_of)
        self._gradients: dict[int, Tensor] = {}
        self.forwards: dict[int, list[float]] = {stage: [] for stage in parts}
        self.backwards: dict[int, list[float]] = {stage: [] for stage in parts}

    def __call__(self) -> None:
        outputs: dict[tuple[int, int], Tensor] = {}
        for action in self._actions:
            stage = self._stage_of[action.segment]
            start = time.perf_counter()
            if action.kind is Kind.F:
                outputs[stage, action.microbatch] = self.forward(stage, self._leaf(stage))
                self.forwards[stage].append(time.perf_counter() - start)
            elif action.kind in (Kind.B, Kind.I):  # a split backward's work is the whole one's
                output = outputs.pop((stage, action.microbatch))
                output.backward(self._gradient(stage, output))
                self.backwards[stage].append(time.perf_counter() - start)

    def forward(self, stage: int, leaf: Tensor) -> Tensor:
        output: Tensor = self.parts[stage](leaf)
        return loss_of(output, self._target) if stage == self._last else output

    def _leaf(self, stage: int) -> Tensor:
        given = self._inputs[stage].detach()
        return given.requires_grad_() if given.is_floating_point() else given

    def _gradient(self, stage: int, output: Tensor) -> Tensor:
        if stage not in self._gradients:
            self._gradients[stage] = torch.full_like(output, 1e-3)
        return self._gradients[stage]

    def input_seconds(self, rounds: int) -> dict[int, float]:
        """Stage -> seconds of the backward of its input alone; 0 where the input has no gradient."""
        result = {}
        for stage in self.parts:
            taken = [0.0]
            for _ in range(rounds):
                leaf = self._leaf(stage)
                if leaf.requires_grad:
                    output = self.forward(stage, leaf)
                    start = time.perf_counter()
                    torch.autograd.grad(output, leaf, self._gradient(stage, output))
                    taken.append(time.perf_counter() - start)
            result[stage] = statistics.median(taken[1:]) if taken[1:] else 0.0
        return result

    def costs(self, input_seconds: Mapping[int, float]) -> dict[int, Cost]:
        """Stage -> what a microbatch takes there, medians over all calls so far."""
        result = {}
        for stage in self.parts:
            backward = statistics.median(self.backwards[stage])
            weight = max(0.0, backward - input_seconds[stage])
            result[stage] = Cost(statistics.median(self.forwards[stage]), backward, weight)
        return result


def bubble_factor(schedule: Schedule, program: Program, costs: Mapping[int, Cost]) -> float:
    """The step's length over the busiest rank's work, with these costs and messages that take no time."""
    segments = tuple(
        dataclasses.replace(s, forward=(c := costs[s.stage]).forward, backward=c.backward, weight=c.weight)
        for s in program.segments
    )
    timeline = times(schedule, dataclasses.replace(program, segments=segments, backward=True))
    work = [0.0] * len(schedule.ranks)
    for timed in timeline:
        work[timed.rank] += timed.end - timed.start
    return makespan(timeline) / max(work)


def everyones(costs: Mapping[int, Cost]) -> dict[int, Cost]:
    """The costs of all ranks' stages; all ranks call it together."""
    parts: list[dict[int, Cost]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, dict(costs))
    return {stage: cost for part in parts for stage, cost in part.items()}
