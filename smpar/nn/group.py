"""The tensor-parallel group as twins see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from smpar.runtime.core import runtime


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """Ranks that hold the slices of one stage of one replica.

    Attributes:
        group: for its collectives; None where only shapes are asked for.
        rank, size: this rank's place, and their number.
        memory: whether hidden states between regions are slices of the sequence (``optimize="memory"``).
        joined: whether the ranks bring different samples (not ``prescaled_batch``).
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    memory: bool
    joined: bool

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        """A copy of a model is of the same ranks."""
        return self

    @classmethod
    def current(cls) -> TensorGroup:
        """The one that ``smpar.init`` made, or that is `assumed`.

        Raises:
            NotInitialized: ``smpar.init`` has not run.
        """
        if _assumed:
            return _assumed[-1]
        now = runtime()
        config, world = now.config, now.world
        size = world.axis_size("tp")
        return cls(
            world.process_group("tp") if size > 1 else None,
            world.axis_rank("tp"),
            size,
            config.optimize == "memory",
            not config.prescaled_batch,
        )


_assumed: list[TensorGroup] = []


@contextlib.contextmanager
def assumed(group: TensorGroup) -> Iterator[None]:
    """Inside, the current group is this one, as for a model that is only traced."""
    _assumed.append(group)
    try:
        yield
    finally:
        _assumed.pop()


def partial(parameter: nn.Parameter, group: TensorGroup) -> None:
    """Mark a whole parameter of whose gradient each rank of the group computes a part.

    Its gradient is scaled by the group's size, so that the mean over all data-parallel ranks, which every whole
    parameter gets, is the sum over the group and the mean over the replicas. So it will be for one that is frozen, if
    it is trained later.
    """
    if getattr(parameter, "smp_partial", False) or not parameter.is_floating_point():
        return
    parameter.smp_partial = True  # type: ignore[attr-defined]
    trained = parameter.requires_grad
    parameter.requires_grad_()  # else torch takes no hook; it keeps it when the parameter is frozen again
    parameter.register_hook(lambda grad: grad * group.size)
    parameter.requires_grad_(trained)
