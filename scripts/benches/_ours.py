"""The same model under smpar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

import smpar as smp
from benches._chains import Chain, loss_of, stage_of_layer
from smpar.config import Config
from smpar.errors import NotBuiltYet
from smpar.schedule import Schedule
from smpar.schedule.program import Program


@smp.step
def train_step(model: smp.DistributedModel, x: Tensor, target: Tensor) -> Tensor:
    loss = loss_of(model(x), target)
    model.backward(loss)
    return loss


class Ours:
    """A model in training: ``step(x, target)`` is forward and backward of a batch, and gives the mean loss."""

    def __init__(self, chain: Chain) -> None:
        self.model = smp.DistributedModel(chain)
        self.layers = list(chain.layers)

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        output: Any = train_step(self.model, x, target)
        mean: Tensor = output.reduce_mean()
        return mean

    @property
    def timetable(self) -> tuple[Schedule, Program]:
        """Of the last step: the schedule that ran, and a microbatch's program."""
        pipeline = self.model.pipeline
        if pipeline is None or pipeline.timetable is None:
            raise RuntimeError("the step did not run by a timetable")
        return pipeline.timetable.schedule, pipeline.timetable.programs[0].shape

    @property
    def layer_stages(self) -> list[int]:
        """Layer of the chain -> its stage, after the first step."""
        assert self.model.pipeline is not None
        units = self.model.pipeline.layout.units
        return [
            next(stage for unit, stage in units.items() if layer in unit.modules() or unit in layer.modules())
            for layer in self.layers
        ]


def configuration(keys: Mapping[str, Any], microbatches: int, auto: bool = False) -> dict[str, Any]:
    """A whole configuration: two pipeline ranks, and the partition by hand or the fastest one."""
    partition = {"optimize": "speed", "memory_weight": 0.0} if auto else {"auto_partition": False}
    return {
        "pipeline_parallel_degree": 2,
        "microbatches": microbatches,
        **partition,
        **({} if auto else {"default_partition": 0}),
        **keys,
    }


def why_missing(keys: Mapping[str, Any]) -> str | None:
    """What this version of smpar says if it lacks a schedule."""
    try:
        Config.from_dict(configuration(keys, 4))
    except NotBuiltYet as error:
        return error.rule
    return None


@contextlib.contextmanager
def ours(
    make: Callable[[], Chain], cuts: Sequence[int] | None, keys: Mapping[str, Any], microbatches: int
) -> Iterator[Ours]:
    """smpar with one configuration; shut down at the end, so that another one may follow.

    Args:
        make: the model, the same each time.
        cuts: first layers of the stages, and the end; None leaves the partition to smpar.
    """
    smp.init(configuration(keys, microbatches, auto=cuts is None))
    try:
        model = make()
        if cuts is not None:
            for layer, stage in zip(model.layers, stage_of_layer(cuts), strict=True):
                smp.set_partition(layer, stage)
        yield Ours(model)
    finally:
        smp.shutdown()
