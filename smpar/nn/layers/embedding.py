"""An embedding of which each rank holds some rows of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smpar.nn.group import TensorGroup
from smpar.nn.vocabulary import divide_embedding


class DistributedEmbedding(nn.Embedding):
    """ids [..] -> [.., embedding_dim], whole on every rank, with ``nn.Embedding``'s arguments, values and names.

    Its rows are divided, and the ranks' results summed. Where ranks bring different samples, they lie along the first
    dim. (arXiv 1909.08053, section 3.)

    Args:
        initializer_range: weights are from N(0, range), as SMP's; None: from N(0, 1), as torch's.
        others: as ``nn.Embedding``'s.

    Raises:
        NotInitialized: ``smpar.init`` has not run.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        initializer_range: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **others)
        if initializer_range is not None:
            with torch.no_grad():
                self.weight.mul_(initializer_range)
        group = TensorGroup.current()
        if group.size > 1:
            divide_embedding(self, group, outermost=True)
