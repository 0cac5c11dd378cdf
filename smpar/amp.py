"""``smpar.amp.GradScaler``: loss scaling in which all ranks skip a step together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from smpar.optimizer import DistributedOptimizer
from smpar.runtime.core import runtime


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` over the ranks of a pipeline: an overflow on one rank skips the step on all.

    Use it as in torch, with ``model.backward(scaler.scale(loss))`` inside the step and ``scaler.step(optimizer)``,
    ``scaler.update()`` after it. Arguments are torch's; the device is this rank's unless given.
    """

    def __init__(self, device: str | None = None, **options: Any) -> None:
        super().__init__(device if device is not None else runtime().world.device.type, **options)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this rank's gradients by the scale, and learn whether any rank's are not finite.

        All ranks of a replica call it together.
        """
        super().unscale_(_plain(optimizer))
        self._share(_plain(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()`` unless a gradient on any rank overflowed."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        plain = _plain(optimizer)
        if self._per_optimizer_states[id(plain)]["stage"].name == "READY":
            self.unscale_(plain)
        return super().step(plain, *args, **kwargs)

    def _share(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled:
            return
        world = runtime().world
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        total = torch.stack([f.float().cpu().reshape(()) for f in found.values()]).sum() if found else torch.zeros(())
        if world.axis_size("mp") > 1:
            total = total.to(world.device)
            with world.guard():
                dist.all_reduce(total, group=world.process_group("mp"))
        # a rank without gradients of its own has nothing in `found` yet, and still has to skip
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {world.device: total.to(world.device)}


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
