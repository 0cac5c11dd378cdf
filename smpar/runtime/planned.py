"""The layout that a plan asks for: each of its layers on its stage.

::

    plan      embed │ h.0.attn  h.0.mlp  h.1.attn │ h.1.mlp  head        layers, cut into three stages
    units     embed │ h.0                h.1.attn │ h.1.mlp  head        what lies on one stage as a whole, runs whole
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from smpar.config import Planned
from smpar.errors import ConfigError, PlanFileError, WriteIntoReplicated
from smpar.runtime.partitioning import Explored, Goal, Partitioned, bare_graph, never_called, pins_of, survey_exposed
from smpar.stage.explorer import ValueNeeded
from smpar.stage.layout import Layout, maximal_units
from smpar.stage.split import Call
from smpar.trace.outcomes import Outcomes

log = logging.getLogger("smpar")

WHOLE = "(model)"
"""Name of the layer that is the whole model."""
_RULE = "a plan's layers are the units of the model that is trained, in the order of their first calls"
_FIX = "plan this very model: smpar plan module:function ..."


def check_layers(model: nn.Module, plan: Planned) -> None:
    """Raise PlanFileError unless each layer of the plan is a module of the model, none inside another.

    Raises:
        ConfigError: the user has put modules on stages, too.
    """
    pins = pins_of(model)
    if pins:
        module, stage = next(iter(pins.items()))
        name = next(n for n, m in model.named_modules() if m is module)
        raise ConfigError(
            "with a plan, the plan alone puts modules on stages",
            f"{name or WHOLE} was put on stage {stage}",
            "leave out smpar.partition and smpar.set_partition, or the plan",
        )
    _owners(model, [name for name, _ in plan.layers])


def _owners(model: nn.Module, layers: Sequence[str]) -> dict[nn.Module, int]:
    """Each module inside a layer -> that layer's index."""
    modules = {name or WHOLE: module for name, module in model.named_modules()}
    owner: dict[nn.Module, int] = {}
    for index, name in enumerate(layers):
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=1)
            there = f"; there is {near[0]!r}" if near else ""
            raise PlanFileError(
                _RULE, f"layer {index} is {name!r}, and {type(model).__name__} has no such module{there}", _FIX
            )
        for module in modules[name].modules():
            if owner.setdefault(module, index) != index:
                raise PlanFileError(_RULE, f"layer {index} ({name!r}) and layer {owner[module]} share a module", _FIX)
    return owner


def planned_layout(
    fn: Callable[..., Any], call: Call, model: nn.Module, outcomes: Outcomes, goal: Goal, plan: Planned
) -> Partitioned:
    """Lay out a model as its plan says.

    Args:
        fn, call: the step function and the first microbatch's arguments.
        goal: of the plan's degrees.

    Raises:
        PlanFileError: the step calls other units than the plan's, or in another order; names the first one.
    """
    stages = [stage for _, stage in plan.layers]
    covered = _covered(model, plan)
    opened = {m for m, layers in covered.items() if not _together(layers, stages)}
    try:
        with torch.inference_mode(False), torch.enable_grad():
            seen = survey_exposed(fn, call, model, outcomes, opened)
    except (ValueNeeded, WriteIntoReplicated) as need:
        if isinstance(need, WriteIntoReplicated) and not need.shareable:
            raise
        log.warning("smpar: the step reads values while it runs; its units are not compared with the plan's layers")
        units = {u: stages[covered[u][0]] if u in covered else 0 for u in maximal_units(model, opened)}
        layout = Layout.make(model, goal.ranks, units, {}, set())
        return Partitioned(layout, bare_graph(list(units), layout), tuple(units.values()))
    _compare(seen, covered, plan)
    stage_of = tuple(stages[covered[m][0]] for m in seen.modules)
    units = dict(zip(seen.modules, stage_of, strict=True))
    bypassed, last = never_called(seen), 0
    for unit in seen.layout.units:  # units that the step does not call go with the layers they belong to, or before
        if unit not in bypassed:
            last = units.setdefault(unit, stages[covered[unit][0]] if unit in covered else last)
    anchors = {key: stage_of[index] for key, index in seen.anchors.items()}
    layout = Layout.make(model, goal.ranks, units, anchors, seen.layout.glue_hooks)
    return Partitioned(layout, seen.graph, stage_of)


def _covered(model: nn.Module, plan: Planned) -> dict[nn.Module, list[int]]:
    """Each module that is in a layer or has layers inside -> the indices of those layers, ascending."""
    owner = _owners(model, [name for name, _ in plan.layers])
    found: dict[nn.Module, list[int]] = {}
    for module in model.modules():
        layers = [owner[module]] if module in owner else sorted({owner[m] for m in module.modules() if m in owner})
        if layers:
            found[module] = layers
    return found


def _together(layers: Sequence[int], stages: Sequence[int]) -> bool:
    """Whether these layers follow each other on one stage."""
    return layers[-1] - layers[0] == len(layers) - 1 and stages[layers[0]] == stages[layers[-1]]


def _compare(seen: Explored, covered: dict[nn.Module, list[int]], plan: Planned) -> None:
    """Raise PlanFileError at the first called unit that is not the plan's, or comes too early."""
    last = -1
    for module in seen.modules:
        layers, name = covered.get(module), seen.layout.names[module] or WHOLE
        if layers is None:
            expected = plan.layers[last + 1][0] if last + 1 < len(plan.layers) else "nothing"
            raise PlanFileError(_RULE, f"the step calls {name!r}, where the plan has {expected!r}", _FIX)
        if layers[0] < last:
            raise PlanFileError(
                _RULE, f"the step calls {name!r} after {plan.layers[last][0]!r}, the plan has it before", _FIX
            )
        last = layers[-1]
    called = {index for module in seen.modules for index in covered[module]}
    unused = [name for index, (name, _) in enumerate(plan.layers) if index not in called]
    if unused:
        log.warning("smpar: the step calls %d of the plan's layers not at all, first %r", len(unused), unused[0])
