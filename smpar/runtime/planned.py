"""The layout that a plan asks for: its layers are the units, each on its stage."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from smpar.config import Planned
from smpar.errors import ConfigError, PlanFileError, WriteIntoReplicated
from smpar.runtime.partitioning import Explored, Goal, Partitioned, bare_graph, expose, never_called, pins_of, survey
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
    owner = _owners(model, [name for name, _ in plan.layers])
    stages = [stage for _, stage in plan.layers]
    opened = {m for m in model.modules() if m not in owner and any(x in owner for x in m.modules())}
    try:
        seen = _surveyed(fn, call, model, outcomes, opened)
    except (ValueNeeded, WriteIntoReplicated) as need:
        if isinstance(need, WriteIntoReplicated) and not need.shareable:
            raise
        log.warning("smpar: the step reads values while it runs; its units are not compared with the plan's layers")
        units = {u: stages[owner.get(u, 0)] for u in maximal_units(model, opened)}
        layout = Layout.make(model, goal.ranks, units, {}, set())
        return Partitioned(layout, bare_graph(list(units), layout), tuple(units.values()))
    _compare(seen, owner, plan)
    stage_of = tuple(stages[owner[m]] for m in seen.modules)
    units = dict(zip(seen.modules, stage_of, strict=True))
    bypassed, last = never_called(seen), 0
    for unit in seen.layout.units:  # units that the step does not call go with the layers they belong to, or before
        if unit not in bypassed:
            last = units.setdefault(unit, stages[owner[unit]] if unit in owner else last)
    anchors = {key: stage_of[index] for key, index in seen.anchors.items()}
    layout = Layout.make(model, goal.ranks, units, anchors, seen.layout.glue_hooks)
    return Partitioned(layout, seen.graph, stage_of)


def _surveyed(
    fn: Callable[..., Any], call: Call, model: nn.Module, outcomes: Outcomes, opened: set[nn.Module]
) -> Explored:
    glue_hooks: set[nn.Module] = set()
    with torch.inference_mode(False), torch.enable_grad():
        while True:
            try:
                seen = survey(fn, call, model, outcomes, opened, glue_hooks)
            except Exception:
                if not expose(outcomes.leaky, opened, glue_hooks, set()):
                    raise
            else:
                if not expose(outcomes.leaky, opened, glue_hooks, set()):
                    return seen


def _compare(seen: Explored, owner: dict[nn.Module, int], plan: Planned) -> None:
    """Raise PlanFileError at the first called unit that is not the plan's, or comes too early."""
    before = -1
    for place, module in enumerate(seen.modules):
        index, name = owner.get(module), seen.layout.names[module] or WHOLE
        if index is None:
            expected = plan.layers[before + 1][0] if before + 1 < len(plan.layers) else "nothing"
            raise PlanFileError(
                _RULE, f"unit {place} that the step calls is {name!r}; the plan has {expected!r} there", _FIX
            )
        if index < before:
            raise PlanFileError(
                _RULE, f"the step calls {name!r} after {plan.layers[before][0]!r}, the plan has it before", _FIX
            )
        before = index
    called = {owner[m] for m in seen.modules}
    unused = [name for index, (name, _) in enumerate(plan.layers) if index not in called]
    if unused:
        log.warning("smpar: the step calls %d of the plan's layers not at all, first %r", len(unused), unused[0])
