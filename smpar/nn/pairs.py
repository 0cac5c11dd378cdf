"""Linears that follow upon each other with nothing but element-wise operations between: an MLP in a user's model.

::

    x ─┬─ up   ── GELU ── dropout ── down ─▶        one column linear, or several (a gate):
       └─ gate ── SiLU ── * ─────────                each rank has its channels up to `down`, which sums over the ranks

They are found in what ``torch.fx`` sees of one module's ``forward``, in which the children are called, not entered, but
for ``nn.Sequential``. What torch.fx cannot see, as it depends on values, has no pairs; nor does a linear that is called
twice, or whose result is used in another way, too; nor one with hooks. What is not in a pair is divided alone.
(Megatron-LM, arXiv 1909.08053, section 3.)
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from smpar.nn.linears import divide_columns, divide_rows
from smpar.nn.module import DistributedModule, become
from smpar.nn.twins import joined, own_rows
from smpar.trace.draws import set_shard, sharded

log = logging.getLogger("smpar")

_MODULES = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Dropout, nn.Identity,
)  # fmt: skip
_NAMES = (
    "gelu", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "hardswish", "softplus", "tanh",
    "sigmoid", "logsigmoid", "dropout", "square", "exp", "neg", "clamp", "mul", "div", "pow",
)  # fmt: skip
_FUNCTIONS: set[Any] = {getattr(space, name) for space in (torch, F) for name in _NAMES if hasattr(space, name)} | {
    operator.mul, operator.truediv, operator.neg, operator.pow,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Linears of which each rank holds some output features, and the one that takes these."""

    columns: tuple[nn.Linear, ...]
    rows: nn.Linear


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def pairs_in(module: nn.Module) -> Iterator[Pair]:
    """The pairs among the linears that a module calls itself, or in an ``nn.Sequential``."""
    if sum(_is_linear(m) for child in module.children() for m in _called(child)) < 2:
        return
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # whatever the user's code raises when it is given no tensors
        log.debug("smpar: no pairs of linears are looked for in a %s: %s", type(module).__name__, error)
        return
    modules = dict(module.named_modules(remove_duplicate=False))
    called = [modules[str(node.target)] for node in graph.nodes if node.op == "call_module"]
    paired: set[nn.Module] = set()
    for node in graph.nodes:
        rows = modules.get(str(node.target)) if node.op == "call_module" else None
        if rows is None or not _is_linear(rows) or len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
            continue
        sources = _sources(node.args[0], node, modules)
        columns = dict.fromkeys(modules[str(source.target)] for source in sources or ())  # in order, on all ranks
        if len({source.args for source in sources or ()}) != 1 or any(source.kwargs for source in sources or ()):
            continue
        fits = all(column.out_features == rows.in_features for column in columns)
        if fits and not paired & {rows, *columns} and all(called.count(m) == 1 for m in (rows, *columns)):
            paired |= {rows, *columns}
            yield Pair(tuple(columns), rows)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _called(child)
    else:
        yield module


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _sources(node: fx.Node, user: fx.Node, modules: dict[str, nn.Module]) -> dict[fx.Node, None] | None:
    """The calls of linears from which element-wise operations make a value; None if it comes from elsewhere, too."""
    if list(node.users) != [user]:
        return None
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if module is not None and _is_linear(module):
        return {node: None}
    if not _elementwise(node, module):
        return None
    found: dict[fx.Node, None] = {}
    for source in node.all_input_nodes:
        theirs = _sources(source, node, modules)
        if theirs is None:
            return None
        found |= theirs
    return found


def _elementwise(node: fx.Node, module: nn.Module | None) -> bool:
    if node.op == "call_module":
        return type(module) in _MODULES and module is not None and not _hooked(module)
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    return node.op == "call_method" and node.target in _NAMES


class PairColumns(DistributedModule):
    """[..., H] -> [..., C / tp] of all samples, which are joined here where ranks bring different ones."""

    def forward(self, x: Tensor) -> Tensor:
        group = self.tensor_group
        with sharded(0):
            whole = joined(x, group) if group.joined else x
            part: Tensor = super().forward(collectives.copy(whole, group))
        set_shard(group.rank + 1)
        return part


class PairRows(DistributedModule):
    """[..., C / tp] of all samples -> [..., H] of this rank's samples."""

    def forward(self, x: Tensor) -> Tensor:
        group = self.tensor_group
        weight: Tensor = self.weight  # type: ignore[assignment]
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        total = collectives.reduce(F.linear(x, weight), group)
        set_shard(group.rank + 1 if group.joined else 0)  # outside of twins ranks draw for samples of their own
        whole = total if bias is None else total + bias
        return own_rows(whole, group, x.shape[0] // group.size) if group.joined else whole


def divide_pair(pair: Pair, group: TensorGroup) -> None:
    """Divide the channels between linears, in place."""
    for column in pair.columns:
        divide_columns(column, 1, group)
        become(column, PairColumns, group)
    divide_rows(pair.rows, 1, group, PairRows)
