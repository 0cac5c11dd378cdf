"""The twins that hold some rows of a vocabulary: the embedding, and the linear that gives logits.

Both may share their weight, which then is sliced once. (arXiv 1909.08053, section 3.)
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from smpar.nn.linears import divide_columns
from smpar.nn.logits import VocabularySlice, check_words
from smpar.nn.module import DistributedModule, become, slice_parameter
from smpar.nn.twins import is_inside, joined, own_rows
from smpar.slices import Slicing, slicing_of

log = logging.getLogger("smpar")


class VocabularyEmbedding(DistributedModule, nn.Embedding):
    """ids [...] -> [..., H]: each rank looks up the ids that it has rows of, and the results are summed."""

    replaces = nn.Embedding
    slicing: Slicing

    def forward(self, ids: Tensor) -> Tensor:
        group = self.tensor_group
        if not self.distributed:
            return super().forward(ids)
        if group.joined and not is_inside():
            return own_rows(self._looked_up(joined(ids, group)), group, ids.shape[0])
        return self._looked_up(ids)

    def _looked_up(self, ids: Tensor) -> Tensor:
        group = self.tensor_group
        ((start, stop),) = self.slicing.runs[group.rank]
        check_words(ids, self.slicing.length, type(self).__name__)
        elsewhere = (ids < start) | (ids >= stop)
        padding = self.padding_idx
        mine = None if padding is None or not start <= padding < stop else padding - start
        self.padding_idx = mine
        try:  # the class that this is a twin of may do more than look up: scale, for one
            found = super().forward((ids - start).masked_fill(elsewhere, 0))
        finally:
            self.padding_idx = padding
        return collectives.reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)


class VocabularyHead(DistributedModule):
    """The linear that gives logits: hidden [N, S, H], whole -> `VocabularySlice` [N, S, V].

    Outside of training, where no gradients are asked for, it gives the whole logits.
    """

    slicing: Slicing

    def forward(self, hidden: Tensor) -> Tensor:
        group = self.tensor_group
        if not self.distributed:
            return super().forward(hidden)
        rows = hidden[None]  # a dim for the ranks whose samples they are
        if group.joined:  # inside, gradients are shares in the group's mean; outside, this rank's own
            rows = collectives.gather(collectives.scaled(rows, float(group.size)), group, 0)
        else:
            rows = collectives.copy(rows, group)
        local = super().forward(rows)
        if isinstance(hidden, FakeTensor) or hidden.device.type == "meta":
            return _like_whole(local[0], self.slicing)
        logits = VocabularySlice.of(local, dataclasses.replace(self.slicing, dim=hidden.dim() - 1), group)
        return logits if torch.is_grad_enabled() else logits.smp_whole()


def _like_whole(local: Tensor, slicing: Slicing) -> Tensor:
    enough = -(-slicing.length // local.shape[-1])
    return torch.cat([local] * enough, -1)[..., : slicing.length].contiguous()


def whole_because(module: nn.Module, group: TensorGroup) -> str:
    """Why a module's vocabulary stays whole; empty if it does not."""
    slicing = slicing_of(module.weight)  # type: ignore[arg-type]
    rows = int(module.weight.shape[0]) if slicing is None else slicing.length  # type: ignore[index]
    if rows < group.size:
        return f"it has {rows} rows for {group.size} ranks"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name, None):
            return f"it has {name}"
    return ""


def divide_embedding(module: nn.Embedding, group: TensorGroup) -> bool:
    """Divide an embedding's rows among the group, in place; False if it stays whole, which the log says."""
    if isinstance(module, DistributedModule):
        return True
    why = whole_because(module, group)
    if why:
        log.warning("%s(%s) stays whole on each rank: %s", type(module).__name__, module.extra_repr(), why)
        return False
    slicing = Slicing.even(0, module.num_embeddings, group.size)
    slice_parameter(module.weight, slicing, group)  # type: ignore[arg-type]
    become(module, VocabularyEmbedding, group, slicing=slicing)
    return True


def divide_head(module: nn.Linear, group: TensorGroup) -> bool:
    """Divide the rows of the linear that gives logits, in place; False if it stays whole, which the log says.

    Its weight may be an embedding's, which then has to be divided before.
    """
    why = whole_because(module, group)
    if why:
        log.warning("the linear that gives logits stays whole on each rank: %s", why)
        return False
    slicing = slicing_of(module.weight)
    if slicing is None:
        slicing = divide_columns(module, 1, group)
    else:
        module.out_features = slicing.size(group.rank)
        if module.bias is not None:
            slice_parameter(module.bias, slicing, group)
    become(module, VocabularyHead, group, slicing=slicing)
    return True
