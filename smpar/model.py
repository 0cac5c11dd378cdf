"""``smpar.DistributedModel``: the user's module, trained over the pipeline."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smpar.comm.buckets import CommHook, cap_in_bytes
from smpar.comm.peers import Peers
from smpar.errors import CommHookError, JoinError, ModelError, NotThroughModel, OutsideOfStep, WrongBackward
from smpar.nn.distribute import distribute
from smpar.nn.group import TensorGroup
from smpar.nn.module import DistributedModule
from smpar.runtime.core import runtime
from smpar.runtime.draws import Draws
from smpar.runtime.partitioning import check_pins
from smpar.runtime.partitioning import set_partition as pin
from smpar.runtime.pipeline import Pipeline
from smpar.runtime.planned import check_layers
from smpar.runtime.reducer import Reducer
from smpar.runtime.replicas import Replicas, broadcast, module_state
from smpar.runtime.structure import Circumstances, Structure
from smpar.runtime.trained import Trained
from smpar.runtime.unstepped import Unstepped
from smpar.runtime.wholes import gather_state, is_partial, load_state, partial_marks, translated
from smpar.slices import slicing_of
from smpar.stage.layout import Late
from smpar.stage.tensor import active

log = logging.getLogger("smpar")


class DistributedModel(nn.Module):
    """Wraps a module for training with ``smpar.step``, or, where the pipeline degree is 1, without. The module stays.

    Without a step, a backward after ``model(...)`` averages gradients at its end; calls inside ``no_sync`` do not.

    The partition happens at the first step (at once if the pipeline degree is 1); each rank then gives up the
    parameters of other stages. Parameters are broadcast from data-parallel rank 0, and moved to the rank's GPU where
    there is one. Arguments are those of SMP; those that only tune SMP's own engine are accepted.

    Args:
        module: any ``nn.Module``, the same on all ranks.
        trace_execution_times: measure units' times instead of counting operations.
        overlapping_allreduce: average gradients over the replicas while the last microbatch's backward runs.
        backward_passes_per_step: only each so-many-th step that runs a backward averages over the replicas.
        average_grads_across_microbatches: mean over microbatches (weighted by samples), else sum.
        bucket_cap_mb: MiB of gradients that are averaged at once.
        broadcast_buffers: the step after one that averaged starts with the first replica's buffers on all.
        gradient_as_bucket_view: a step's gradients move into their buckets at its first microbatch, which saves
            memory of their size and costs a little time. After a step they lie there in any case.

    Raises:
        ModelError: ``module`` is no plain ``nn.Module``, or a number is out of range.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ModelError(f"DistributedModel of {type(module).__name__}, which is no nn.Module")
        if isinstance(module, DistributedModel):
            raise ModelError("DistributedModel of a DistributedModel")
        if bucket_cap_mb <= 0 or backward_passes_per_step < 1:
            raise ModelError(
                f"bucket_cap_mb = {bucket_cap_mb}, backward_passes_per_step = {backward_passes_per_step}; "
                "the first is above 0, the second 1 or more"
            )
        now = runtime()
        check_pins(module, now.stages)
        if now.config.plan is not None:
            check_layers(module, now.config.plan)
        module = distribute(module, TensorGroup.current())
        if now.world.device.type == "cuda" and not any(p.is_meta for p in module.parameters()):
            module.to(now.world.device)
        self.module = module
        world = now.world
        whole, sliced = Peers.along(world, "dp"), Peers.along(world, "rdp")
        self.average_grads = average_grads_across_microbatches
        self.pipeline: Pipeline | None = None
        self.unstepped: Unstepped | None = None
        self._pending_state: tuple[Mapping[str, Any], bool] | None = None
        self.trained, self.draws = Trained(module), Draws()
        self.circumstances = Circumstances(Structure(module))
        self.reducer = Reducer(
            whole,
            sliced,
            cap=cap_in_bytes(bucket_cap_mb),
            overlap=overlapping_allreduce,
            early_views=gradient_as_bucket_view,
            wide=now.config.fp32_grad_accumulation,
            every=backward_passes_per_step,
            name_of=lambda p: next((n for n, q in module.named_parameters() if q is p), "(unknown)"),
        )
        with world.guard():
            broadcast(module_state(module), self.reducer.peers_of, 0)
        self.replicas = Replicas(world, self.reducer, self._own_buffers if broadcast_buffers else None)
        if now.stages > 1:
            self.pipeline = Pipeline(module, now.config, world, now.spans, self.reducer, trace_execution_times)
            self.pipeline.after_partition.append(self._partition_done)
            self.pipeline.after_hand_over.append(self._handed_over)
        now.adopt_model(self)
        if self.pipeline is None:
            if self.reducer.peers.size > 1:
                self.unstepped = Unstepped(world, self.replicas, self.trained, now.shard)
            self._partition_done()

    # -- calls inside a step --------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__  # past nn.Module's slow attributes
        if own["pipeline"] is not None and active() is None:
            raise OutsideOfStep("model(...) was called outside of a step")
        if own["unstepped"] is not None and active() is None and not runtime().in_step:
            return own["unstepped"].call(own["_modules"]["module"], args, kwargs)
        return own["_modules"]["module"](*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Start the microbatch's backward from ``tensors``; call it inside a step.

        Args:
            tensors: a loss of one element, or several tensors.
            grad_tensors: their gradients, where they are no losses of one element.

        Raises:
            OutsideOfStep: no step is running.
            NotThroughModel: a tensor that does not require gradients.
        """
        run = active()
        if run is not None:
            run.backward(tensors, grad_tensors)
            return
        now = runtime()
        if now.microbatch is None:
            raise OutsideOfStep("model.backward was called outside of a step")
        roots = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        grads = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
        grads += [None] * (len(roots) - len(grads))
        starts = []
        for root, grad in zip(roots, grads, strict=True):
            if not isinstance(root, torch.Tensor) or not root.requires_grad:
                shape = f" of shape {list(root.shape)} without gradient" if isinstance(root, torch.Tensor) else ""
                raise NotThroughModel(f"a {type(root).__name__}{shape}")
            if grad is None and root.numel() != 1:
                raise WrongBackward(f"a tensor of shape {list(root.shape)}")
            starts.append(torch.full_like(root, now.microbatch) if grad is None else grad * now.microbatch)
        now.backward_ran = True
        torch.autograd.backward(roots, starts)

    # -- parameters -----------------------------------------------------------------------------

    @property
    def partitioned(self) -> bool:
        """Whether the model's parameters are on their stages."""
        return self.pipeline is None or (self.pipeline.partitioned is not None and self.pipeline.layout.closed)

    def _is_local(self, tensor: torch.Tensor) -> bool:
        return self.pipeline is None or self.pipeline.holds(tensor)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """All parameters under the names they have in the unwrapped module, also those of other stages."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """All buffers under the names they have in the unwrapped module."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that this rank holds."""
        return ((n, p) for n, p in self.module.named_parameters() if self._is_local(p))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that this rank holds."""
        return (p for _, p in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and buffers that this rank keeps up to date."""
        mine = {id(b) for m in self.local_modules() for b in m.buffers(recurse=False)}
        return ((n, b) for n, b in self.module.named_buffers() if id(b) in mine)

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers that this rank keeps up to date."""
        return (b for _, b in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules that run on this rank; split modules run on all."""
        away: set[nn.Module] = set()
        if self.pipeline is not None and self.pipeline.partitioned is not None:
            layout, rank = self.pipeline.layout, self.pipeline.rank
            away = {m for u, stage in layout.units.items() if layout.ranks[stage] != rank for m in u.modules()}
        return ((n, m) for n, m in self.module.named_modules() if m not in away)

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that run on this rank."""
        return (m for _, m in self.local_named_modules())

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules that the ranks of a tensor-parallel group run together."""
        return (m for m in self.module.modules() if isinstance(m, DistributedModule))

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Whether this rank holds a slice of it: of a parameter that is divided over the tensor-parallel group."""
        return slicing_of(parameter) is not None

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether this rank holds a slice of it."""
        return slicing_of(buffer) is not None

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Whether its gradient is of the samples of a whole tensor-parallel group: then it is averaged over ``rdp``."""
        return self.is_distributed_parameter(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether it is of the samples of a whole tensor-parallel group: then ranks along ``rdp`` have it alike."""
        return self.is_distributed_buffer(buffer)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of this rank whose gradients are averaged over ``dp``."""
        return ((n, p) for n, p in self.local_named_parameters() if not self.is_scaled_batch_parameter(p))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of this rank whose gradients are averaged over ``rdp``."""
        return ((n, p) for n, p in self.local_named_parameters() if self.is_scaled_batch_parameter(p))

    def get_module(self) -> nn.Module:
        """The wrapped module."""
        return self.module

    def cpu(self) -> DistributedModel:
        """Accepted, as in SMP: parameters stay with the device of their rank."""
        return self

    # -- replicas -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside leave gradients as they are on each replica; the next one outside averages all that came.

        Raises:
            ModelError: inside a step.
        """
        if runtime().in_step:
            raise ModelError("no_sync inside a step; it surrounds steps")
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` average gradients, as with torch's DistributedDataParallel.

        It gets each bucket with this replica's gradients, not divided, and returns a future of the averages, flat. A
        hook that communicates does so in ``smpar.get_dp_process_group()``; torch's own take that from ``state``. Slices
        of distributed parameters, which other ranks hold, are averaged without the hook.

        Raises:
            CommHookError: there is one, ``hook`` cannot be called, or a step is running.
        """
        if not callable(hook):
            raise CommHookError(f"a {type(hook).__name__}, which cannot be called")
        if self.reducer.comm_hook is not None:
            raise CommHookError("a second one")
        if runtime().in_step:
            raise CommHookError("inside a step")
        self.reducer.use_comm_hook(state, hook)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Around a training loop in which replicas have unequal numbers of batches.

        A replica that is done takes part in the others' collectives with nothing to give; all ranks of a replica are
        done together. In the end all have the parameters and buffers of the last one. Reductions do not overlap.

        Args:
            divide_by_initial_world_size: sums are divided by the number of replicas, else of those not done.
            enable: False: do nothing.
            throw_on_early_termination: stop all replicas when the first is done.

        Raises:
            JoinError: inside a step or another join, or a replica of a pipeline had no batch at all.
            EndedEarly: on all replicas, if asked for.
        """
        if runtime().in_step:
            raise JoinError("join inside a step")
        if not enable:
            yield
            return
        with self.replicas.join(
            divide_by_initial_world_size,
            throw_on_early_termination,
            self._prepare_reducer,
            self._common_state,
            self.pipeline.share_again if self.pipeline is not None else lambda: None,
        ):
            yield

    def _common_state(self) -> Iterator[torch.Tensor]:
        """What this rank holds on all replicas."""
        for p in self.local_parameters():
            if self.pipeline is None or self.pipeline.holds_everywhere(p):
                yield p
        yield from self.local_buffers()

    def _prepare_reducer(self) -> bool:
        if self.pipeline is None:
            self.reducer.prepare(self.trained.parameters())
        elif self.partitioned:
            self.pipeline.prepare_reducer()
        return self.partitioned

    def _own_buffers(self) -> list[torch.Tensor]:
        return self.trained.buffers() if self.pipeline is None else list(self.local_buffers())

    # -- hooks ----------------------------------------------------------------------------------

    def register_post_partition_hook(self, hook: Callable[..., None]) -> None:
        """Call ``hook(model, optimizer)`` when the model has been partitioned; at once if it is."""
        now = runtime()
        if self.partitioned:
            hook(self, now.optimizer)
        else:
            now.post_partition.append(hook)

    def register_post_step_hook(self, hook: Callable[..., None]) -> None:
        """Call ``hook(model, optimizer)`` after each ``optimizer.step()``."""
        runtime().post_step.append(hook)

    def _partition_done(self) -> None:
        if self._pending_state is not None:
            state, strict = self._pending_state
            self._pending_state = None
            self._load(state, strict)
        now = runtime()
        if now.optimizer is not None:
            now.optimizer.keep_local(self)
        for hook in now.post_partition:
            hook(self, now.optimizer)
        now.post_partition.clear()

    def _handed_over(self, late: list[Late]) -> None:
        optimizer = runtime().optimizer
        if optimizer is not None:
            optimizer.take_over(self, late)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        gather_to_rank0: bool = False,
    ) -> dict[str, Any]:
        """The whole model's state under the unwrapped module's names, on every rank.

        All ranks of a replica call it together: slices are joined, and each stage's part is broadcast from there. What
        comes out then is a copy; where one rank has it all, it is the module's own ``state_dict``.

        Args:
            destination, prefix, keep_vars: as for ``nn.Module.state_dict``; there are no variables of a copy to keep.
            gather_to_rank0: accepted, as in SMP.
        """
        world, pipeline = runtime().world, self.pipeline if self.partitioned else None
        if pipeline is None and world.axis_size("tp") == 1:
            state = translated(self.module, self.module.state_dict(keep_vars=keep_vars), "whole_state")
        else:
            with world.guard():
                state = gather_state(self.module, pipeline, world)
        if destination is None and not prefix:
            return state
        whole = {} if destination is None else destination
        whole.update({prefix + name: value for name, value in state.items()})
        return whole

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the state; its key ``_smp_is_partial`` is True when there is more elsewhere."""
        state: dict[str, Any] = self.module.state_dict()
        staged = self.pipeline is not None and self.partitioned
        if staged:
            mine = {id(p) for p in self.local_parameters()} | {id(b) for b in self.local_buffers()}
            kept = {n for n, t in self.module.state_dict(keep_vars=True).items() if id(t) in mine}
            state = {n: t for n, t in state.items() if n in kept or not isinstance(t, torch.Tensor)}
        state.update(partial_marks(staged, runtime().world))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **ignored: Any) -> Any:  # type: ignore[override]
        """Load a whole or partial state; a partial one given before the partition is kept until then.

        Each rank takes what it holds of a whole state.

        Raises:
            RuntimeError: names or shapes that do not fit, as for ``nn.Module.load_state_dict``.
            OtherSlice: a partial state of another rank of the tensor-parallel group, or of another degree.
        """
        if is_partial(state_dict, runtime().world) and not self.partitioned:
            self._pending_state = (dict(state_dict), strict)
            return None
        return self._load(state_dict, strict)

    def _load(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        closed = self.partitioned  # before that, every rank has all stages
        return load_state(self.module, state_dict, strict, lambda t: not closed or self._is_local(t), runtime().world)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def set_partition(module: nn.Module, stage: int) -> None:
    """Put a module on a pipeline stage (SMP's ``smp.set_partition``), before the first step.

    Raises:
        PartitionError: the index is no stage.
        ModelError: the model is partitioned already.
    """
    if isinstance(module, DistributedModel):
        module = module.module
    now = runtime()
    model = now.maybe_model
    if model is not None and model.pipeline is not None and model.partitioned:
        raise ModelError("set_partition after the model was partitioned by its first step")
    pin(module, stage)
