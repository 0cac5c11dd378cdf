"""A language model: embeddings, a transformer, and an output layer over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpar.nn.layers.base import DividedLayer, dropped, inner, unpacked
from smpar.nn.layers.norm import norm_of
from smpar.nn.layers.transformer import DistributedTransformer
from smpar.nn.vocabulary import divide_embedding, divide_head

LEFT_OUT = -1e4  # a score that float16 has, and of which a sample with nothing to attend to makes no NaN


class DistributedTransformerLMHead(DividedLayer):
    """(input_ids, attention_mask, token_type_ids, position_ids, labels) -> logits [N, S, V], or (loss, logits).

    With ``add_cross_attention``, (input_ids, attention_mask, token_type_ids, position_ids, states, mask of the states,
    labels). What comes after ``input_ids`` may be None or left out. Ids and labels are [N, S]; masks are added to
    scores, [N, 1, 1, S], or [N, S] with 1 where to attend and 0 where not; positions count from 0 if not given.

    Logits are slices of the vocabulary that show the whole shape (``smpar.nn.logits``): the loss is found without
    gathering them. It is the mean cross-entropy over labels that are not -100: of the next token for a causal model
    (``causal_mask_size``), of the token at the same place else. Without ``add_lm_head`` the result is the last hidden
    state [N, S, H].

    Args:
        given: see ``Options``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        o = self.options
        self.word_embedding = o.embedding(o.vocab_size)
        self.position_embedding = o.embedding(o.num_positions) if o.use_positional_embedding else None
        self.token_type_embedding = o.embedding(o.num_token_types) if o.num_token_types else None
        self.transformer = inner(DistributedTransformer(**o.given()))
        self.layernorm = norm_of(o) if o.pre_layernorm else None
        self.mark_partial(self.layernorm)
        self.lm_head = o.linear(o.hidden_size, o.vocab_size, bias=False) if o.add_lm_head else None
        if self.lm_head is not None and o.tie_input_output_embedding:
            self.lm_head.weight = self.word_embedding.weight
        if self.distributed:
            divide_embedding(self.word_embedding, self.tensor_group)
            if self.lm_head is not None:
                divide_head(self.lm_head, self.tensor_group)

    def forward(self, *inputs: Any) -> Any:
        given = [*unpacked(inputs), *[None] * 6]
        ids, mask, types, positions = given[:4]
        states, states_mask, labels = given[4:7] if self.options.add_cross_attention else (None, None, given[4])
        hidden = self.ran(ids, _additive(mask), types, _rows(positions), states, _additive(states_mask))
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden)
        if labels is None:
            return logits
        if self.options.causal_mask_size is None:
            told, wanted = logits, labels
        else:
            told, wanted = logits[:, :-1], labels[:, 1:]
        told = told if told.dtype in (torch.float32, torch.float64) else told.float()
        return F.cross_entropy(told.reshape(-1, self.options.vocab_size), wanted.reshape(-1)), logits

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        ids, (mask, types, positions, states, states_mask) = hidden, others
        embedded = self.word_embedding(ids)
        if self.position_embedding is not None:
            at = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
            embedded = embedded + self.position_embedding(at)
        if self.token_type_embedding is not None:
            embedded = embedded + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        embedded = dropped(self.slice(embedded), self.options.embedding_dropout_prob, self.training)
        if self.options.add_cross_attention:
            result = self.transformer(embedded, states, mask, states_mask)[0]
        else:
            result = self.transformer(embedded, mask)[0]
        return result if self.layernorm is None else self.layernorm(result)


def _rows(positions: Tensor | None) -> Tensor | None:
    return positions[None] if positions is not None and positions.dim() == 1 else positions


def _additive(mask: Tensor | None) -> Tensor | None:
    """[N, S] of ones and zeros as [N, 1, 1, S] to be added; other masks as they are."""
    if mask is None or mask.dim() != 2:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, LEFT_OUT)[:, None, None]
