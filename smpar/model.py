"""``smpar.DistributedModel``: the user's module, trained over the pipeline."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smpar.errors import ModelError, NotThroughModel, OutsideOfStep, WrongBackward
from smpar.runtime.core import runtime
from smpar.runtime.partitioning import check_pins
from smpar.runtime.partitioning import set_partition as pin
from smpar.runtime.pipeline import Pipeline
from smpar.runtime.wholes import gather_state
from smpar.stage.layout import Late
from smpar.stage.tensor import active

log = logging.getLogger("smpar")

PARTIAL = "_smp_is_partial"


class DistributedModel(nn.Module):
    """Wraps a module for training with ``smpar.step``. The module itself stays as it is.

    The partition happens at the first step (at once if the pipeline degree is 1); each rank then gives up the
    parameters of other stages. Parameters are broadcast from data-parallel rank 0, and moved to the rank's GPU where
    there is one. Arguments are those of SMP; those that only tune SMP's own engine are accepted.

    Args:
        module: any ``nn.Module``, the same on all ranks.
        trace_execution_times: measure units' times instead of counting operations.
        average_grads_across_microbatches: mean over microbatches (weighted by samples), else sum.
        backward_passes_per_step: accepted; gradients are reduced once per step.
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
        now = runtime()
        check_pins(module, now.stages)
        if now.world.device.type == "cuda" and not any(p.is_meta for p in module.parameters()):
            module.to(now.world.device)
        self.module = module
        self.average_grads = average_grads_across_microbatches
        self.pipeline: Pipeline | None = None
        self._pending_state: tuple[Mapping[str, Any], bool] | None = None
        world = now.world
        if world.axis_size("dp") > 1:
            with world.guard():
                _broadcast(module, world.process_group("dp"), world.group("dp")[0])
        if now.stages > 1:
            self.pipeline = Pipeline(module, now.config, world, now.spans, measure=trace_execution_times)
            self.pipeline.after_partition.append(self._partition_done)
            self.pipeline.after_hand_over.append(self._handed_over)
        now.adopt_model(self)
        if self.pipeline is None:
            self._partition_done()

    # -- calls inside a step --------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__  # past nn.Module's slow attributes
        if own["pipeline"] is not None and active() is None:
            raise OutsideOfStep("model(...) was called outside of a step")
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

    def get_module(self) -> nn.Module:
        """The wrapped module."""
        return self.module

    def cpu(self) -> DistributedModel:
        """Accepted, as in SMP: parameters stay with the device of their rank."""
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Without replicas there is nothing to leave out; with them, this version reduces in every step.

        Raises:
            ModelError: there are data-parallel replicas.
        """
        if runtime().world.axis_size("dp") > 1:
            raise ModelError("no_sync, but this version reduces gradients once in every step")
        yield

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

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's state under the unwrapped module's names, on every rank.

        All ranks of a pipeline call it together; each stage's part is broadcast from there.
        """
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        if self.pipeline is None or not self.partitioned:
            return state
        with runtime().world.guard():
            return gather_state(self.module, state, self.pipeline)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the state; its key ``_smp_is_partial`` is True when there is more elsewhere."""
        state: dict[str, Any] = self.module.state_dict()
        if self.pipeline is not None and self.partitioned:
            mine = {id(p) for p in self.local_parameters()} | {id(b) for b in self.local_buffers()}
            kept = {n for n, t in self.module.state_dict(keep_vars=True).items() if id(t) in mine}
            state = {n: t for n, t in state.items() if n in kept or not isinstance(t, torch.Tensor)}
        state[PARTIAL] = self.pipeline is not None and self.partitioned
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **ignored: Any) -> Any:  # type: ignore[override]
        """Load a whole or partial state; a partial one given before the partition is kept until then.

        Raises:
            RuntimeError: names or shapes that do not fit, as for ``nn.Module.load_state_dict``.
        """
        partial = bool(state_dict.get(PARTIAL, False))
        if partial and not self.partitioned:
            self._pending_state = (dict(state_dict), strict)
            return None
        return self._load(state_dict, strict)

    def _load(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        partial = bool(state_dict.get(PARTIAL, False))
        given = {n: v for n, v in state_dict.items() if n != PARTIAL}
        if not self.partitioned or self.pipeline is None:
            return self.module.load_state_dict(given, strict=strict and not partial)
        own = self.module.state_dict(keep_vars=True)
        missing = [] if partial else [n for n in own if n not in given]
        unexpected = [n for n in given if n not in own]
        wrong = [
            f"{n}: {tuple(v.shape)} given, {tuple(own[n].shape)} in the model"
            for n, v in given.items()
            if n in own and isinstance(own[n], torch.Tensor) and own[n].shape != v.shape
        ]
        if wrong or (strict and (missing or unexpected)):
            raise RuntimeError(f"load_state_dict: missing {missing}; unexpected {unexpected}; other shapes: {wrong}")
        with torch.no_grad():
            for name, value in given.items():
                if name in own and isinstance(own[name], torch.Tensor) and self._is_local(own[name]):
                    own[name].copy_(value)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _broadcast(module: nn.Module, group: dist.ProcessGroup, source: int) -> None:
    """Give all replicas rank 0's parameters and buffers."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                data = tensor.detach().contiguous()
                dist.broadcast(data.view(-1).view(torch.uint8) if data.numel() else data, source, group=group)
                tensor.copy_(data)


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
