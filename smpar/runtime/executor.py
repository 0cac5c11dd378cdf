"""Executes one step's microbatches on this rank: by a schedule, or in program order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smpar.errors import GradientSurprise
from smpar.observe.spans import Spans
from smpar.runtime import backward
from smpar.runtime.coroutine import Forward
from smpar.runtime.reducer import Reducer
from smpar.runtime.wires import Channels, Inbox, LiveWire, ReplayWire, send
from smpar.schedule import Action, Kind, Message, Schedule, channel_order, lower, message_of, received_before
from smpar.stage.explorer import Explorer
from smpar.stage.layout import Layout
from smpar.stage.record import MicrobatchProgram
from smpar.stage.replay import Replay
from smpar.stage.run import Run
from smpar.stage.split import Batch
from smpar.trace.draws import SeedMode
from smpar.trace.outcomes import Outcomes

_AHEAD = 2  # messages of the action after the next are asked for before this one's are sent
_AS_IT_IS: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


@dataclasses.dataclass(eq=False)
class Timetable:
    """What this rank does in a step: its actions, the messages each waits for, and the order of all that come in."""

    schedule: Schedule
    programs: tuple[MicrobatchProgram, ...]
    rank: int

    @functools.cached_property
    def actions(self) -> tuple[Action, ...]:
        return self.schedule.ranks[self.rank]

    @functools.cached_property
    def needs(self) -> tuple[tuple[Message, ...], ...]:
        lowered = lower(self.schedule, [p.shape for p in self.programs]).ranks[self.rank]
        needs: list[tuple[Message, ...]] = []
        waiting: list[Message] = []
        for action in lowered:
            if action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
                waiting.append(message_of(action))
            elif not action.kind.is_message:
                needs.append(tuple(waiting))
                waiting = []
        return tuple(needs)

    @functools.cached_property
    def done(self) -> dict[Message, int]:
        return received_before(self.schedule, [p.shape for p in self.programs], self.rank)

    @functools.cached_property
    def last(self) -> tuple[bool, ...]:
        """For each action, whether it is this rank's last of its microbatch."""
        seen: set[int] = set()
        last: list[bool] = []
        for action in reversed(self.actions):
            last.append(action.microbatch not in seen)
            seen.add(action.microbatch)
        return tuple(reversed(last))

    @functools.cached_property
    def final(self) -> tuple[int | None, ...]:
        """For each action, the stage whose weights it gives their last gradients of its kind; None if it does not."""
        seen: set[tuple[Kind, int]] = set()
        final: list[int | None] = []
        for action in reversed(self.actions):
            key = action.kind, self.programs[action.microbatch].shape.segments[action.segment].stage
            final.append(key[1] if action.kind is not Kind.F and key not in seen else None)
            seen.add(key)
        return tuple(reversed(final))

    @functools.cached_property
    def incoming(self) -> dict[int, tuple[Message, ...]]:
        order = channel_order(self.schedule, [p.shape for p in self.programs])
        return {src: messages for (src, dst), messages in order.items() if dst == self.rank}


class Executor:
    """Runs microbatches of one pipeline rank.

    Args:
        layout: the partition.
        channels: transfers to the other ranks of the pipeline.
        rank: this rank's place in it.
        reducer: told when backward gives a stage's weights their last gradients.
    """

    def __init__(
        self,
        layout: Layout,
        channels: Channels,
        rank: int,
        spans: Spans,
        reducer: Reducer,
    ) -> None:
        self.reducer = reducer
        self.layout = layout
        self.channels = channels
        self.rank = rank
        self.spans = spans

    def scheduled(
        self,
        fn: Callable[..., Any],
        batch: Batch,
        shares: Sequence[float],
        seeds: Sequence[int],
        timetable: Timetable,
    ) -> list[Any]:
        """Run a step by its timetable; returns the step function's results by microbatch."""
        programs = timetable.programs
        inbox = Inbox(self.channels, timetable.incoming, programs, timetable.done)
        runs: list[Replay] = []
        forwards: list[Forward] = []
        for i, (args, kwargs) in enumerate(batch.calls):
            wire = ReplayWire(self.channels, self.rank, inbox, i)
            run = Replay(self.layout, programs[i], seeds[i], shares[i], wire)
            forward = Forward(functools.partial(run.call, fn, args, kwargs), programs[i].slices(self.rank))
            run.enter = forward.enter
            runs.append(run)
            forwards.append(forward)
        for messages in timetable.needs[:_AHEAD]:
            inbox.prepare(messages)
        try:
            for i, action in enumerate(timetable.actions):
                inbox.catch_up()
                for messages in timetable.needs[i + _AHEAD : i + _AHEAD + 1]:
                    inbox.prepare(messages)
                final = timetable.final[i]
                if final is not None:
                    self.reducer.before(final)
                with self.spans.action(action):
                    if action.kind is Kind.F:
                        self._forward(runs[action.microbatch], forwards[action.microbatch])
                    elif action.kind is Kind.W:
                        backward.of_weights(runs[action.microbatch].products.pop(action.segment))
                    else:
                        self._backward(runs[action.microbatch], programs[action.microbatch], action, inbox)
                if final is not None:
                    self.reducer.after(final)
                if timetable.last[i] and forwards[action.microbatch].done:
                    runs[action.microbatch].release()
            for run, forward in zip(runs, forwards, strict=True):
                if not forward.done:  # nothing of this microbatch runs here
                    self._forward(run, forward)
                run.end()
        finally:
            for run, forward in zip(runs, forwards, strict=True):
                if not run.released:
                    forward.drop()
                    run.release()
        return [forward.result for forward in forwards]

    def forwards(
        self,
        fn: Callable[..., Any],
        batch: Batch,
        shares: Sequence[float],
        seeds: Sequence[int],
        outcomes: Outcomes,
    ) -> tuple[list[Any], list[Explorer]]:
        """Begin a step whose program is not known beforehand: all forwards in order; returns what `backwards` needs.

        Ranks meet at every transfer in program order, so none can wait for one that waits for it.
        """
        results: list[Any] = []
        runs: list[Explorer] = []
        for i, (args, kwargs) in enumerate(batch.calls):
            run = Explorer(self.layout, outcomes, seeds[i], shares[i], LiveWire(self.channels, self.rank))
            with self.spans.action(Action(Kind.F, 0, i)):
                results.append(run.call(fn, args, kwargs))
            runs.append(run)
        return results, runs

    def backwards(self, runs: Sequence[Explorer], programs: Sequence[MicrobatchProgram]) -> None:
        """End such a step: all backwards in reverse.

        Args:
            programs: what the runs did, the same on all ranks.
        """
        ranks = tuple(
            tuple(
                Action(Kind.B, s.index, i)
                for i in reversed(range(len(runs)))
                if programs[i].shape.backward
                for s in reversed(programs[i].shape.of_rank(rank))
            )
            for rank in range(self.layout.size)
        )
        timetable = Timetable(Schedule("program order", ranks), tuple(programs), self.rank)
        inbox = Inbox(self.channels, timetable.incoming, programs, timetable.done)
        for action in timetable.actions:
            with self.spans.action(action):
                self._backward(runs[action.microbatch], programs[action.microbatch], action, inbox)
        for run in runs:
            run.release()

    def _forward(self, run: Replay, forward: Forward) -> None:
        forward.advance()
        if forward.done:
            run.ended(forward.result, run.program.shape.backward)

    def _backward(self, run: Run, program: MicrobatchProgram, action: Action, inbox: Inbox) -> None:
        """Backward of one segment: once through its graph, from its outputs to its leaves; perhaps without weights."""
        segment, microbatch = action.segment, action.microbatch
        ranks, flows = program.ranks, program.shape.flows
        grads: dict[int, torch.Tensor] = {}
        for index in program.leaving(segment):
            flow = flows[index]
            grad: torch.Tensor | None
            if ranks[flow.target] == self.rank:
                grad = run.leaves.pop((flow.tensor, flow.target)).grad
            else:
                grad = inbox.take(Message("gradient", index, microbatch))
            if grad is not None:
                before = grads.get(flow.tensor)
                grads[flow.tensor] = grad if before is None else before + grad
        ends = [(edge, grad) for tensor, grad in grads.items() if (edge := run.outputs.pop(tensor)) is not None]
        edges, starts = [edge for edge, _ in ends], [grad for _, grad in ends]
        for edge, start in run.roots.pop(segment, ()):
            edges.append(edge)
            starts.append(start)
        products: list[backward.Product] = []
        if edges:
            with SeedMode() if program.random else _AS_IT_IS:
                if action.kind is Kind.I:
                    products = backward.of_inputs(edges, starts)
                else:
                    backward.whole(edges, starts)
        for index in program.arriving(segment):
            flow = flows[index]
            key = (flow.tensor, segment)
            leaf = run.leaves.get(key)
            here = ranks[flow.producer] == self.rank
            if not flow.backward:
                if leaf is not None and leaf.grad is not None:
                    raise GradientSurprise(f"into segment {segment}, tensor {flow.tensor}")
                run.leaves.pop(key, None)
            elif not here:
                assert leaf is not None
                grad = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                inbox.catch_up()
                send(self.channels, ranks[flow.producer], grad, program.metas[flow.tensor])
                del run.leaves[key]
        if action.kind is Kind.I:
            run.products[segment] = products
