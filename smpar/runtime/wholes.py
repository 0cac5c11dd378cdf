"""Putting the parts of a state together on every rank of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from smpar.runtime.wires import buffer_for, pack
from smpar.trace.outcome import meta_of

if TYPE_CHECKING:
    from smpar.runtime.pipeline import Pipeline


def gather_state(module: nn.Module, state: dict[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """The whole state dict: each rank broadcasts, in one message, the tensors that it answers for.

    Args:
        state: this rank's state dict of ``module``, in which the tensors of other ranks hold nothing.
    """
    layout = pipeline.layout
    owner = {key: layout.ranks[stage] for key, stage in layout.parameter_home.items()}
    for unit, stage in layout.units.items():
        for buffer in unit.buffers():
            owner.setdefault(id(buffer), layout.ranks[stage])
    by_rank: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) in owner:
            by_rank.setdefault(owner[id(tensor)], []).append(name)
    whole = dict(state)
    for rank, names in sorted(by_rank.items()):
        for name, tensor in zip(names, broadcast_tensors([state[n] for n in names], rank, pipeline), strict=True):
            whole[name] = tensor
    return whole


def broadcast_tensors(tensors: list[torch.Tensor], rank: int, pipeline: Pipeline) -> list[torch.Tensor]:
    """Give all ranks of the pipeline the tensors of one rank; on the others, ``tensors`` tell shapes and types."""
    metas = [meta_of(t.detach())._replace(stride=torch.empty(t.shape, device="meta").stride()) for t in tensors]
    world = pipeline.world
    source = world.group("pp")[rank]
    if rank == pipeline.rank:
        flat = [pack(t, meta) for t, meta in zip(tensors, metas, strict=True)]
        dist.broadcast(torch.cat(flat), source, group=world.process_group("pp"))
        return [t.detach().clone() for t in tensors]
    buffers = [buffer_for(meta) for meta in metas]
    joined = torch.empty(sum(f.numel() for _, f in buffers), dtype=torch.uint8, device=world.device)
    dist.broadcast(joined, source, group=world.process_group("pp"))
    for (_, bytes_), part in zip(buffers, joined.split([f.numel() for _, f in buffers]), strict=True):
        bytes_.copy_(part)
    return [tensor for tensor, _ in buffers]
