"""Finding out what a step does, without data: one microbatch under fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smpar.stage.explorer import Explorer
from smpar.stage.layout import Layout
from smpar.stage.record import Event, MicrobatchProgram
from smpar.stage.special import patched
from smpar.stage.split import Call
from smpar.stage.units import marked
from smpar.trace import tree
from smpar.trace.graph import Link, ModuleGraph, Unit, parameter_bytes, shared_parameters
from smpar.trace.outcomes import Outcomes, flags


def explore(
    fn: Callable[..., Any], call: Call, model: nn.Module, layout: Layout, outcomes: Outcomes, seed: int = 0
) -> tuple[MicrobatchProgram, int]:
    """Run a step function once without data; leaves no trace in the model or the random state.

    Args:
        seed: start of the microbatch's chain of draws: glue may decide by random numbers (layer drop).

    Returns:
        the program, and how often glue looked at values of replicated tensors (then the program may differ for
        other values).

    Raises:
        ValueNeeded: glue asks for the data of a stage tensor.
    """
    run = _explore(fn, call, model, layout, outcomes, seed)
    program = run.finish()
    if program.in_turn:  # perhaps only flags of something done once, which has been done now
        run = _explore(fn, call, model, layout, outcomes, seed)
        program = run.finish()
    return program, run.reads


def _explore(
    fn: Callable[..., Any], call: Call, model: nn.Module, layout: Layout, outcomes: Outcomes, seed: int
) -> Explorer:
    snapshot = tree.Snapshot(depth=2)
    for module in layout.split:
        snapshot.add(module)
    buffers = [(b, b.clone()) for m in layout.split for b in m.buffers(recurse=False)]
    random = torch.get_rng_state()
    modules = list(model.modules())
    modes, versions = flags(modules), [b._version for b, _ in buffers]
    run = Explorer(layout, outcomes, seed)
    run.changed = lambda: flags(modules) != modes or [b._version for b, _ in buffers] != versions or snapshot.differs()
    try:
        with marked(layout, inside=True), patched():
            run.call(fn, *call)
            run.finish_state()
    finally:
        run.hidden.restore()
        snapshot.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(random)
    return run


def graph_of(program: MicrobatchProgram, layout: Layout) -> tuple[ModuleGraph, list[nn.Module], dict[int, int]]:
    """The module graph of a program in which every unit is on stage 0.

    An operation of glue belongs to the unit that runs latest among those it depends on, as at run time.

    Returns:
        the graph; its units as modules, in the order of their first call (units never called are left out); and for
        each parameter that glue reads, the index of the unit it goes with.
    """
    order: dict[nn.Module, int] = {}
    for event in program.events:
        if isinstance(event, Event) and isinstance(event.target, nn.Module):
            order.setdefault(event.target, len(order))
    modules = list(order)
    flops, seconds, backward, saved, calls = ([0.0] * len(modules) for _ in range(5))
    shapes: list[tuple[tuple[int, ...], ...]] = [()] * len(modules)
    anchor: dict[int, int | None] = {}
    waiting: dict[int, set[int]] = {}  # tensors made of parameters only -> those parameters
    anchors: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    for event in program.events:
        if not isinstance(event, Event):
            continue
        inputs = [i for i in event.inputs if i is not None]
        if isinstance(event.target, nn.Module):
            home: int | None = order[event.target]
        else:
            home = max((a for i in inputs if (a := anchor[i]) is not None), default=None)
        loose = set(event.parameters).union(*(waiting.get(i, ()) for i in inputs))
        made = [i for i in (*event.outputs, *event.written) if i is not None]
        for ident in made:
            anchor[ident] = home
            if home is None:
                waiting[ident] = loose
        if home is None:
            continue
        for key in loose:
            anchors.setdefault(key, home)
        for ident in inputs:
            if (source := anchor[ident]) is not None and source != home:
                users.setdefault(ident, set()).add(home)
        cost = event.outcome.cost
        flops[home] += cost.flops
        seconds[home] += cost.seconds
        backward[home] += 2 * cost.seconds
        saved[home] += cost.saved
        if isinstance(event.target, nn.Module):
            calls[home] += 1
            shapes[home] = shapes[home] or tuple(program.metas[i].shape for i in event.outputs if i is not None)
    links = tuple(
        Link(anchor[ident] or 0, tuple(sorted(targets)), program.metas[ident].nbytes)
        for ident, targets in users.items()
    )
    made_units = tuple(
        Unit(
            layout.names[m], _kind(m), int(calls[i]), parameter_bytes(m), flops[i], seconds[i], backward[i],
            int(saved[i]), shapes[i],
        )
        for i, m in enumerate(modules)
    )  # fmt: skip
    graph = ModuleGraph(made_units, links, shared_parameters(modules, layout.parameter_names))
    return graph, modules, anchors


def _kind(module: nn.Module) -> str:
    return type(module).__name__
