"""The one runtime of a process: what ``smpar.init`` makes and ``smpar.shutdown`` takes down."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from smpar.comm.world import World, refuse, set_current
from smpar.config import Config, given_in
from smpar.errors import ConfigError, ModelError, NotInitialized, PlanError
from smpar.observe.perfetto import write_trace
from smpar.observe.spans import Spans, clock_of
from smpar.runtime.plan_file import with_plan

if TYPE_CHECKING:
    from smpar.model import DistributedModel
    from smpar.optimizer import DistributedOptimizer


class Runtime:
    """Configuration, world, and the model in training.

    Attributes:
        step: number of steps run.
        microbatch: share of the microbatch that runs now without a pipeline; None outside of a step.
        in_step: whether a step is running.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.trace_dir = os.environ.get("SMPAR_TRACE")
        self.spans = Spans(bool(self.trace_dir), clock_of(world.device))
        self.spans.counting = os.environ.get("SMPAR_METRICS", "0") not in ("", "0")
        if self.trace_dir:
            atexit.register(self.close)  # before the world's own: the last registered goes first
        self.step = 0
        self.microbatch: float | None = None
        self.in_step = False
        self.backward_ran = False
        self.post_partition: list[Callable[[Any, Any], None]] = []
        self.post_step: list[Callable[[Any, Any], None]] = []
        self._model: weakref.ref[DistributedModel] | None = None
        self._optimizer: weakref.ref[DistributedOptimizer] | None = None

    @property
    def model(self) -> DistributedModel:
        """The model in training.

        Raises:
            ModelError: there is none.
        """
        model = self._model() if self._model is not None else None
        if model is None:
            raise ModelError("no smpar.DistributedModel has been made")
        return model

    @property
    def stages(self) -> int:
        """Number of pipeline stages, virtual ones included."""
        return self.config.stages

    @property
    def joined(self) -> bool:
        """Whether ranks of a tensor-parallel group have samples of their own."""
        return self.world.axis_size("tp") > 1 and not self.config.prescaled_batch

    @property
    def shard(self) -> int:
        """Outside of distributed modules, ranks with samples of their own draw for themselves: see `trace.draws`."""
        return self.world.axis_rank("tp") + 1 if self.joined else 0

    @property
    def maybe_model(self) -> DistributedModel | None:
        return self._model() if self._model is not None else None

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        return self._optimizer() if self._optimizer is not None else None

    def adopt_model(self, model: DistributedModel) -> None:
        self._model = weakref.ref(model)

    def adopt_optimizer(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def close(self) -> None:
        """Write the trace, if one was asked for; all ranks call this together."""
        if self.trace_dir:
            folder, self.trace_dir = self.trace_dir, None
            atexit.unregister(self.close)
            write_trace(self.spans, self.world, folder)


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The process's runtime.

    Raises:
        NotInitialized: ``smpar.init`` has not run.
    """
    if _runtime is None:
        raise NotInitialized("smpar.init must come first", "smpar is not initialised", "smpar.init({...})")
    return _runtime


def init(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Start smpar: check the configuration, join the other ranks, make the process groups.

    Under torchrun all ranks meet here; without it there is one rank, and both degrees must be 1.

    Args:
        config: keys of SMP's configuration; None reads the environment variable ``SM_HP_MP_PARAMETERS``. The key
            ``plan`` holds a plan of `smpar.plan` or the path of its file, which decides the degrees, the schedule, the
            stage of every unit and the place of every rank; a path alone means ``{"plan": path}``.

    Raises:
        ConfigError: an unknown key, a value out of range, or a second call with another configuration.
        MeshError: the number of ranks does not fit the degrees, or the plan.
        PlanFileError: there is no such plan, or it is broken.
        NotBuiltYet: the configuration or the plan asks for something that this version does not do.
    """
    global _runtime
    try:
        checked = Config.from_dict(with_plan(given_in() if config is None else config))
    except (ConfigError, PlanError) as error:
        if _runtime is None:
            refuse(error)
        raise
    if _runtime is not None:
        if _runtime.config == checked:
            return
        before, now = _runtime.config.to_dict(), checked.to_dict()
        raise ConfigError(
            "a process keeps the configuration of its first smpar.init",
            "a second one with "
            + ", ".join(f"{k} = {v!r:.200} (before: {before[k]!r:.200})" for k, v in now.items() if v != before[k]),
            "give both the same configuration, or call smpar.shutdown() between them",
        )
    world = World.open(checked)
    set_current(world)
    _runtime = Runtime(checked, world)


def shutdown() -> None:
    """Leave the job: close groups and threads, write the trace. ``smpar.init`` may follow."""
    global _runtime
    if _runtime is None:
        return
    runtime, _runtime = _runtime, None
    try:
        runtime.close()
    finally:
        runtime.world.close()
        set_current(None)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_initialized() -> bool:
    """Whether ``smpar.init`` has run."""
    return _runtime is not None


def number_of_stages() -> int | None:
    """Number of pipeline stages; None before ``smpar.init``."""
    return None if _runtime is None else _runtime.stages


def is_tracing() -> bool:
    """Whether the step function now runs under fake tensors, to be traced."""
    model = _runtime.maybe_model if _runtime is not None else None
    return model is not None and model.pipeline is not None and model.pipeline.tracing
