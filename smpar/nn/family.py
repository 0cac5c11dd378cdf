"""From a table of names to a model of twins.

A *plan* says of a model's modules how each is divided, by patterns in which ``*`` stands for any one part of a name:

    "h.*.attn.c_attn": "colwise*3"     a linear by output features, in three blocks (fused q, k, v)
    "h.*.attn.c_proj": "rowwise"       a linear by input features; its results are summed

The words are those of ``base_model_tp_plan`` in transformers' configurations, so such a plan is one, too. The rest
follows: what is up to the first ``*`` are the layers; the module around column-parallel linears is the region that they
and the row-parallel linear after them work in; a region is divided by whole heads.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from smpar.nn.group import TensorGroup, partial
from smpar.nn.module import become, slice_parameter
from smpar.nn.twins import Layer, Places, Region, RowLinear, WholeRegion, region_entries
from smpar.slices import Slicing, bounds_of, slicing_of

log = logging.getLogger("smpar")

COLUMNS = {"colwise": 1, "packed_colwise": 2}  # style -> blocks
HEAD = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
OTHERS = ("encoder_hidden_states", "key_value_states")


@dataclass(frozen=True)
class Family:
    """How the models of one class are divided.

    Attributes:
        plan: pattern of a name -> style; see above.
        counts: attributes of regions that count heads, or features of all heads; each rank gets its own number.
        head: attributes of which a region that has one keeps so many features together: the size of a head.
        others: arguments besides the hidden state that regions work on.
    """

    plan: Mapping[str, str]
    counts: tuple[str, ...] = ()
    head: tuple[str, ...] = HEAD
    others: tuple[str, ...] = OTHERS


@dataclass
class _Found:
    """A region, as far as the plan says."""

    path: str
    module: nn.Module
    columns: list[tuple[nn.Module, int]] = field(default_factory=list)  # with the number of blocks
    rows: list[nn.Module] = field(default_factory=list)

    def units(self, family: Family) -> int:
        """The number of pieces that it can be divided into; 0 if its linears do not agree on one."""
        head = next((h for name in family.head if isinstance(h := getattr(self.module, name, None), int)), 1)
        blocks = [(out_features(m), count) for m, count in self.columns]
        lengths = [length // count for length, count in blocks] + [in_features(m) for m in self.rows]
        units = min(length // head for length in lengths)
        fits = units > 0 and all(length % units == 0 for length in lengths)
        return units if fits and self.rows else 0


def out_features(linear: nn.Module) -> int:
    return int(linear.weight.shape[_out_dim(linear)])  # type: ignore[union-attr]


def in_features(linear: nn.Module) -> int:
    return int(linear.weight.shape[1 - _out_dim(linear)])  # type: ignore[union-attr]


def _out_dim(linear: nn.Module) -> int:
    return 0 if isinstance(linear, nn.Linear) else 1  # others hold their weight transposed, as GPT-2's do


def matching(plan: Mapping[str, str], names: Iterator[str] | list[str]) -> Iterator[tuple[str, str]]:
    """The names that patterns of a plan match, each with its style."""
    patterns = [(re.compile(re.escape(p).replace(r"\*", r"[^.]+")), style) for p, style in plan.items()]
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield name, style
                break


def divide(model: nn.Module, family: Family, group: TensorGroup) -> None:
    """Make twins of a model's layers, in place.

    What cannot be divided, as it has fewer heads than there are ranks, stays whole on each; the log says so.
    """
    modules = dict(model.named_modules())
    styles = dict(matching(family.plan, list(modules)))
    layers = _layers(family.plan, modules)
    for region in _regions(modules, styles, layers):
        stacked = any(region.path == path or region.path.startswith(path + ".") for path in layers)
        _divide_region(region, family, group if stacked else dataclasses.replace(group, memory=False))
    for path, last in layers.items():
        layer = modules[path]
        places = Places(layer.forward)
        if group.memory:
            _mark_partial(layer, group)
        become(layer, Layer, group, entries=region_entries(places.names, ()), places=places, last=last)


def _layers(plan: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, bool]:
    """Paths of the layers, each with whether it is the last of its stack."""
    stacks = dict.fromkeys(p[: p.index("*") + 1] for p in plan if "*" in p)
    found: dict[str, bool] = {}
    for stack in stacks:
        paths = [name for name, _ in matching({stack: ""}, list(modules))]
        found |= {path: path == paths[-1] for path in paths}
    return found


def _regions(modules: Mapping[str, nn.Module], styles: Mapping[str, str], layers: Mapping[str, bool]) -> list[_Found]:
    found: dict[str, _Found] = {}
    latest: _Found | None = None
    for name, module in modules.items():  # parents first, in the order of definition
        style, _, count = styles.get(name, "").partition("*")
        if style in COLUMNS:
            parent = name.rpartition(".")[0]
            path = name if parent in layers else parent  # a linear right inside a layer is a region of its own
            latest = found.setdefault(path, _Found(path, modules[path]))
            latest.columns.append((module, int(count or COLUMNS[style])))
        elif style == "rowwise" and latest is not None:
            latest.rows.append(module)
    return list(found.values())


def _divide_region(region: _Found, family: Family, group: TensorGroup) -> None:
    module = region.module
    places = Places(module.forward)
    entries = region_entries(places.names, family.others)
    units = region.units(family)
    if units < group.size:
        log.warning(
            "%s stays whole on each rank: it has %d heads or channels for %d ranks", region.path, units, group.size
        )
        become(module, WholeRegion, group, entries=entries, places=places)
        return
    for linear, blocks in region.columns:
        length, dim = out_features(linear), _out_dim(linear)
        slicing = Slicing.even(dim, length, group.size, length // blocks // units, blocks)
        slice_parameter(linear.weight, slicing, group)  # type: ignore[arg-type]
        if linear.bias is not None:
            slice_parameter(linear.bias, dataclasses.replace(slicing, dim=0), group)  # type: ignore[arg-type]
        _set_size(linear, ("out_features", "nf"), slicing.size(group.rank))
    for linear in region.rows:
        length, dim = in_features(linear), 1 - _out_dim(linear)
        slicing = Slicing.even(dim, length, group.size, length // units)
        slice_parameter(linear.weight, slicing, group)  # type: ignore[arg-type]
        _set_size(linear, ("in_features", "nx"), slicing.size(group.rank))
        become(linear, RowLinear, group)
    start, stop = bounds_of(units, group.size)[group.rank]
    for name in family.counts:
        count = getattr(module, name, None)
        if isinstance(count, int):
            setattr(module, name, count // units * (stop - start))
    for part in module.modules():
        if not isinstance(part, RowLinear):
            for parameter in part.parameters(recurse=False):
                if slicing_of(parameter) is None:
                    partial(parameter, group)
    alone = any(linear is module for linear, _ in region.columns)
    become(module, Region, group, entries=entries, places=places, open=alone)


def _mark_partial(layer: nn.Module, group: TensorGroup) -> None:
    """In memory mode ranks see their slices of the sequence only, but in what is whole."""
    undivided = {p for part in layer.modules() if isinstance(part, WholeRegion) for p in part.parameters()}
    for parameter in layer.parameters():
        if slicing_of(parameter) is None and parameter not in undivided:
            partial(parameter, group)


def _set_size(module: nn.Module, names: tuple[str, ...], size: int) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, size)


Divider = Callable[[nn.Module, TensorGroup], None]
