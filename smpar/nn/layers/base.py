"""What the layers have in common: where a layer is entered and left, alone or inside another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from smpar.nn.group import TensorGroup, partial
from smpar.nn.layers.norm import norm_of
from smpar.nn.layers.options import Options
from smpar.nn.module import DistributedModule, partial_rest
from smpar.nn.regions import Found, Shares, divide_linears, shares_of
from smpar.nn.sequence import entered, is_slice, to_slice, to_whole
from smpar.nn.twins import joined, own_rows
from smpar.slices import slicing_of
from smpar.trace import tree
from smpar.trace.draws import sharded

log = logging.getLogger("smpar")

M = TypeVar("M", bound=nn.Module)


class DividedLayer(DistributedModule):
    """A layer of a group's ranks::

        inputs ──▶ joined samples ──▶ slice ──▶ run ... region(work) ... ──▶ whole ──▶ own samples
                   └────────────────────── outermost only ───────────────────────────┘

    Inside another layer, hidden states are slices of the sequence in memory mode, and samples are joined already.

    Args:
        given: the arguments; see ``Options``.

    Attributes:
        outermost: whether it is in no other layer.

    Raises:
        LayerArgumentError: there is no such argument.
        NotInitialized: ``smpar.init`` has not run.
    """

    outermost: bool = True

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.options = Options.of(type(self), given)
        self.tensor_group = TensorGroup.current()

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        """The layer's result [N, S, H], or a slice of it, of a hidden state and what comes with it."""
        raise NotImplementedError

    def forward(self, *inputs: Any) -> Any:
        return self.ran(*unpacked(inputs))

    def ran(self, hidden: Tensor, *others: Any) -> Tensor:
        """The result of ``run`` for this rank's samples, whole if the layer is outermost."""
        group = self.tensor_group
        if not self.distributed:
            return self.run(hidden, *others)
        if not self.outermost:
            with self.between():
                return self.run(hidden, *others)
        rows = hidden.shape[0]
        if group.joined:
            hidden, *others = tree.map_tensors(
                lambda t: joined(t, group) if t.dim() and t.shape[0] == rows else t, [hidden, *others]
            )
        with self.between():
            result = self.run(hidden, *others)
        whole = to_whole(result, group)
        return own_rows(whole, group, rows) if group.joined else whole

    def between(self) -> Any:
        """The context of what is done between regions: each rank draws for its slice of the sequence, if it has one."""
        group = self.tensor_group
        return sharded(group.rank + 1 if group.memory and self.distributed else 0)

    def slice(self, hidden: Tensor) -> Tensor:
        """A hidden state as it is between regions."""
        return to_slice(hidden, self.tensor_group) if self.tensor_group.memory else hidden

    def mark_partial(self, *modules: nn.Module | None) -> None:
        """Note that these work on slices of the sequence in memory mode."""
        if not (self.tensor_group.memory and self.distributed):
            return
        for module in modules:
            for parameter in module.parameters() if module is not None else ():
                if slicing_of(parameter) is None:
                    partial(parameter, self.tensor_group)


class ResidualLayer(DividedLayer):
    """norm, a region, dropout, sum with what went in, norm; each norm if it is asked for.

    Attributes:
        shares: which heads or channels each rank works on; None if all ranks do all, alike.
    """

    shares: Shares | None

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.pre_layernorm = norm_of(self.options) if self.options.pre_layernorm else None
        self.layernorm = norm_of(self.options) if self.options.post_layernorm else None

    def divide(self, columns: Sequence[nn.Linear], rows: nn.Linear, head: int = 1) -> None:
        """Divide the region's linears by whole heads, or by channels, if there are enough of them.

        Args:
            head: features of a head.
        """
        group, self.shares = self.tensor_group, None
        if not self.distributed:
            return
        region = Found("", nn.ModuleList([*columns, rows]), [(linear, 1) for linear in columns], [rows])
        shares = shares_of(region, head, group.size)
        if isinstance(shares, str):
            log.warning("a %s stays whole on each rank: %s", type(self).__name__, shares)
            self.mark_partial(self.pre_layernorm, self.layernorm)
            return
        divide_linears(region, shares, group)
        for linear in columns:
            partial_rest(linear, group)  # keys and values that ranks share
        self.shares = shares
        self.mark_partial(self.pre_layernorm, self.layernorm, rows)

    def around(self, work: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """The layer, of what it does in its region."""
        hidden, o = self.slice(hidden), self.options
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        result = in_region(work, normed, self.tensor_group, self.shares is not None)
        result = dropped(result, o.hidden_dropout_prob, self.training)
        wide = torch.promote_types(hidden.dtype, torch.float32) if o.fp32_residual_addition else hidden.dtype
        total = (hidden.to(wide) + result.to(wide)).to(hidden.dtype)
        return total if self.layernorm is None else self.layernorm(total)


def in_region(work: Callable[[Tensor], Tensor], hidden: Tensor, group: TensorGroup, divided: bool) -> Tensor:
    """Work on this rank's heads or channels of the whole hidden state, which ends in a ``RowLinear``.

    Args:
        divided: else all ranks do all of it.
    """
    if divided and group.size > 1:
        with sharded(group.rank + 1), entered(hidden, group) as whole:
            return work(whole)
    with sharded(0):
        result = work(to_whole(hidden, group))
    return to_slice(result, group) if is_slice(hidden) else result


def inner(layer: M) -> M:
    """A layer as part of another one."""
    layer.outermost = False  # type: ignore[assignment]
    return layer


def unpacked(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a layer is called with: one tuple, as SMP has it, or several arguments."""
    if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
        return tuple(inputs[0])
    return inputs


def dropped(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout; no call of a drawing function where nothing is drawn."""
    return torch.nn.functional.dropout(x, probability, training) if training and probability else x
