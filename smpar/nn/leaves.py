"""torch's own modules of transformers, divided in place: attention, encoder and decoder layers, and stacks of these.

Names and whole shapes of parameters stay. torch's fused kernels for evaluation, which read the weights themselves, are
switched off.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smpar.nn import collectives
from smpar.nn.group import TensorGroup, partial
from smpar.nn.layers.base import in_region, inner
from smpar.nn.linears import divide_columns, divide_rows, out_features, whole_features
from smpar.nn.module import DistributedModule, become, slice_parameter
from smpar.nn.sequence import to_slice, to_whole
from smpar.nn.twins import Places, Region, joined, own_rows
from smpar.slices import Slicing, bounds_of, slicing_of
from smpar.trace.draws import sharded

log = logging.getLogger("smpar")

LAYERS = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
STACKS = nn.TransformerEncoder, nn.TransformerDecoder


def divide_leaf(module: nn.Module, group: TensorGroup) -> nn.Module | None:
    """Divide a module of torch's in place; None if it is none that is known here, or has too few heads.

    Known are ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer``, ``nn.TransformerDecoderLayer`` and stacks of
    such layers, ``nn.TransformerEncoder`` and ``nn.TransformerDecoder``, unless a subclass has another ``forward``.
    """
    if group.size == 1 or not is_leaf(module):
        return None
    divided: nn.Module | None
    if _is(module, nn.MultiheadAttention):
        divided = _divide_attention(module, dataclasses.replace(group, memory=False))  # type: ignore[arg-type]
    elif any(_is(module, cls) for cls in LAYERS):
        divided = _divide_layer(module, group)
    else:
        divided = _divide_stack(module, group)
    if divided is not None:
        torch.backends.mha.set_fastpath_enabled(False)
    return divided


def is_leaf(module: nn.Module) -> bool:
    """Whether `divide_leaf` knows it."""
    if any(_is(module, cls) for cls in STACKS):
        return all(_is(layer, cls) for layer, cls in _stacked(module))
    return any(_is(module, cls) for cls in (nn.MultiheadAttention, *LAYERS))


def _is(module: nn.Module, cls: type[nn.Module]) -> bool:
    return isinstance(module, cls) and type(module).forward is cls.forward


def _stacked(stack: nn.Module) -> list[tuple[nn.Module, type[nn.Module]]]:
    return [(layer, LAYERS[isinstance(stack, STACKS[1])]) for layer in stack.layers]  # type: ignore[union-attr]


class Attention(DistributedModule):
    """``nn.MultiheadAttention`` over the heads of a rank.

    Attributes:
        heads: the first one of this rank, and the one after its last.
        outermost: whether it is in no other twin: else it is given batches first, the query maybe in slices.
    """

    heads: tuple[int, int]
    outermost: bool = True
    # what the original has
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    in_proj_weight: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: nn.Linear

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As the original."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which is not given")
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        weights = average_attn_weights if need_weights else None
        if not self.outermost:
            return self._attend({"query": query, "key": key, "value": value, **masks}, weights)
        edge = Edge(self.tensor_group, self.batch_first, query)
        with sharded(0):
            given = edge.enter({"query": query, "key": key, "value": value}, masks)
            result, found = self._attend(given, weights)
            return edge.leave(result), found if found is None else edge.own(found)

    def _attend(self, given: dict[str, Any], average: bool | None) -> tuple[Tensor, Tensor | None]:
        """The result [N, L, E], and the weights: [N, L, S] if averaged over heads, else [N, heads, L, S]."""
        group, divided = self.tensor_group, slicing_of(self.out_proj.weight) is not None
        found: list[Tensor] = []

        def work(query: Tensor) -> Tensor:
            states = {id(given["query"]): query}
            for name in ("key", "value"):
                tensor = given[name]
                if id(tensor) not in states:
                    states[id(tensor)] = collectives.copy(tensor, group) if divided else tensor
            key, value = states[id(given["key"])], states[id(given["value"])]
            q, k, v = self._projected(query, key, value)
            mask = self._mask(given["attn_mask"], given["key_padding_mask"], q, k)
            p = self.dropout if self.training else 0.0
            if average is None:
                heads = F.scaled_dot_product_attention(q, k, v, mask, p)
            else:
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
                shares = F.dropout((scores if mask is None else scores + mask).softmax(-1), p, self.training)
                heads = shares @ v
                found.append(shares)
            return self.out_proj(heads.transpose(1, 2).flatten(2))

        result = in_region(work, given["query"], group, divided)
        if average is None:
            return result, None
        number, shares = self.num_heads, found[0]
        if average:
            shares = shares.sum(1) / number
            return result, collectives.reduce(shares, group) if divided else shares
        heads = Slicing.even(1, number, group.size)
        return result, whole_features(shares, heads, group, 1) if divided else shares

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads: [N, heads, .., D]; those that the module adds, too."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights: tuple[Tensor, ...]
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = self.in_proj_weight.chunk(3)
        if self.in_proj_weight is not None and query is key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            q, k, v = map(F.linear, (query, key, value), weights, biases)
        if self.bias_k is not None and self.bias_v is not None:
            start, stop = (head * self.head_dim for head in self.heads)
            added = (bias[..., start:stop].expand(len(k), -1, -1) for bias in (self.bias_k, self.bias_v))
            k, v = (torch.cat(pair, 1) for pair in zip((k, v), added, strict=True))
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        return self._heads(q), self._heads(k), self._heads(v)

    def _heads(self, features: Tensor) -> Tensor:
        """[N, S, heads * D] -> [N, heads, S, D]"""
        return features.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, scores: Tensor | None, keys: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """What is added to the scores of this rank's heads."""
        start, stop = self.heads
        parts = []
        if scores is not None and scores.requires_grad and stop - start < self.num_heads:
            scores = collectives.copy(scores, self.tensor_group)
        if scores is not None:
            whole = scores[None, None] if scores.dim() == 2 else scores.unflatten(0, (-1, self.num_heads))
            parts.append(whole if scores.dim() == 2 else whole[:, start:stop])
        if keys is not None:
            parts.append(keys[:, None, None])
        added = [_additive(F.pad(part, (0, k.shape[-2] - part.shape[-1])), q.dtype) for part in parts]
        return sum(added[1:], added[0]) if added else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's modules leave out what is True."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


@dataclasses.dataclass
class Edge:
    """Where an outermost twin of torch's modules is entered and left: inside, batches come first, and are joined.

    Attributes:
        first: the input from which it is known whether samples come in batches, and how many.
    """

    group: TensorGroup
    batch_first: bool
    first: Tensor

    def enter(self, states: dict[str, Tensor], masks: dict[str, Tensor | None]) -> dict[str, Any]:
        """The arguments for inside. Masks [N, S] and [N * heads, L, S] are samples'; others are [L, S], or [S]."""
        moved = {id(t): self._joined(self._moved(t)) for t in states.values()}  # one for one: self-attention stays it
        inside: dict[str, Any] = {name: moved[id(t)] for name, t in states.items()}
        for name, mask in masks.items():
            if mask is not None and name.endswith("key_padding_mask"):
                mask = self._joined(mask[None] if self._alone else mask)
            elif mask is not None and mask.dim() == 3:
                mask = self._joined(mask)
            inside[name] = mask
        return inside

    def leave(self, result: Tensor) -> Tensor:
        """This rank's samples of a result [N, L, E], as the original gives them."""
        own = self.own(result)
        return own if self.batch_first or self._alone else own.transpose(0, 1)

    def own(self, result: Tensor) -> Tensor:
        """This rank's samples of a result with batches first."""
        rows = 1 if self._alone else self.first.shape[0 if self.batch_first else 1]
        own = own_rows(result, self.group, rows) if self.group.joined else result
        return own[0] if self._alone else own

    @property
    def _alone(self) -> bool:
        return self.first.dim() == 2

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._alone:
            return tensor[None]
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _joined(self, tensor: Tensor) -> Tensor:
        return joined(tensor, self.group) if self.group.joined else tensor


class TorchLayer(DistributedModule):
    """A layer of torch's transformers, or a stack of them.

    Attributes:
        states: names of its arguments that are hidden states: its own first.
        batch_first: how the original is called.
        outermost: whether it is in no other twin.
    """

    places: Places
    states: tuple[str, ...]
    batch_first: bool
    outermost: bool = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(self.places.names, args, strict=False)), **kwargs}
        group, first = self.tensor_group, self.states[0]
        with sharded(group.rank + 1 if group.memory else 0):
            if not self.outermost:
                return super().forward(**given)
            edge = Edge(group, self.batch_first, given[first])
            states = {name: given.pop(name) for name in self.states}
            masks = {name: given.pop(name) for name in list(given) if name.endswith("mask")}
            given |= edge.enter(states, masks)
            if group.memory:
                given[first] = to_slice(given[first], group)
            return edge.leave(to_whole(super().forward(**given), group))


def _divide_attention(module: nn.MultiheadAttention, group: TensorGroup) -> Attention | None:
    if module.num_heads < group.size:
        log.warning("an attention of %d heads stays whole on each of %d ranks", module.num_heads, group.size)
        return None
    for name, blocks in {"in_proj_weight": 3, "in_proj_bias": 3}.items() | {
        (f"{letter}_proj_weight", 1) for letter in "qkv"
    }:
        parameter = getattr(module, name)
        if parameter is not None:
            slicing = Slicing.even(0, parameter.shape[0], group.size, module.head_dim, blocks)
            slice_parameter(parameter, slicing, group)
    divide_rows(module.out_proj, module.head_dim, group)
    for parameter in (module.bias_k, module.bias_v):
        if parameter is not None:
            partial(parameter, group)  # type: ignore[arg-type]
    return become(module, Attention, group, heads=bounds_of(module.num_heads, group.size)[group.rank])


def _divide_layer(layer: nn.Module, group: TensorGroup) -> TorchLayer:
    whole: set[nn.Parameter] = set()
    names = [name for name in ("self_attn", "multihead_attn") if hasattr(layer, name)]
    for name in names:
        attention = getattr(layer, name)
        batch_first = bool(attention.batch_first)
        if _divide_attention(attention, group) is None:
            become(attention, Attention, group, heads=(0, attention.num_heads))
            whole.update(attention.parameters())
        inner(attention)
    linear1, linear2 = layer.get_submodule("linear1"), layer.get_submodule("linear2")
    if out_features(linear1) >= group.size:
        divide_columns(linear1, 1, group)
        become(linear1, Region, group, entries=("input",), places=Places(linear1.forward), open=True)
        divide_rows(linear2, 1, group)
    states = ("src",) if len(names) == 1 else ("tgt", "memory")
    return _become_layer(layer, group, states, batch_first, whole)


def _divide_stack(stack: nn.Module, group: TensorGroup) -> TorchLayer:
    layers = [inner(_divide_layer(layer, group)) for layer, _ in _stacked(stack)]
    whole = {p for layer in layers for p in layer.parameters()}  # those were seen to
    return _become_layer(stack, group, layers[0].states, layers[0].batch_first, whole)


def _become_layer(
    module: nn.Module, group: TensorGroup, states: tuple[str, ...], batch_first: bool, whole: set[nn.Parameter]
) -> TorchLayer:
    if group.memory:
        for parameter in module.parameters():
            if slicing_of(parameter) is None and parameter not in whole:
                partial(parameter, group)
    places = Places(module.forward)
    return become(module, TorchLayer, group, places=places, states=states, batch_first=batch_first)
