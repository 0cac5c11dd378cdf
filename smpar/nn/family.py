"""From a table of names to a model of twins.

A *plan* says of a model's modules how each is divided, by patterns in which ``*`` stands for any one part of a name:

    "h.*.attn.c_attn": "colwise*3"     a linear by output features, in three blocks (fused q, k, v)
    "h.*.attn.c_proj": "rowwise"       a linear by input features; its results are summed

The words are those of ``base_model_tp_plan`` in transformers' configurations, so such a plan is one, too. The rest
follows: what is up to the first ``*`` are the layers; the module around column-parallel linears is the region that they
and the row-parallel linear after them work in; a region is divided by whole heads. What a plan does not speak of, or
in words that are not served, stays whole.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from smpar.nn.group import TensorGroup, partial
from smpar.nn.linears import is_linear
from smpar.nn.module import become
from smpar.nn.regions import Found, divide_region, keep_whole
from smpar.nn.twins import Layer, Places, Region, RowLinear, WholeRegion, region_entries
from smpar.slices import slicing_of

log = logging.getLogger("smpar")

COLUMNS = {"colwise": 1, "packed_colwise": 2}  # style -> blocks
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")
VOCABULARY = "embedding_rowwise"
ELSEWHERE = ("", "replicated_with_grad_allreduce", VOCABULARY)  # no matter of regions
HEAD = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
OTHERS = ("encoder_hidden_states", "key_value_states")


@dataclass(frozen=True)
class Family:
    """How the models of one class are divided.

    Attributes:
        plan: pattern of a name -> style; see above.
        counts: attributes of regions that count heads, or features of all heads; each rank gets its own number.
        head: attributes of which a region that has one keeps so many features together: the size of a head.
        queries_per_key: attributes of regions that say how many query heads share a key and value head.
        others: arguments besides the hidden state that regions work on.
        skips: attributes of the model that, unless zero, say that it skips layers at times.
    """

    plan: Mapping[str, str] = field(default_factory=dict)
    counts: tuple[str, ...] = ()
    head: tuple[str, ...] = HEAD
    queries_per_key: tuple[str, ...] = ("num_key_value_groups",)
    others: tuple[str, ...] = OTHERS
    skips: tuple[str, ...] = ("layerdrop",)


def matching(plan: Mapping[str, str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
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
    layers = _layers(family.plan, model)
    for region in _regions(modules, dict(matching(family.plan, modules)), layers):
        stacked = any(region.path == path or region.path.startswith(path + ".") for path in layers)
        divide_region(region, family, group if stacked else dataclasses.replace(group, memory=False))
    skips = any(getattr(model, name, 0) for name in family.skips)
    for path, last in layers.items():
        layer = modules[path]
        places = Places(layer.forward)
        if group.memory:
            for part in _unknown(layer):
                keep_whole(part, "its plan does not speak of it", family, group)
            _mark_partial(layer, group)
        become(layer, Layer, group, entries=region_entries(places.names, ()), places=places, last=last or skips)
    _tell(modules)


def _layers(plan: Mapping[str, str], model: nn.Module) -> dict[str, bool]:
    """Paths of the layers, each with whether it is the last of its stack; that may be in other places there, too."""
    stacks = dict.fromkeys(p[: p.index("*") + 1] for p in plan if "*" in p)
    places = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, bool] = {}
    for stack in stacks:
        layers = {name: places[name] for name, _ in matching({stack: ""}, places)}
        last = list(layers.values())[-1:]
        found |= {name: module in last for name, module in model.named_modules() if name in layers}
    return found


def _regions(modules: Mapping[str, nn.Module], styles: Mapping[str, str], layers: Mapping[str, bool]) -> list[Found]:
    found: dict[str, Found] = {}
    latest: Found | None = None
    for name, module in modules.items():  # parents first, in the order of definition
        style, _, count = styles.get(name, "").partition("*")
        if style in ELSEWHERE:
            continue
        if style in (*COLUMNS, "rowwise") and not is_linear(module):
            style = f"{style} for a {type(module).__name__}"
        if style == "rowwise" and latest is not None:
            latest.rows.append(module)
            continue
        parent = name.rpartition(".")[0]
        path = name if parent in layers else parent  # a linear right inside a layer is a region of its own
        latest = found.setdefault(path, Found(path, modules[path]))
        if style in COLUMNS:
            latest.columns.append((module, int(count or COLUMNS[style])))
        elif style in EXPERTS:
            latest.experts.append(module)
        else:
            latest.unserved.add(style)
    for outer in [region for region in found.values() if region.experts]:
        outer.inside = [region for path, region in found.items() if path.startswith(outer.path + ".")]
        for region in outer.inside:
            del found[region.path]
    return list(found.values())


TWINS = (Region, WholeRegion, RowLinear)


def _unknown(layer: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in a layer that have parts, none of them a twin.

    What has no parts, such as a norm, is taken to work position by position.
    """
    for child in layer.children():
        if isinstance(child, TWINS) or not any(child.children()):
            continue
        if any(isinstance(part, TWINS) for part in child.modules()):
            yield from _unknown(child)
        else:
            yield child


def _tell(modules: Mapping[str, nn.Module]) -> None:
    """Log what stays whole, once for all layers that are alike."""
    kept = {(re.sub(r"\b\d+\b", "*", path), m.why) for path, m in modules.items() if isinstance(m, WholeRegion)}
    for path, why in sorted(kept):
        log.warning("%s stays whole on each rank: %s", path, why)


def _mark_partial(layer: nn.Module, group: TensorGroup) -> None:
    """In memory mode ranks see their slices of the sequence only, but in what is whole."""
    undivided = {p for part in layer.modules() if isinstance(part, WholeRegion) for p in part.parameters()}
    for parameter in layer.parameters():
        if slicing_of(parameter) is None and parameter not in undivided:
            partial(parameter, group)
