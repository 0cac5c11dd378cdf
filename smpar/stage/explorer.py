"""Working out a microbatch's program: by running its glue, with units and operations under fake tensors.

With a wire the microbatch is executed at the same time, for programs that cannot be known beforehand; without one it
is only planned.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smpar.errors import UnitMismatch, WriteIntoReplicated
from smpar.stage import special
from smpar.stage.layout import Layout
from smpar.stage.record import Backward, Event, MicrobatchProgram, Recorder, direct_meta
from smpar.stage.run import Run, Wire
from smpar.stage.tensor import StageTensor, shared
from smpar.stage.views import Together, family, kin
from smpar.trace import tree
from smpar.trace.hidden import Hidden
from smpar.trace.outcome import Meta, Out, Outcome, meta_of
from smpar.trace.outcomes import Outcomes


class ValueNeeded(BaseException):
    """Raised while planning when glue asks for data: the program cannot be known beforehand."""


class Explorer(Run):
    """Works out where each event runs and what it gives, and records the program."""

    def __init__(
        self, layout: Layout, outcomes: Outcomes, seed: int, share: float = 1.0, wire: Wire | None = None
    ) -> None:
        super().__init__(layout, seed, share, wire)
        self.outcomes = outcomes
        self.record = Recorder(layout.ranks)
        self.used: dict[int, set[int]] = {}
        self.reads = 0
        self.in_turn = ""
        self.changed: Callable[[], bool] = bool  # whether glue has changed the state of modules so far
        self.hidden = Hidden()  # what units leave in objects; while planning only
        self._last: dict[int, int] = {}  # rank -> its segment so far
        self._keepers: dict[nn.Module, int] = {}  # units with a state -> the segment of their last call

    def finish_state(self) -> None:
        """Look at what the microbatch leaves behind, while it is still there."""
        self._notice(len(self.record.segment_stage) > len(self._last))

    def finish(self) -> MicrobatchProgram:
        return self.record.finish(self.used, self.in_turn)

    def _notice(self, between: bool) -> None:
        """Where other microbatches may come in between, a state that glue leaves in modules would mix with theirs."""
        if between and not self.in_turn and self.changed():
            self.in_turn = "attributes, modes, lists, dicts or buffers of modules that are split over stages"

    def replicated(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func in special.READS:
            self.reads += 1
        return super().replicated(func, args, kwargs)

    def _unit_event(self, unit: nn.Module, args: Any, kwargs: Any, leaves: list[Any], spec: tree.Spec) -> Event:
        self.hidden.show(unit)
        with self.plain():
            outcome = self.outcomes.of_unit(unit, leaves, spec)
        if outcome.hidden and self.wire is None:
            self.hidden.note(unit, self.layout.name(unit), spec, outcome.hidden)
        if outcome.varies and self.wire is None:
            raise ValueNeeded(f"{self.layout.name(unit)} gives shapes that depend on data")
        stage = self.layout.stage_of(unit)
        self._gather_written(outcome, leaves, stage)
        return self._add(unit, stage, outcome, leaves)

    def _operation_event(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: tree.Spec) -> Event:
        outcome = self.outcomes.of_operation(func, leaves, spec)
        if outcome.varies and self.wire is None:
            raise ValueNeeded(f"{self.layout.name(func)} gives a shape that depends on data")
        operands = [t for t in leaves if type(t) is StageTensor]
        homes = [t.home for t in operands if t.parameter is None]
        stage = max(homes) if homes else max(t.home for t in operands)
        if type(func) is Together:
            stage = func.stage
        for index, _ in outcome.written:
            target = leaves[index]
            if type(target) is not StageTensor:
                continue
            if target.parameter is not None:
                raise WriteIntoReplicated(f"{self.layout.name(func)} writes into a parameter")
            if target.home != stage and shared(target):
                stage = target.home
        self._gather_written(outcome, leaves, stage)
        return self._add(func, stage, outcome, leaves)

    def _gather_written(self, outcome: Outcome, leaves: list[Any], stage: int) -> None:
        """Bring what shares memory with a tensor about to be written into the segment of the write."""
        for index, _ in outcome.written:
            target = leaves[index]
            if type(target) is not StageTensor or not shared(target):
                continue
            members = family(target)
            idents = [t.ident if type(t) is StageTensor and t.parameter is None else None for t in leaves]
            segment = self.record.settle(stage, idents)
            if any(m.segment != segment or self.record.has_left(m.ident) for m in members):
                self.gather(members, stage)

    def _add(self, target: Any, stage: int, outcome: Outcome, leaves: list[Any]) -> Event:
        for index, out in outcome.written:
            if type(leaves[index]) is StageTensor or self._made_here(leaves[index]):
                continue
            if self.wire is None or out.meta.requires_grad:
                error = WriteIntoReplicated(self.layout.name(target))
                error.shareable = not out.meta.requires_grad
                raise error
        inputs: list[int | None] = []
        parameters: list[int] = []
        for t in leaves:
            if type(t) is not StageTensor:
                inputs.append(None)
            elif t.parameter is not None:
                inputs.append(None)
                parameters.append(id(t.parameter))
                self._use(t.parameter, stage)
            else:
                inputs.append(t.ident)
        for parameter in outcome.borrowed:
            if id(parameter) in self.layout.holders:
                parameters.append(id(parameter))
                self._use(parameter, stage)
        record = self.record
        segment, flows = record.enter(stage, inputs)
        rank = self.ranks[stage]
        if self._last.setdefault(rank, segment) != segment:
            self._last[rank] = segment
            self._notice(True)
        if outcome.keeps and self._keepers.setdefault(target, segment) != segment:
            self.in_turn = self.in_turn or f"the state of {self.layout.name(target)}, which is called several times"
        record.seconds[segment] += outcome.cost.seconds
        record.saved[segment] += outcome.cost.saved
        outputs = tuple(
            record.new_ident(place.meta, segment) if isinstance(place, Out) else None for place in outcome.places
        )
        written = tuple(record.new_ident(out.meta, segment) for _, out in outcome.written)
        joined: list[tuple[int, int]] = []
        for ident, (index, out) in zip(written, outcome.written, strict=True):
            if out.meta.requires_grad and type(leaves[index]) is StageTensor:
                for other in kin(leaves[index]):
                    if not other.muted:
                        record.metas[other.ident] = record.metas[other.ident]._replace(requires_grad=True)
                        joined.append((other.ident, ident))
        direct = direct_meta(outcome, lambda s: s is tree.LEAF)
        event = Event(
            target, stage, segment, tuple(inputs), outputs, written, outcome, flows, tuple(parameters), direct,
            tuple(joined),
        )  # fmt: skip
        record.events.append(event)
        return event

    def _use(self, parameter: nn.Parameter, stage: int) -> None:
        self.used.setdefault(id(parameter), set()).add(stage)
        late = self.layout.hold(parameter, stage, running=self.wire is not None)
        if late is not None and self.wire is not None:  # it is needed at once
            meta = self.outcomes.runner.layout_of(parameter)
            if self.rank == late.owner:
                self.wire.send(late.taker, parameter.data, meta)
            elif self.rank == late.taker:
                parameter.data = self.wire.receive(late.owner, -1, meta)

    def _enter_segment(self, segment: int) -> None:
        pass

    def _backward_event(self, roots: tuple[int, ...]) -> None:
        self.record.events.append(Backward(roots))

    def _meta(self, ident: int) -> Meta:
        return self.record.metas[ident]

    def _flow(self, index: int) -> Any:
        return self.record.flows[index]

    def _overwritten(self, flow: int) -> bool:
        return True  # nobody knows yet

    def _flow_index(self, ident: int, segment: int) -> int:
        return self.record.flow_index(ident, segment)

    def _rank_of(self, segment: int) -> int:
        return self.ranks[self.record.segment_stage[segment]]

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.wire is None:
            raise ValueNeeded(self.layout.name(func))
        values = tree.map_tensors(self._everywhere, (args, kwargs))
        with self.plain():
            return func(*values[0], **values[1])

    def _everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stage tensor's data, sent by its home to every rank."""
        if type(tensor) is not StageTensor:
            return tensor
        assert self.wire is not None
        meta = meta_of(tensor)
        home = self.ranks[tensor.home]
        if home != self.rank:
            return self.wire.receive(home, -1, meta)
        value = tensor.value if tensor.parameter is None else tensor.parameter
        assert value is not None
        for rank in self._others():
            self.wire.send(rank, value, meta)
        return value.detach()

    def _spread(self, tensor: torch.Tensor, stage: int) -> None:
        assert self.wire is not None
        meta = meta_of(tensor)
        home = self.ranks[stage]
        if home != self.rank:
            tensor.data.copy_(self.wire.receive(home, -1, meta))  # batch norm keeps its statistics, unseen by autograd
            return
        sent = tensor.detach().clone()  # the next write must not overtake it
        for rank in self._others():
            self.wire.send(rank, sent, meta)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.layout.size) if rank != self.rank]

    def _confirmed(self, event: Event, result: Any) -> Outcome:
        """Agree on what depends on data: the home sends its result's shapes and numbers to every rank."""
        outcome = event.outcome
        home = self.ranks[event.stage]
        if home == self.rank:
            real: list[torch.Tensor] = []
            spec = tree.flatten(result, real)
            values = ["*" if v is tree.LEAF else [v] for v in tree.plain_constants(spec)]
            shapes, constants = self._tell(([tuple(t.shape) for t in real], values))
        else:
            shapes, constants = self._hear(home)
        if len(shapes) != len(outcome.places) or len(constants) != len(tree.constants(outcome.spec)):
            raise UnitMismatch(self.layout.name(event.target), f"{len(outcome.places)} tensors", f"{len(shapes)}")
        places: list[Out | int] = []
        for i, place in enumerate(outcome.places):
            if isinstance(place, Out) and shapes[i] != place.meta.shape:
                stride = torch.empty(shapes[i], device="meta").stride()
                place = place._replace(meta=place.meta._replace(shape=shapes[i], stride=stride))
                ident = event.outputs[i]
                assert ident is not None
                self.record.metas[ident] = place.meta
            places.append(place)
        spec = tree.with_constants(outcome.spec, iter([tree.LEAF if c == "*" else c[0] for c in constants]))
        return dataclasses.replace(outcome, spec=spec, places=tuple(places))

    def _tell(self, message: Any) -> Any:
        """Send a picklable message to all other ranks."""
        assert self.wire is not None
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        for rank in self._others():
            self.wire.send(rank, size, meta_of(size))
            self.wire.send(rank, data, meta_of(data))
        return message

    def _hear(self, rank: int) -> Any:
        assert self.wire is not None
        size = self.wire.receive(rank, -1, meta_of(torch.tensor([0])))
        data = self.wire.receive(rank, -1, meta_of(torch.empty(int(size), dtype=torch.uint8)))
        return pickle.loads(data.numpy().tobytes())
