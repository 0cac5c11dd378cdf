"""Reductions of gradients while a rank goes on with its actions: ranks really meet, and sleep what it takes.

::

    rank 0    |0B0|0B1|  last backward ─▶ tied sum with rank 1 ─▶ reduction with rank 0 of the other replicas
    rank 1    |1B0|1B1|...                ▲ in its own thread      one after the other, in a thread

A meeting is a reduction of one number: the moment at which the last of its ranks is ready. The time of moving the data
is slept, as large collectives among many processes of one machine take what they take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from smpar.comm.world import World
from smpar.emulate.clock import reach
from smpar.emulate.emulation import Emulation


class Reductions:
    """This rank's; all ranks of the world make theirs together."""

    def __init__(self, emulation: Emulation, world: World) -> None:
        self._emulation, self._world = emulation, world
        self._rank = world.axis_rank("pp")
        self._ties = self._groups()

    def begin(self, moment: float) -> StepReductions:
        """Those of a step that starts at that moment."""
        return StepReductions(self._emulation, self._world, self._ties, moment)

    def _groups(self) -> list[tuple[int, dist.ProcessGroup | None]]:
        """The tied sums in which this rank takes part, and with whom; None: with itself."""
        mine: list[tuple[int, dist.ProcessGroup | None]] = []
        ranks, mesh = self._emulation.pipelines[0].ranks, self._world.mesh
        for index, tied in enumerate(self._emulation.tied):
            homes = sorted({ranks[stage] for stage in tied.stages})
            for replica in range(self._emulation.replicas):
                members = [mesh.rank(pp=rank, rdp=replica) for rank in homes]
                group = self._world.new_group(members, "gloo", f"smpar tied {index}") if homes[1:] else None
                if self._world.rank in members:
                    mine.append((index, group))
        return mine


class StepReductions:
    """The reductions of one step."""

    def __init__(
        self, emulation: Emulation, world: World, ties: list[tuple[int, dist.ProcessGroup | None]], begin: float
    ) -> None:
        rank = world.axis_rank("pp")
        self._emulation, self._begin = emulation, begin
        self._others = world.process_group("rdp") if emulation.replicas > 1 else None
        self._stages = emulation.reduced(rank)
        self._own: dict[int, Future[float]] = {stage: Future() for stage in self._stages}
        self._complete = dict(self._own)
        self._done: Future[float] = Future()
        for index, group in ties:
            mine = [stage for stage in emulation.tied[index].stages if stage in self._complete]
            parts, total = [self._complete[stage] for stage in mine], Future[float]()
            _start(total, _sum(parts, group, emulation.tied[index].seconds))
            self._complete.update(dict.fromkeys(mine, total))
        if self._stages:
            _start(self._done, self._reduce)
        else:
            self._done.set_result(begin)

    def ready(self, stage: int, moment: float) -> None:
        """This rank has all gradients of the stage's weights."""
        if stage in self._own:
            self._own[stage].set_result(moment)

    def finish(self) -> float:
        """Wait for all of them; the moment at which the last was done."""
        return self._done.result()

    def _reduce(self) -> float:
        free = self._begin
        for stage in self._stages:
            moment = self._complete[stage].result()
            if self._others is not None:
                moment = latest(moment, self._others)
            free = reach(reach(max(free, moment)) + self._emulation.reduction[stage])
        return free


def latest(moment: float, group: dist.ProcessGroup) -> float:
    """The latest of all ranks' moments."""
    moments = torch.tensor([moment], dtype=torch.float64)
    dist.all_reduce(moments, dist.ReduceOp.MAX, group)
    return float(moments)


def _sum(parts: list[Future[float]], group: dist.ProcessGroup | None, seconds: float) -> Callable[[], float]:
    def run() -> float:
        moment = max(part.result() for part in parts)
        if group is not None:
            moment = latest(moment, group)
        return reach(reach(moment) + seconds)

    return run


def _start(result: Future[float], work: Callable[[], float]) -> None:
    """Do the work in a thread."""

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="smpar-reductions", daemon=True).start()
