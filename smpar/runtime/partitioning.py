"""From a model to its layout: which modules are units, and on which stage each runs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smpar.errors import PartitionError, WriteIntoReplicated
from smpar.planner.chain import Edge, Partition, Tie, TooFewUnits, UnitCost
from smpar.planner.partition import EVENNESS
from smpar.planner.partition import partition as best_cuts
from smpar.runtime.core import number_of_stages
from smpar.runtime.creation import made_inside
from smpar.runtime.planning import explore, graph_of
from smpar.stage.explorer import ValueNeeded
from smpar.stage.layout import Layout, maximal_units
from smpar.stage.split import Call
from smpar.stage.units import blamed, can_be_marked
from smpar.trace.graph import ModuleGraph, Unit, parameter_bytes, shared_parameters
from smpar.trace.outcomes import Outcomes
from smpar.trace.watch import RATES

log = logging.getLogger("smpar")

_pins: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

# Bytes of parameters, gradients and two moments of Adam, per byte of parameter.
STATE = 4
# A transfer between neighbouring stages: bytes per second and seconds of latency, for counted costs.
_LINKS = {"cpu": (1.5e9, 6e-5), "cuda": (5e10, 1e-5)}
# Open further modules while the best partition is this much slower than a perfect balance ...
_GOOD = 1.05
# ... and take a finer set of units only if it gains this much.
_GAIN = 0.97
# Adding one gradient to another streams through memory, faster than an operator among others.
_STREAM = 2.5


@contextlib.contextmanager
def partition(stage: int) -> Iterator[None]:
    """Modules made inside run on pipeline stage ``stage``; the innermost context wins (SMP's ``smp.partition``)."""
    check_index(stage)
    with made_inside(lambda module: set_partition(module, stage)):
        yield


def set_partition(module: nn.Module, stage: int) -> None:
    """Put a module, with all inside it that is not put elsewhere, on a pipeline stage.

    Raises:
        PartitionError: the index is no whole number of at least 0.
    """
    check_index(stage)
    _pins[module] = stage


def check_index(stage: Any) -> None:
    """Raise PartitionError unless ``stage`` is a pipeline stage (as far as their number is known yet)."""
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise PartitionError(f"partition index {stage!r}")
    stages = number_of_stages()
    if stages is not None and stage >= stages:
        raise PartitionError(f"partition index {stage} with {stages} pipeline stages, 0 to {stages - 1}")


def check_pins(model: nn.Module, stages: int) -> None:
    """Raise PartitionError if a module of ``model`` was put on a stage that does not exist."""
    for name, module in model.named_modules():
        stage = _pins.get(module)
        if stage is not None and stage >= stages:
            raise PartitionError(
                f"{name or '(model)'} ({type(module).__name__}) on partition index {stage} with {stages} pipeline "
                f"stages, 0 to {stages - 1}"
            )


def pins_of(model: nn.Module) -> dict[nn.Module, int]:
    """The modules that the user has put on a stage."""
    return {m: s for m in model.modules() if (s := _pins.get(m)) is not None}


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a partition is made for: the part of the configuration that it depends on.

    ``ranks`` holds the pipeline rank of each stage; empty if stage ``k`` is alone on rank ``k``.
    """

    stages: int
    microbatches: int
    memory_weight: float
    auto: bool
    default: int
    skip_tracing: bool
    measure: Callable[[Explored], ModuleGraph] | None = None
    ranks: tuple[int, ...] = ()

    @property
    def degree(self) -> int:
        """Number of pipeline ranks."""
        return len(set(self.ranks)) or self.stages

    @property
    def ideal(self) -> float:
        """The objective (see `smpar.planner.partition`) of perfect balance without transfers."""
        per_rank = self.stages / self.degree
        return 1 / per_rank + (self.microbatches - 1 / per_rank) / self.degree

    @property
    def fine(self) -> float:
        """The share of the whole model up to which units do not stand in the way of balance: of ranks, not stages."""
        return 1 / (4 * self.degree)

    @property
    def in_flight(self) -> float:
        """Microbatches whose activations a rank holds, at most: more with interleaved stages (arXiv 2104.04473, 2.2.2).

        1F1B runs as many forwards ahead as there are ranks; interleaved, the first rank begins its last stage that much
        earlier and has up to ``(v + 1) * degree - 1`` forwards of one ``v``-th of its units in flight.
        """
        per_rank = self.stages / self.degree
        ahead = self.degree if per_rank == 1 else self.degree + (self.degree - 1) / per_rank
        return min(self.microbatches, ahead)


@dataclasses.dataclass(frozen=True)
class Explored:
    """A trace in which the model is cut into these units, all on one stage."""

    graph: ModuleGraph
    modules: list[nn.Module]
    anchors: dict[int, int]
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A layout with the graph and the predicted times and bytes of its stages (None if not predicted)."""

    layout: Layout
    graph: ModuleGraph
    stage_of_unit: tuple[int, ...]


def make_layout(fn: Callable[..., Any], call: Call, model: nn.Module, outcomes: Outcomes, goal: Goal) -> Partitioned:
    """Partition a model, as the first microbatch of the first step runs it.

    Raises:
        TooFewUnits: the model cannot be cut into so many stages.
        PartitionError: a stage index that does not exist.
    """
    check_pins(model, goal.stages)
    pins = pins_of(model)
    if not goal.auto:
        return _by_hand(fn, call, model, outcomes, goal, pins)
    if goal.skip_tracing:
        return _by_parameters(model, goal, pins)
    with torch.inference_mode(False), torch.enable_grad():
        return _search(fn, call, model, outcomes, goal, pins)


def survey(
    fn: Callable[..., Any],
    call: Call,
    model: nn.Module,
    outcomes: Outcomes,
    opened: set[nn.Module],
    glue_hooks: set[nn.Module],
) -> Explored:
    """Trace with the modules in ``opened`` split into their children, and hooks of ``glue_hooks`` run in glue."""
    layout = Layout.make(model, (0,), {u: 0 for u in maximal_units(model, opened)}, {}, glue_hooks)
    program, _ = explore(fn, call, model, layout, outcomes)
    graph, modules, anchors = graph_of(program, layout)
    return Explored(graph, modules, anchors, layout)


def survey_exposed(
    fn: Callable[..., Any], call: Call, model: nn.Module, outcomes: Outcomes, opened: set[nn.Module]
) -> Explored:
    """`survey`, again and again until no code that hands tensors to the outside is left to bring into glue.

    Adds what it opens for that to ``opened``.
    """
    glue_hooks: set[nn.Module] = set()
    while True:
        try:
            seen = survey(fn, call, model, outcomes, opened, glue_hooks)
        except Exception:
            if not expose(outcomes.leaky, opened, glue_hooks, set()):
                raise
        else:
            if not expose(outcomes.leaky, opened, glue_hooks, set()):
                return seen


def _search(
    fn: Callable[..., Any],
    call: Call,
    model: nn.Module,
    outcomes: Outcomes,
    goal: Goal,
    pins: dict[nn.Module, int],
) -> Partitioned:
    """Open modules, the dearest first, until their children balance well."""
    opened = {model} | {m for m in model.modules() if _holds_pin(m, pins) and m not in pins}
    whole = {m for m in model.modules() if not may_open(m)}
    opened -= whole
    best: tuple[float, Explored, tuple[int, ...]] | None = None
    failure: Exception | None = None
    glue_hooks: set[nn.Module] = set()
    for _ in range(16):
        try:
            seen = survey(fn, call, model, outcomes, opened, glue_hooks)
        except ValueNeeded:
            log.warning("smpar: the step reads values while it runs; the model is partitioned by parameters")
            return _by_parameters(model, goal, pins)
        except Exception as error:
            if expose(outcomes.leaky, opened, glue_hooks, whole):
                continue
            if not close(error, opened, whole):
                raise
            failure = failure or error
            if not opened:
                if _shareable(failure):
                    return _by_parameters(model, goal, pins)
                raise failure from None
            continue
        if expose(outcomes.leaky, opened, glue_hooks, whole):
            continue
        opened |= never_called(seen)
        if goal.measure is not None:
            seen = dataclasses.replace(seen, graph=goal.measure(seen))
        if all(m in pins for m in seen.modules):  # nothing is left to decide
            return _laid_out(model, seen, goal, tuple(pins[m] for m in seen.modules))
        try:
            found, stage_of = _cut(seen, goal, pins)
        except TooFewUnits as error:
            found, failure = None, error
        if found is not None and (best is None or found.objective < best[0] * _GAIN):
            best = found.objective, seen, stage_of
        if best is not None and best[0] <= goal.ideal * _GOOD:
            break
        dear = _to_open(seen, goal, whole, enough=found is not None)
        if not dear:
            break
        opened |= dear
    if best is None:
        if _shareable(failure):
            return _by_parameters(model, goal, pins)
        raise failure if failure is not None else PartitionError("no unit was called in the step")
    _, seen, stage_of = best
    return _laid_out(model, seen, goal, stage_of)


def _shareable(failure: Exception | None) -> bool:
    """Whether a trace failed only because glue updates buffers from data, which a dynamic program can do."""
    if not isinstance(failure, WriteIntoReplicated) or not failure.shareable:
        return False
    log.warning(
        "smpar: the step writes data into a buffer (%s); the model is partitioned by parameters", failure.values
    )
    return True


def expose(leaky: set[nn.Module], opened: set[nn.Module], glue_hooks: set[nn.Module], whole: set[nn.Module]) -> bool:
    """Bring code that hands tensors to the outside into glue; says whether there was some to bring.

    A unit that has such hooks inside is opened; one that has them itself gets them called in glue. One without hooks
    puts tensors into a list or dict of somebody else: it is opened, too.
    """
    fresh = [u for u in leaky if u not in opened and u not in glue_hooks]
    leaky.clear()
    found = False
    for unit in fresh:
        if any(m._forward_hooks or m._forward_pre_hooks for m in unit.modules() if m is not unit):
            if unit not in whole:
                opened.add(unit)
                found = True
        elif unit._forward_hooks or unit._forward_pre_hooks:
            glue_hooks.add(unit)
            found = True
        elif unit not in whole and may_open(unit):
            opened.add(unit)
            found = True
    return found


def close(error: Exception, opened: set[nn.Module], whole: set[nn.Module]) -> bool:
    """Keep the opened module whose glue failed whole from now on; False if no opened module is to blame."""
    module = blamed(error)
    if module is None or module not in opened:
        return False
    log.info("smpar: %s stays whole: %s", type(module).__name__, error)
    whole.add(module)
    opened.difference_update(module.modules())
    return True


def never_called(seen: Explored) -> set[nn.Module]:
    """Modules taken for units that glue reaches into instead of calling them."""
    called = set(seen.modules)
    return {
        m
        for unit in seen.layout.units
        if unit not in called
        for m in unit.modules()
        if m not in called and any(x in called for x in m.modules())
    }


def may_open(module: nn.Module) -> bool:
    """Whether a module's forward may run as glue, as far as its class tells."""
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, torch.jit.ScriptModule)):
        return False
    if not any(True for _ in module.children()) or hasattr(module, "parametrizations"):
        return False
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    return can_be_marked(module)


def _holds_pin(module: nn.Module, pins: dict[nn.Module, int]) -> bool:
    return any(m in pins for m in module.modules() if m is not module)


def _to_open(seen: Explored, goal: Goal, whole: set[nn.Module], enough: bool) -> set[nn.Module]:
    """The units that stand in the way of balance and have parts."""
    costs = _weights(seen.graph, goal)
    parts = {
        m: c for m, c in zip(seen.modules, costs, strict=True) if m not in whole and any(True for _ in m.children())
    }
    if not parts:
        return set()
    dear = {m for m, c in parts.items() if c > goal.fine}
    if not dear and not enough:
        dear = {max(parts, key=lambda m: parts[m])}
    return dear


def _weights(graph: ModuleGraph, goal: Goal) -> list[float]:
    """Each unit's part of the whole, in the mix of time and memory that the partition balances."""
    units = unit_costs(graph, goal)
    time = sum(u.time for u in units) or 1.0
    memory = sum(u.memory for u in units) or 1.0
    w = goal.memory_weight
    return [(1 - w) * u.time / time + w * u.memory / memory for u in units]


def unit_costs(graph: ModuleGraph, goal: Goal) -> list[UnitCost]:
    """Seconds per microbatch and bytes of each unit: its state, and the activations of the microbatches in flight.

    Each microbatch but the first adds its gradients to those before: two reads and a write per parameter, which neither
    counting nor measuring a single call sees, and which is most of what a large embedding takes.
    """
    adding = 3 * (1 - 1 / goal.microbatches) / (_STREAM * RATES[_device()].bytes)
    return [
        UnitCost(
            u.name or "(model)",
            u.seconds + adding * u.parameter_bytes,
            float(STATE * u.parameter_bytes + goal.in_flight * u.saved_bytes),
        )
        for u in graph.units
    ]


def _cut(seen: Explored, goal: Goal, pins: dict[nn.Module, int]) -> tuple[Partition, tuple[int, ...]]:
    pinned = {i: s for i, m in enumerate(seen.modules) if (s := pins.get(m)) is not None}
    free = [i for i in range(len(seen.modules)) if i not in pinned]
    place = {old: new for new, old in enumerate(free)}
    costs = unit_costs(seen.graph, goal)
    edges = [
        Edge(place[link.source], tuple(place[t] for t in link.targets if t in place), 2 * link_seconds(link.nbytes))
        for link in seen.graph.links
        if link.source in place and any(t in place for t in link.targets)
    ]
    ties = [
        Tie(tuple(place[u] for u in s.units if u in place), 2 * s.nbytes / _LINKS[_device()][0])
        for s in seen.graph.shared
        if sum(u in place for u in s.units) > 1
    ]
    units = [costs[i] for i in free]
    weight = goal.memory_weight
    found = best_cuts(units, edges, ties, goal.stages, goal.microbatches, weight, ranks=goal.ranks, evenness=EVENNESS)
    stage_of = [0] * len(seen.modules)
    for new, old in enumerate(free):
        stage_of[old] = sum(new >= cut for cut in found.cuts) - 1
    for old, stage in pinned.items():
        stage_of[old] = stage
    return found, tuple(stage_of)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def link_seconds(nbytes: int) -> float:
    """Seconds of a transfer between stages, one way."""
    rate, latency = _LINKS[_device()]
    return nbytes / rate + latency


def _laid_out(model: nn.Module, seen: Explored, goal: Goal, stage_of: tuple[int, ...]) -> Partitioned:
    units = dict(zip(seen.modules, stage_of, strict=True))
    last = 0
    bypassed = never_called(seen)
    for unit in seen.layout.units:  # units that the trace did not call go with those before them
        if unit not in bypassed:
            last = units.setdefault(unit, last)
    anchors = {key: stage_of[index] for key, index in seen.anchors.items()}
    return Partitioned(
        Layout.make(model, goal.ranks or tuple(range(goal.stages)), units, anchors, seen.layout.glue_hooks),
        seen.graph,
        stage_of,
    )


def _by_hand(
    fn: Callable[..., Any],
    call: Call,
    model: nn.Module,
    outcomes: Outcomes,
    goal: Goal,
    pins: dict[nn.Module, int],
) -> Partitioned:
    """The user's partition: the largest modules that lie on one stage are the units."""
    stage: dict[nn.Module, int] = {}

    def inherit(module: nn.Module, above: int) -> None:
        if module in stage:
            return
        stage[module] = pins.get(module, above)
        for child in module.children():
            inherit(child, stage[module])

    inherit(model, goal.default)
    opened = {m for m in model.modules() if len({stage[x] for x in m.modules()}) > 1}
    with torch.inference_mode(False), torch.enable_grad():
        try:
            seen = survey_exposed(fn, call, model, outcomes, opened)
        except (ValueNeeded, WriteIntoReplicated) as need:
            if isinstance(need, WriteIntoReplicated) and not need.shareable:
                raise
            units = maximal_units(model, opened)
            layout = Layout.make(
                model, goal.ranks or tuple(range(goal.stages)), {u: stage[u] for u in units}, {}, set()
            )
            return Partitioned(layout, bare_graph(units, layout), tuple(stage[u] for u in units))
    if goal.measure is not None:
        seen = dataclasses.replace(seen, graph=goal.measure(seen))
    stage_of = tuple(stage[m] for m in seen.modules)
    bypassed = never_called(seen)
    units_ = {u: stage[u] for u in (*seen.layout.units, *seen.modules) if u not in bypassed}
    anchors = {id(p): stage[m] for m in seen.layout.split if m in pins for p in m.parameters(recurse=False)}
    anchors = {key: stage_of[index] for key, index in seen.anchors.items()} | anchors
    empty = set(range(goal.stages)) - set(units_.values())
    if empty:
        log.warning("smpar: no module is on partition %s", ", ".join(map(str, sorted(empty))))
    return Partitioned(
        Layout.make(model, goal.ranks or tuple(range(goal.stages)), units_, anchors, seen.layout.glue_hooks),
        seen.graph,
        stage_of,
    )


def _by_parameters(model: nn.Module, goal: Goal, pins: dict[nn.Module, int]) -> Partitioned:
    """Without a trace: balance the bytes of parameters, modules in the order in which they were defined."""
    opened = {model} | {m for m in model.modules() if _holds_pin(m, pins) and m not in pins}
    total = parameter_bytes(model) or 1
    while True:
        units = maximal_units(model, opened)
        dear = {u for u in units if parameter_bytes(u) > total * goal.fine and may_open(u)}
        if not dear and len(units) < goal.stages:
            dear = {u for u in units if may_open(u)}
        if not dear:
            break
        opened |= dear
    layout = Layout.make(model, (0,), {u: 0 for u in units}, {}, set())
    graph = bare_graph(units, layout)
    goal = dataclasses.replace(goal, memory_weight=1.0)
    seen = Explored(graph, units, {}, layout)
    _, stage_of = _cut(seen, goal, pins)
    return _laid_out(model, seen, goal, stage_of)


def bare_graph(units: list[nn.Module], layout: Layout) -> ModuleGraph:
    """A graph that knows of parameters only."""
    return ModuleGraph(
        tuple(Unit(layout.names[m], type(m).__name__, 0, parameter_bytes(m), 0.0, 0.0, 0.0, 0, ()) for m in units),
        (),
        shared_parameters(units, layout.parameter_names),
    )
