"""``smpar.module_graph``: what a plain module does, found without data, memory or other ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smpar.runtime.partitioning import Explored, close, expose, may_open, never_called, survey
from smpar.stage.explorer import ValueNeeded
from smpar.stage.layout import maximal_units
from smpar.stage.split import Call
from smpar.trace.fake import FakeRunner
from smpar.trace.graph import ModuleGraph, parameter_bytes
from smpar.trace.outcomes import Outcomes

log = logging.getLogger("smpar")

_LARGE = 1 / 16  # of the whole, in parameters or in time: such a module is opened

# Another call of a model finds what its equal layers and operations gave before.
_remembered: weakref.WeakKeyDictionary[nn.Module, Outcomes] = weakref.WeakKeyDictionary()


def module_graph(model: nn.Module, *args: Any, **kwargs: Any) -> ModuleGraph:
    """Trace ``model(*args, **kwargs)`` under fake tensors: units in call order, costs, data flow, shared parameters.

    Needs no ``smpar.init``. Nothing is computed and no memory is taken for it, so the model may be larger than memory
    and made on the meta device (its parameters are then taken to live on the CPU). Units are found by opening modules
    that have more than 1/16 of the whole's parameters or time, until none is left: repeated layers, as a rule. A
    module whose forward reads data, or uses functions that a trace cannot follow, stays whole.

    Args:
        model: any module, in the mode (``train`` or ``eval``) that matters; it is left as it was.
        args, kwargs: of one call, with real tensors; give ``labels`` or the like for a loss inside.

    Returns:
        Costs are of this call: bytes, FLOPs, and seconds counted for the device of the parameters.

    Raises:
        whatever the module raises on inputs of these shapes.
    """
    model = getattr(model, "module", model) if type(model).__name__ == "DistributedModel" else model
    outcomes = _remembered.get(model)
    if outcomes is None:
        outcomes = _remembered[model] = Outcomes(FakeRunner(_device(model)))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return open_until_even(run, ((model, *args), kwargs), model, outcomes).graph
    finally:
        outcomes.leaky.clear()
        outcomes.forget_keys()  # they hold modules, which would keep the model alive; and its modes may change


def _device(model: nn.Module) -> torch.device:
    """Where the model's parameters live, or would: the CPU for those on the meta device."""
    found = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if found.type == "meta" else found


def open_until_even(fn: Callable[..., Any], call: Call, model: nn.Module, outcomes: Outcomes) -> Explored:
    """Trace ``fn`` with ever more of the model's modules opened, until no unit is large.

    Args:
        fn: calls the model.
        call: its arguments, positional ones and those by name.
    """
    whole = {m for m in model.modules() if not may_open(m)}
    opened = _by_parameters(model, whole)
    glue_hooks: set[nn.Module] = set()
    while True:
        try:
            seen = survey(fn, call, model, outcomes, opened, glue_hooks)
        except ValueNeeded as need:
            log.warning("smpar: %s needs a value while it runs: %s; it stays whole", type(model).__name__, str(need))
            return survey(fn, call, model, outcomes, set(), set())
        except Exception as error:
            if not (expose(outcomes.leaky, opened, glue_hooks, whole) or close(error, opened, whole)):
                raise
            continue
        if expose(outcomes.leaky, opened, glue_hooks, whole):
            continue
        time = sum(u.seconds for u in seen.graph.units)
        large = {
            m
            for m, u in zip(seen.modules, seen.graph.units, strict=True)
            if m not in whole and u.seconds > _LARGE * time
        }
        large |= never_called(seen) - opened
        if not large:
            return seen
        opened |= large


def _by_parameters(model: nn.Module, whole: set[nn.Module]) -> set[nn.Module]:
    """The modules to open for their parameters alone, which takes no trace."""
    opened = {model} - whole
    limit = _LARGE * parameter_bytes(model)
    while True:
        large = {m for m in maximal_units(model, opened) if m not in whole and parameter_bytes(m) > limit}
        if not large:
            return opened
        opened |= large


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the model: the simplest step."""
    return model(*args, **kwargs)
