"""Following a microbatch's recorded program: every event is looked up, none is worked out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from smpar.errors import LeftProgram
from smpar.stage import special
from smpar.stage.layout import Layout
from smpar.stage.record import Backward, Event, MicrobatchProgram
from smpar.stage.run import ONE, Run, Wire
from smpar.stage.tensor import METADATA, StageTensor
from smpar.stage.views import Together, family
from smpar.trace import tree
from smpar.trace.draws import advance
from smpar.trace.outcome import Meta, Outcome


def _nowhere(segment: int) -> None:
    """Where no schedule is in charge, segments just begin."""


_BARE = frozenset(
    {StageTensor, torch.Tensor, nn.Parameter, int, float, str, bool, type(None), torch.dtype, torch.device}
)


class _Bare(NamedTuple):
    """Arguments without containers."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Replay(Run):
    """Follows a recorded program.

    ``enter`` is called where a segment of this rank begins, and returns when the schedule lets it run.
    """

    def __init__(
        self,
        layout: Layout,
        program: MicrobatchProgram,
        seed: int,
        share: float,
        wire: Wire,
    ) -> None:
        super().__init__(layout, seed, share, wire)
        self.program = program
        self._quiet = program.quiet
        self._cursor = 0
        self._segment: int | None = None
        self.enter: Callable[[int], None] = _nowhere
        self.released = False

    def call_unit(self, unit: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        skipped = self._skip(unit)
        return super().call_unit(unit, call, args, kwargs) if skipped is None else skipped

    def operation(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func not in METADATA and func not in special.HANDLERS:
            skipped = self._skip(func)
            if skipped is not None:
                return skipped
        return super().operation(func, args, kwargs)

    def _apart(self, args: Any, kwargs: Any) -> tuple[list[Any], tree.Spec]:
        if len(args) == 1 and not kwargs and type(args[0]) is StageTensor:
            return [args[0]], ONE
        # a program needs no hashable spec: where no argument is a container, the arguments are their own
        if all(type(a) in _BARE for a in args) and all(type(v) in _BARE for v in kwargs.values()):
            leaves = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            return leaves, (ONE if len(args) == 1 and not kwargs and leaves else _Bare(args, kwargs))
        return super()._apart(args, kwargs)

    def _together(self, spec: tree.Spec, leaves: list[Any]) -> Any:
        if type(spec) is not _Bare:
            return super()._together(spec, leaves)
        rest = iter(leaves)
        args = tuple(next(rest) if isinstance(a, torch.Tensor) else a for a in spec.args)
        return args, {k: next(rest) if isinstance(v, torch.Tensor) else v for k, v in spec.kwargs.items()}

    def _skip(self, target: Any) -> StageTensor | None:
        """The result of an event that is due, runs elsewhere, and asks nothing of this rank."""
        at = self._cursor
        if at >= len(self._quiet) or not self._quiet[at]:
            return None
        event: Event = self.program.events[at]  # type: ignore[assignment]
        if self.ranks[event.stage] == self.rank or (event.target is not target and event.target != target):
            return None
        if target in self.layout.hooks:
            return None
        self._cursor = at + 1
        if event.outcome.draws:
            self.seed = advance(self.seed, event.outcome.draws)
        assert event.direct is not None
        made = StageTensor(event.direct, event.stage, event.outputs[0] or 0, event.segment, self.number)
        return made

    def _next(self, target: Any) -> Event:
        events = self.program.events
        event = events[self._cursor] if self._cursor < len(events) else None
        if not isinstance(event, Event) or (event.target is not target and event.target != target):
            self._left(self.layout.name(target), event)
        self._cursor += 1
        return event  # type: ignore[return-value]

    def _left(self, ran: str, event: Event | Backward | None) -> None:
        due = (
            "the end of the step function"
            if event is None
            else ("model.backward" if isinstance(event, Backward) else self.layout.name(event.target))
        )
        raise LeftProgram(f"the step function called {ran} where its trace has {due} (event {self._cursor})")

    def _unit_event(self, unit: nn.Module, args: Any, kwargs: Any, leaves: list[Any], spec: tree.Spec) -> Event:
        self._gather_due(leaves)
        event = self._next(unit)
        self._same_inputs(event, leaves)
        return event

    def _operation_event(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: tree.Spec) -> Event:
        if type(func) is not Together:
            self._gather_due(leaves)
        event = self._next(func)
        self._same_inputs(event, leaves)
        return event

    def _gather_due(self, leaves: list[Any]) -> None:
        """What the trace brought together at this point, before a write."""
        events = self.program.events
        while self._cursor < len(events):
            event = events[self._cursor]
            if not isinstance(event, Event) or type(event.target) is not Together:
                return
            near = {t.ident: t for leaf in leaves if type(leaf) is StageTensor for t in family(leaf)}
            if not all(i in near for i in event.inputs):
                self._left("a write in place", event)
            self.gather([near[i] for i in event.inputs if i is not None], event.stage)

    def _same_inputs(self, event: Event, leaves: list[Any]) -> None:
        inputs = event.inputs
        if len(leaves) == len(inputs):
            for leaf, ident in zip(leaves, inputs, strict=True):
                if type(leaf) is StageTensor and leaf.parameter is None:
                    if leaf.ident != ident:
                        break
                elif ident is not None:
                    break
            else:
                return
        name = self.layout.name(event.target)
        raise LeftProgram(f"{name} got other tensors than in its trace (event {self._cursor - 1})")

    def _enter_segment(self, segment: int) -> None:
        if segment != self._segment:
            self._segment = segment
            self.enter(segment)

    def _backward_event(self, roots: tuple[int, ...]) -> None:
        events = self.program.events
        event = events[self._cursor] if self._cursor < len(events) else None
        if not isinstance(event, Backward) or event.roots != roots:
            self._left("model.backward", event)
        self._cursor += 1

    def release(self) -> None:
        super().release()
        self.released = True
        self.enter = _nowhere  # the coroutine it belonged to refers to this run

    def end(self) -> None:
        """Check that the run went through its whole program."""
        if self._cursor != len(self.program.events):
            self._left("the end of the step function", self.program.events[self._cursor])

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise LeftProgram(f"{self.layout.name(func)} reads a stage tensor's value, which its trace did not")

    def _meta(self, ident: int) -> Meta:
        return self.program.metas[ident]

    def _flow(self, index: int) -> Any:
        return self.program.shape.flows[index]

    def _overwritten(self, flow: int) -> bool:
        return flow in self.program.overwritten

    def _flow_index(self, ident: int, segment: int) -> int:
        return self.program.arrivals[ident, self.rank]

    def _rank_of(self, segment: int) -> int:
        return self.program.ranks[segment]

    def _confirmed(self, event: Event, result: Any) -> Outcome:
        return event.outcome
