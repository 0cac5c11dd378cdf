"""The twins of which a tensor-parallel transformer is made, besides those of its vocabulary.

In a layer::

    hidden ─ norm ─▶│ Region(attention):  q k v columns ─ heads ─ RowLinear │─▶ + ─ norm ─▶│ Region(mlp) ... │─▶ +
                  enter                                                leave             enter           leave

``Layer`` is the whole of this, ``Outermost`` what surrounds all layers of a model. Column-parallel linears need no
twin: their slice of rows is a smaller linear. (Megatron-LM, arXiv 1909.08053, section 3.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smpar.nn import collectives
from smpar.nn.experts import Experts
from smpar.nn.group import TensorGroup
from smpar.nn.module import DistributedModule
from smpar.nn.sequence import entered, is_slice, leave, to_slice, to_whole
from smpar.trace import tree
from smpar.trace.draws import set_shard, sharded


@dataclass(frozen=True, init=False)
class Places:
    """Where a function's arguments are, by name; equal for functions with equal arguments."""

    names: tuple[str, ...]
    _index: dict[str, int] = field(compare=False)

    def __init__(self, function: Callable[..., Any]) -> None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        object.__setattr__(self, "names", tuple(p.name for p in parameters if p.kind in kinds))
        object.__setattr__(self, "_index", {name: i for i, name in enumerate(self.names)})

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An argument; None if it is not given."""
        index = self._index.get(name)
        return args[index] if index is not None and index < len(args) else kwargs.get(name)

    def put(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another value for one that is given."""
        index = self._index.get(name)
        if index is not None and index < len(args):
            return (*args[:index], value, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: value}


def first_of(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's result with its first tensor changed: the hidden state, alone or at the head of a tuple."""
    if isinstance(result, Tensor):
        return change(result)
    if isinstance(result, tuple) and type(result) is tuple:
        return (change(result[0]), *result[1:])
    raise TypeError(f"a layer that returns a {type(result).__name__}, where a tensor or a tuple is expected")


class RowLinear(DistributedModule):
    """A linear of which each rank holds some input features: its results are summed, and then comes the bias.

    [N, S, K / tp] -> [N, S, H], or a slice of that. Its class is ``nn.Linear``, or has a weight like its transpose.

    Attributes:
        inside: whether the sum is left to a region around it.
    """

    inside: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.distributed:
            return super().forward(x)
        weight: Tensor = self.weight  # type: ignore[assignment]
        addend = F.linear(x, weight if isinstance(self, nn.Linear) else weight.t())
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        if self.inside:
            return addend if bias is None else addend + bias / self.tensor_group.size
        total = leave(addend, self.tensor_group)
        set_shard(self.tensor_group.rank + 1 if is_slice(total) else 0)
        return total if bias is None else total + bias


class SharedColumns(DistributedModule):
    """A linear that is whole on each rank, of whose output features a rank needs some, which others need, too.

    [N, S, H] -> [N, S, stop - start] for ``rows`` from start to stop. Its gradient is partial: ranks compute it for
    the rows that they use.
    """

    rows: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        if not self.distributed:
            return super().forward(x)
        part = slice(*self.rows)
        weight: Tensor = self.weight  # type: ignore[assignment]
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        rows = weight[part] if isinstance(self, nn.Linear) else weight[:, part].t()
        return F.linear(x, rows, None if bias is None else bias[part])


class Region(DistributedModule):
    """A module that works on its rank's heads or channels.

    Attributes:
        entries: names of the arguments that it works on: the hidden state first, then others (states of an encoder).
        leaves: whether its result is still to be summed; else a RowLinear did that, inside or later.
        open: whether what follows, up to a RowLinear, is in the region, too.
        alike: whether what it draws is for all of its tokens, on each rank the same.
        shares: for each rank its part of the heads, in pieces of equal size; empty if it has none.
    """

    entries: tuple[str, ...]
    places: Places
    leaves: bool = False
    open: bool = False
    alike: bool = False
    shares: tuple[int, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.distributed:
            return super().forward(*args, **kwargs)
        group, first = self.tensor_group, self.entries[0]
        for name in self.entries[1:]:
            other = self.places.get(name, args, kwargs)
            if isinstance(other, Tensor):
                args, kwargs = self.places.put(name, collectives.copy(other, group), args, kwargs)
        hidden = self.places.get(first, args, kwargs)
        with sharded(0 if self.alike else group.rank + 1), entered(hidden, group) as whole:
            args, kwargs = self.places.put(first, whole, args, kwargs)
            result = super().forward(*args, **kwargs)
        if self.open:
            set_shard(group.rank + 1)
        return first_of(result, lambda addend: leave(addend, group)) if self.leaves else result


class WholeRegion(DistributedModule):
    """A module amid slices of the sequence that needs the whole of it and is not divided.

    Attributes:
        why: it is not.
    """

    entries: tuple[str, ...]
    places: Places
    why: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, group = self.places.get(self.entries[0], args, kwargs), self.tensor_group
        if not is_slice(hidden):
            return super().forward(*args, **kwargs)

        def whole(value: Any) -> Any:
            alike = isinstance(value, Tensor) and value.dim() > 3 and value.shape[:-1] == hidden.shape[:-1]
            return to_whole(value, group) if alike else value

        with sharded(0):
            result = super().forward(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
        return first_of(result, lambda whole: to_slice(whole, group))


class Layer(DistributedModule):
    """One of consecutive layers, between which hidden states are slices of the sequence in memory mode.

    Attributes:
        last: whether its result is made whole, as there may be no layer after it.
    """

    entries: tuple[str, ...]
    places: Places
    last: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group, first = self.tensor_group, self.entries[0]
        if not self.distributed:
            return super().forward(*args, **kwargs)
        if group.memory:
            hidden = to_slice(self.places.get(first, args, kwargs), group)
            args, kwargs = self.places.put(first, hidden, args, kwargs)
        with sharded(group.rank + 1 if group.memory else 0):
            result = super().forward(*args, **kwargs)
        return first_of(result, lambda hidden: to_whole(hidden, group)) if group.memory and self.last else result


SAME_FOR_ALL = ("cache_position", "head_mask", "cross_attn_head_mask")  # arguments without a batch dim
SLICED_OUTPUTS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
ROUTED_OUTPUTS = ("router_logits", "encoder_router_logits", "decoder_router_logits")  # [N * S, experts]
DIVIDED_OUTPUTS = ("attentions", "cross_attentions", "encoder_attentions", "decoder_attentions")


class Outermost(DistributedModule):
    """What is not inside another twin: where ranks bring different samples, they are joined here, and given back.

    Its loss gradients are made means over the group's samples at its exit.
    """

    places: Places

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group, rows = self.tensor_group, 0
        if not self.distributed:
            return super().forward(*args, **kwargs)
        as_tuple = kwargs.get("return_dict", getattr(getattr(self, "config", None), "return_dict", None)) is False
        if as_tuple:
            kwargs = {**kwargs, "return_dict": True}  # what the outputs are is known by their names
        if group.joined:
            given = {**dict(zip(self.places.names, args, strict=False)), **kwargs}
            rows = max((v.shape[0] for k, v in given.items() if _has_batch(k, v)), default=0)
            for name, value in given.items():
                if _has_batch(name, value) and value.shape[0] == rows:
                    args, kwargs = self.places.put(name, joined(value, group), args, kwargs)
        with sharded(0):
            result = super().forward(*args, **kwargs)
        named = self._outside(result) if isinstance(result, dict) else {}
        if group.joined:
            result = own_rows(result, group, rows)
        for name, value in named.items():
            result[name] = value
        return result.to_tuple() if as_tuple else result

    def _outside(self, result: dict[str, Any]) -> dict[str, Any]:
        """Outputs that are slices or divided inside, as the undivided model gives them for this rank's samples."""
        group = self.tensor_group
        shares = next((m.shares for m in self.modules() if isinstance(m, Region) and m.shares), ())
        routed = any(isinstance(m, Experts) for m in self.modules())
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            **dict.fromkeys(SLICED_OUTPUTS, lambda hidden: to_whole(hidden, group)),
            **dict.fromkeys(DIVIDED_OUTPUTS, lambda heads: heads_joined(heads, shares, group)),
            **dict.fromkeys(ROUTED_OUTPUTS, lambda logits: collectives.alike(logits, group) if routed else logits),
        }

        def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = change(value)
            return collectives.take(value, group, 0, scale=1.0 / group.size) if group.joined else value

        return {
            name: tuple(changed(value, change) for value in result[name])
            for name, change in changes.items()
            if isinstance(result.get(name), tuple)
        }


def heads_joined(weights: Tensor, shares: tuple[int, ...], group: TensorGroup) -> Tensor:
    """Attention weights [N, heads, S, S] of all ranks' heads, in order.

    Args:
        shares: for each rank its part of the heads; empty if all ranks have all.
    """
    if not shares:
        return weights
    each = weights.shape[1] // shares[group.rank]
    most = max(shares) * each
    padded = F.pad(weights, (0, 0, 0, 0, 0, most - weights.shape[1]))
    parts = collectives.whole(padded, group, 1).split(most, 1)
    return torch.cat([part[:, : share * each] for part, share in zip(parts, shares, strict=True)], 1)


def _has_batch(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and name not in SAME_FOR_ALL


def joined(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The samples of all ranks, [N, ...] -> [tp * N, ...], on entry to an outermost twin."""
    return collectives.whole(tensor, group, 0, scale=float(group.size))


def own_rows(result: Any, group: TensorGroup, rows: int) -> Any:
    """This rank's samples in the result of an outermost twin."""

    def own(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != rows * group.size:
            return tensor
        return collectives.take(tensor, group, 0, scale=1.0 / group.size)

    return tree.map_tensors(own, result)


def region_entries(names: Sequence[str], entries: Sequence[str]) -> tuple[str, ...]:
    """The arguments among ``names`` that a region works on; the first one is the hidden state."""
    return (names[0], *(name for name in names[1:] if name in entries))
