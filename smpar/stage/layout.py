"""Which module runs where: units and their stages, split modules, and who holds which parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Late:
    """A parameter that glue first reads on rank ``taker`` after the ranks gave up what they do not hold."""

    parameter: nn.Parameter
    owner: int
    taker: int
    has_value: bool


@dataclasses.dataclass(frozen=True)
class NamedLayout:
    """A partition in words, which another process with the same model can follow.

    Attributes:
        units: name of each unit, and its stage.
        parameters: name of each parameter, and the first stage that holds it.
        glue_hooks: names of the units whose forward hooks run in glue.
    """

    units: tuple[tuple[str, int], ...]
    parameters: tuple[tuple[str, int], ...]
    glue_hooks: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class Layout:
    """The partition of one model.

    ``ranks`` gives the rank of the pipeline that runs a stage; a rank may have several. ``units`` run whole on their
    stage; ``split`` are their parents, whose forward is glue. ``parameter_home`` gives the first stage that holds a
    parameter, ``holders`` all of them.
    """

    ranks: tuple[int, ...]
    units: dict[nn.Module, int]
    split: set[nn.Module]
    names: dict[nn.Module, str]
    parameter_home: dict[int, int]
    holders: dict[int, set[int]]
    parameter_names: dict[int, str]
    attributes: dict[nn.Module, set[str]]  # tensors that units leave in their modules, for glue to read
    glue_hooks: set[nn.Module]  # units whose forward hooks run in glue
    hooks: dict[nn.Module, tuple[Any, Any]] = dataclasses.field(default_factory=dict)  # theirs, while a step runs
    late: list[Late] = dataclasses.field(default_factory=list)  # to be handed over
    closed: bool = False  # parameters live only with their holders now
    joined: dict[int, set[int]] = dataclasses.field(default_factory=dict)  # parameter -> see holding_everywhere
    strides: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # of parameters, before that

    @classmethod
    def make(
        cls,
        model: nn.Module,
        ranks: tuple[int, ...],
        units: dict[nn.Module, int],
        anchors: dict[int, int],
        glue_hooks: set[nn.Module],
    ) -> Layout:
        """Lay out ``model``.

        Args:
            ranks: stage -> rank of the pipeline.
            units: stage of every unit.
            anchors: id of a parameter of a split module -> its stage.
            glue_hooks: units whose forward hooks are to run in glue (a split module's do so anyway).
        """
        names = {m: n for n, m in model.named_modules()}
        inside: set[nn.Module] = {m for u in units for m in u.modules()}
        split = {m for m in names if m not in inside}
        home: dict[int, int] = {}
        holders: dict[int, set[int]] = {}
        for unit, stage in units.items():
            for p in unit.parameters():
                holders.setdefault(id(p), set()).add(stage)
        for m in split:
            for p in m._parameters.values():
                if p is not None and id(p) not in holders:
                    holders[id(p)] = {anchors.get(id(p), 0)}
        for key, stages_ in holders.items():
            home[key] = min(stages_)
        parameter_names = {id(p): n for n, p in model.named_parameters(remove_duplicate=True)}
        return cls(ranks, dict(units), split, names, home, holders, parameter_names, {}, glue_hooks & units.keys())

    def named(self) -> NamedLayout:
        """This partition in words."""
        return NamedLayout(
            tuple((self.names[m], stage) for m, stage in self.units.items() if m in self.names),
            tuple((self.parameter_names[key], stage) for key, stage in self.parameter_home.items()),
            tuple(self.names[m] for m in self.names if m in self.glue_hooks),
        )

    @classmethod
    def follow(cls, model: nn.Module, ranks: tuple[int, ...], named: NamedLayout) -> Layout:
        """Lay out ``model`` as another process did."""
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        units = {modules[name]: stage for name, stage in named.units}
        anchors = {id(parameters[name]): stage for name, stage in named.parameters}
        return cls.make(model, ranks, units, anchors, {modules[name] for name in named.glue_hooks})

    def holders_by_name(self) -> dict[str, list[int]]:
        """The stages that hold each parameter."""
        return {self.parameter_names[key]: sorted(stages) for key, stages in self.holders.items()}

    def hold_too(self, others: Iterable[Mapping[str, Collection[int]]]) -> None:
        """Before parameters are given up: let stages hold what they hold in others' layouts, who plan other steps."""
        keys = {name: key for key, name in self.parameter_names.items()}
        for theirs in others:
            for name, stages in theirs.items():
                self.holders[keys[name]].update(stages)
        self.parameter_home.update({key: min(stages) for key, stages in self.holders.items()})

    def hold(self, parameter: nn.Parameter, stage: int, running: bool = False) -> Late | None:
        """Let a stage hold a parameter, too.

        Args:
            running: a microbatch runs, and reads it at once.

        Returns:
            what is to be handed over, if the stage's rank has not got it. It is noted in ``late``.
        """
        key, taker, late = id(parameter), self.ranks[stage], None
        if stage in self.holders[key]:
            return None
        if not self.closed and not running:
            self.holders[key].add(stage)
            self.parameter_home[key] = min(self.holders[key])
            return None
        if taker not in self.holding(parameter):
            self.joined.setdefault(key, set()).add(taker)  # other replicas may do without it there
            if self.closed:
                late = Late(parameter, self.owner(parameter), taker, has_value=running)
                self.late.append(late)
        self.holders[key].add(stage)
        return late

    def adapt(self, model: nn.Module) -> None:
        """The user has changed the model since it was partitioned: find out what runs where, and who holds what now.

        A module in a unit's place runs where that did; other new ones run where those before them do.
        """
        places = {name: self.units[m] for m, name in self.names.items() if m in self.units}
        self.names = {m: n for n, m in model.named_modules()}
        self.parameter_names = {id(p): n for n, p in model.named_parameters()}
        last = 0
        for unit in maximal_units(model, self.split):
            if unit not in self.units:
                self.units[unit] = places.get(self.names[unit], last)
            last = self.units[unit]
        present = {u: stage for u, stage in self.units.items() if u in self.names}
        inside = {m for u in present for m in u.modules()}
        self.split = {m for m in self.names if m not in inside}
        used = [(p, stage) for u, stage in present.items() for p in u.parameters()]
        used += [
            (p, 0) for m in self.split for p in m._parameters.values() if p is not None and id(p) not in self.holders
        ]
        for p, stage in used:
            if id(p) not in self.holders:
                self.holders[id(p)], self.parameter_home[id(p)] = {stage}, stage
                if 0 in p.stride():  # made of one that this rank has given up
                    p.data = p.data.contiguous()
                self.strides[id(p)] = tuple(p.stride())
            self.hold(p, stage)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return max(self.ranks) + 1

    def holding(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """The ranks that hold a parameter of the model, ascending."""
        return tuple(sorted({self.ranks[stage] for stage in self.holders[id(parameter)]}))

    def holding_everywhere(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Those of them that hold it on every replica: others have come to since the replicas compared layouts."""
        return tuple(rank for rank in self.holding(parameter) if rank not in self.joined.get(id(parameter), ()))

    def owner(self, parameter: torch.Tensor) -> int:
        """The rank that answers for a parameter of the model."""
        return self.ranks[self.parameter_home[id(parameter)]]

    def stage_of(self, module: nn.Module) -> int:
        """The stage of a unit. A module inside one that glue calls directly becomes a unit of the same stage."""
        stage = self.units.get(module)
        if stage is None:
            stage = next(s for u, s in self.units.items() if any(m is module for m in u.modules()))
            self.units[module] = stage
        return stage

    def name(self, target: object) -> str:
        """A unit's name in the model, or a glue operation's name, for messages."""
        if isinstance(target, nn.Module):
            return f"{self.names.get(target, '?') or '(model)'} ({type(target).__name__})"
        name = getattr(target, "__qualname__", None) or getattr(target, "__name__", str(target))
        return str(name).removeprefix("_VariableFunctionsClass.").removeprefix("TensorBase.")


def maximal_units(model: nn.Module, opened: set[nn.Module]) -> list[nn.Module]:
    """The outermost modules that are not opened, in the order of the module tree.

    Containers that are never called (``ModuleList``, ``ModuleDict``) always count as opened.
    """
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if module in opened or type(module) in (nn.ModuleList, nn.ModuleDict):
            for child in module.children():
                visit(child)
        else:
            found.append(module)

    visit(model)
    nested = {m for u in found for m in u.modules() if m is not u}
    return [u for u in found if u not in nested]
