"""An embedding of which each rank holds some rows of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from smpar.nn.module import DistributedModule, become, slice_parameter
from smpar.nn.twins import joined, own_rows
from smpar.slices import Slicing


class VocabularyEmbedding(DistributedModule):
    outermost: bool = True

    def forward(self, ids: Tensor) -> Tensor:
        group = self.tensor_group
        join = self.outermost and group.joined
        rows = ids.shape[0]
        if join:
            ids = joined(ids, group)
        slicing = Slicing.even(0, self.num_embeddings, group.size)
        start, stop = slicing.runs[group.rank][0]
        other = (ids < start) | (ids >= stop)
        part = nn.functional.embedding((ids - start).masked_fill(other, 0), self.weight)
        total = collectives.reduce(part.masked_fill(other.unsqueeze(-1), 0.0), group)
        return own_rows(total, group, rows) if join else total


class DistributedEmbedding(nn.Embedding):
    """ids [..] -> [.., embedding_dim], whole on every rank, with ``nn.Embedding``'s arguments, values and names.

    Its rows are divided, and the ranks' results summed. Where ranks bring different samples, they lie along the first
    dim. (arXiv 1909.08053, section 3.)

    Raises:
        NotInitialized: ``smpar.init`` has not run.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **others: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **others)
        group = TensorGroup.current()
        if group.size > 1:
            slice_parameter(self.weight, Slicing.even(0, num_embeddings, group.size), group)
            become(self, VocabularyEmbedding, group)
