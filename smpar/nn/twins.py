"""The twins of which a tensor-parallel transformer is made, besides those of its vocabulary.

In a layer::

    hidden ─ norm ─▶│ Region(attention):  q k v columns ─ heads ─ RowLinear │─▶ + ─ norm ─▶│ Region(mlp) ... │─▶ +
                  enter                                                leave             enter           leave

``Layer`` is the whole of this, ``Outermost`` what surrounds all layers of a model. Column-parallel linears need no twin:
their slice of rows is a smaller linear. (Megatron-LM, arXiv 1909.08053, section 3.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from smpar.nn.module import DistributedModule
from smpar.nn.sequence import entered, is_slice, leave, to_slice, to_whole
from smpar.trace import tree
from smpar.trace.draws import set_shard, sharded


class Places:
    """Where a function's arguments are, by name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        self.names = [p.name for p in parameters if p.kind in kinds]
        self._index = {name: i for i, name in enumerate(self.names)}

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
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.distributed:
            return super().forward(x)  # type: ignore[no-any-return,misc]
        weight: Tensor = self.weight  # type: ignore[assignment]
        addend = F.linear(x, weight if isinstance(self, nn.Linear) else weight.t())
        total = leave(addend, self.tensor_group)
        set_shard(self.tensor_group.rank + 1 if is_slice(total) else 0)
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        return total if bias is None else total + bias


class Region(DistributedModule):
    """A module that works on its rank's heads or channels.

    Attributes:
        entries: names of the arguments that it works on: the hidden state first, then others (states of an encoder).
        leaves: whether its result is still to be summed; else a RowLinear did that, inside or later.
        open: whether what follows, up to a RowLinear, is in the region, too.
    """

    entries: tuple[str, ...]
    places: Places
    leaves: bool = False
    open: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.distributed:
            return super().forward(*args, **kwargs)
        group, first = self.tensor_group, self.entries[0]
        for name in self.entries[1:]:
            other = self.places.get(name, args, kwargs)
            if isinstance(other, Tensor):
                args, kwargs = self.places.put(name, collectives.copy(other, group), args, kwargs)
        hidden = self.places.get(first, args, kwargs)
        with sharded(group.rank + 1), entered(hidden, group) as whole:
            args, kwargs = self.places.put(first, whole, args, kwargs)
            result = super().forward(*args, **kwargs)
        if self.open:
            set_shard(group.rank + 1)
        return first_of(result, lambda addend: leave(addend, group)) if self.leaves else result


class WholeRegion(DistributedModule):
    """A module amid slices of the sequence that needs the whole of it and is not divided."""

    entries: tuple[str, ...]
    places: Places

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.places.get(self.entries[0], args, kwargs)
        if not is_slice(hidden):
            return super().forward(*args, **kwargs)
        args, kwargs = self.places.put(self.entries[0], to_whole(hidden, self.tensor_group), args, kwargs)
        with sharded(0):
            result = super().forward(*args, **kwargs)
        return first_of(result, lambda whole: to_slice(whole, self.tensor_group))


class Layer(DistributedModule):
    """One of consecutive layers, between which hidden states are slices of the sequence in memory mode.

    Attributes:
        last: whether its result is made whole.
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
DIVIDED_OUTPUTS = ("attentions", "cross_attentions", "encoder_attentions", "decoder_attentions")


class Outermost(DistributedModule):
    """What is not inside another twin: where ranks bring different samples, they are joined here, and given back.

    Its loss gradients are made means over the group's samples at its exit.
    """

    places: Places

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = self.tensor_group
        if not self.distributed:
            return super().forward(*args, **kwargs)
        if not group.joined:
            with sharded(0):
                return self._outside(super().forward(*args, **kwargs))
        given = {**dict(zip(self.places.names, args, strict=False)), **kwargs}
        rows = max((v.shape[0] for k, v in given.items() if _has_batch(k, v)), default=0)
        for name, value in given.items():
            if _has_batch(name, value) and value.shape[0] == rows:
                args, kwargs = self.places.put(name, joined(value, group), args, kwargs)
        with sharded(0):
            result = self._outside(super().forward(*args, **kwargs))
        return own_rows(result, group, rows)

    def _outside(self, result: Any) -> Any:
        """Named outputs that are slices or divided inside, as the undivided model gives them."""
        if not isinstance(result, dict):
            return result
        for name in SLICED_OUTPUTS:
            if isinstance(result.get(name), tuple):
                result[name] = tuple(to_whole(hidden, self.tensor_group) for hidden in result[name])
        for name in DIVIDED_OUTPUTS:
            if isinstance(result.get(name), tuple):
                result[name] = tuple(collectives.whole(a, self.tensor_group, 1) for a in result[name])
        return result


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
