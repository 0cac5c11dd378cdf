"""Linears of which each rank of a group holds some output features (columns) or some input features (rows).

Their weight may be held as ``nn.Linear`` does, [out, in], or transposed, as GPT-2's are. What does not divide evenly is
divided unevenly::

    features of three ranks    | 0 0 0 | 1 1 1 | 2 2 |
    evened out, for collectives  0 0 0   1 1 1   2 2 .
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from smpar.nn.module import DistributedModule, become, slice_parameter
from smpar.nn.twins import RowLinear, joined, own_rows
from smpar.slices import Slicing
from smpar.trace.draws import sharded

log = logging.getLogger("smpar")

T = TypeVar("T", bound=DistributedModule)


def out_dim(linear: nn.Module) -> int:
    """Which dim of the weight are the output features."""
    return 0 if isinstance(linear, nn.Linear) else 1


def out_features(linear: nn.Module) -> int:
    return int(linear.weight.shape[out_dim(linear)])  # type: ignore[index]


def in_features(linear: nn.Module) -> int:
    return int(linear.weight.shape[1 - out_dim(linear)])  # type: ignore[index]


def slice_columns(linear: nn.Module, slicing: Slicing, group: TensorGroup) -> None:
    """Let a linear, or an embedding, give this rank's features only: slice its weight by them, and its bias."""
    slice_parameter(linear.weight, slicing, group)  # type: ignore[arg-type]
    bias = getattr(linear, "bias", None)
    if bias is not None:
        slice_parameter(bias, dataclasses.replace(slicing, dim=0), group)
    _set_size(linear, ("out_features", "nf", "embedding_dim"), slicing.size(group.rank))


def slice_rows(
    linear: nn.Module,
    slicing: Slicing,
    group: TensorGroup,
    twin: type[T] = RowLinear,  # type: ignore[assignment]
    **attributes: Any,
) -> T:
    """Let a linear take this rank's input features only, and sum the group's results, as a twin of class ``twin``.

    Args:
        attributes: the twin's.
    """
    slice_parameter(linear.weight, slicing, group)  # type: ignore[arg-type]
    _set_size(linear, ("in_features", "nx"), slicing.size(group.rank))
    return become(linear, twin, group, **attributes)


def divide_columns(linear: nn.Module, unit: int, group: TensorGroup) -> Slicing:
    """Slice a linear's output features as evenly as they go, in whole units; gives how."""
    slicing = Slicing.even(out_dim(linear), out_features(linear), group.size, unit)
    slice_columns(linear, slicing, group)
    return slicing


def divide_rows(linear: nn.Module, unit: int, group: TensorGroup, twin: type[T] = RowLinear) -> T:  # type: ignore[assignment]
    """Slice a linear's input features likewise, as ``slice_rows`` does."""
    return slice_rows(linear, Slicing.even(1 - out_dim(linear), in_features(linear), group.size, unit), group, twin)


def _set_size(module: nn.Module, names: tuple[str, ...], size: int) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, size)


def whole_features(part: Tensor, slicing: Slicing, group: TensorGroup, dim: int = -1) -> Tensor:
    """The features of all ranks, of which each holds one run, along ``dim``; all ranks work on them alike."""
    dim %= part.dim()
    sizes = [slicing.size(rank) for rank in range(group.size)]
    even = collectives.whole(padded(part, max(sizes), dim), group, dim)
    if len(set(sizes)) == 1:
        return even
    return torch.cat([even.narrow(dim, rank * max(sizes), size) for rank, size in enumerate(sizes)], dim)


def own_features(whole: Tensor, slicing: Slicing, group: TensorGroup) -> Tensor:
    """This rank's run of features along the last dim of what all ranks hold."""
    sizes = [slicing.size(rank) for rank in range(group.size)]
    even = torch.cat([padded(part, max(sizes), whole.dim() - 1) for part in whole.split(sizes, -1)], -1)
    return collectives.take(even, group, whole.dim() - 1)[..., : sizes[group.rank]]


def padded(tensor: Tensor, length: int, dim: int) -> Tensor:
    """The tensor with zeros behind it, up to a length along ``dim``."""
    short = length - tensor.shape[dim]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, short]) if short else tensor


class WholeLinear(DistributedModule):
    """A linear with its whole input and output on every rank, alone among undivided modules.

    [..., K] -> [..., H]. Where ranks bring different samples, the first dim is the batch's.

    Attributes:
        slicing: of the weight [H, K]: dim 0 for output features, whose values are gathered, dim 1 for input features,
            whose products are summed.
        outermost: whether it joins samples.
    """

    slicing: Slicing
    outermost: bool = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.distributed:
            return super().forward(x)
        group = self.tensor_group
        with sharded(0):
            if not (self.outermost and group.joined):
                return self._worked(x, group)
            return own_rows(self._worked(joined(x, group), group), group, x.shape[0])

    def _worked(self, x: Tensor, group: TensorGroup) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[assignment]
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        if self.slicing.dim == 0:
            return whole_features(F.linear(collectives.copy(x, group), weight, bias), self.slicing, group)
        total = collectives.reduce(F.linear(own_features(x, self.slicing, group), weight), group)
        return total if bias is None else total + bias


def divide_linear(linear: nn.Linear, group: TensorGroup, **attributes: Any) -> nn.Linear | None:
    """Divide a linear that keeps whole inputs and outputs; None if it has too few features.

    For output features, forward and backward move ``out + 2 in`` numbers per sample; for input features ``2 out + in``.
    """
    length = max(linear.in_features, linear.out_features)
    if length < group.size:
        log.warning("a linear of %d features stays whole on each of %d ranks", length, group.size)
        return None
    if linear.out_features < linear.in_features:
        slicing = Slicing.even(1, linear.in_features, group.size)
    else:
        slicing = Slicing.even(0, linear.out_features, group.size)
        if linear.bias is not None:
            slice_parameter(linear.bias, slicing, group)
    slice_parameter(linear.weight, slicing, group)  # type: ignore[arg-type]
    become(linear, WholeLinear, group, slicing=slicing, **attributes)
    return linear
