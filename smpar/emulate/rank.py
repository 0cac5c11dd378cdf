"""One process of an emulation: a rank's actions, its messages, its reductions.

The actions and their order, the messages and the channels are those of a training step: `Timetable`, `Inbox` and
`GlooChannels` of the runtime. Only kernels and wires are imitated. A kernel sleeps. A message is sent at once and holds
the moment at which it may be used, which its sender works out, as it alone knows when its channel is free; the receiver
sleeps until then. So a wire needs no thread on either side, and what gloo takes is part of the wire's time, not added.
"""

from __future__ import annotations

import torch

from smpar.comm.channels import open_channels
from smpar.comm.world import World
from smpar.emulate.clock import now, reach
from smpar.emulate.emulation import Emulation
from smpar.emulate.reductions import Reductions, latest
from smpar.observe.spans import Spans
from smpar.observe.transfers import StageChannels
from smpar.runtime.executor import Timetable
from smpar.runtime.wires import Inbox, NoChannels, send
from smpar.schedule import Action, Kind, Task, Timed, lower
from smpar.stage.record import MicrobatchProgram
from smpar.trace.outcome import Meta

MARGIN = 0.02  # s from the ranks' meeting to the start of a step: the last one has heard of it by then
_AHEAD = 2  # as the executor: messages of the action after the next are asked for before this one's are sent
_MOMENT = Meta((1,), (1,), torch.float64, torch.device("cpu"), False)


class Rank:
    """This process's part of an emulation; all processes of the world make theirs together.

    Args:
        emulation: equal on all ranks.
        world: its pipeline groups are the replicas.
    """

    def __init__(self, emulation: Emulation, world: World) -> None:
        self._emulation, self._world = emulation, world
        self._replica, self._rank = world.axis_rank("rdp"), world.axis_rank("pp")
        self._channels = StageChannels(open_channels(world, world.device) or NoChannels(), world, Spans(False))
        self._pipeline = emulation.pipelines[self._replica]
        self._program = self._pipeline.program
        metas = {flow.tensor: _MOMENT for flow in self._program.flows}
        microbatch = MicrobatchProgram((), self._program, metas, {})
        programs = (microbatch,) * emulation.microbatches
        self._timetable = Timetable(emulation.orders[self._replica], programs, self._rank)
        self._sends = self._sends_after()
        self._reductions = Reductions(emulation, world)
        backwards = [(a.segment, i) for i, a in enumerate(self._timetable.actions) if a.kind is not Kind.F]
        self._last = {position: stage for stage, position in dict(backwards).items()}

    def step(self) -> tuple[float, list[Timed]]:
        """Execute a step.

        Returns:
            When this rank is done and its actions, in seconds from the step's start.
        """
        begin = self._meet()
        free = reach(begin)
        reductions = self._reductions.begin(begin)
        timetable, metas = self._timetable, self._timetable.programs[0].metas
        inbox = Inbox(self._channels, timetable.incoming, timetable.programs, timetable.done)
        wires: dict[int, float] = {}  # peer -> when the channel to it is free
        timeline, host = [], self._pipeline.host
        for messages in timetable.needs[:_AHEAD]:
            inbox.prepare(messages)
        for i, action in enumerate(timetable.actions):
            inbox.catch_up()
            for messages in timetable.needs[i + _AHEAD : i + _AHEAD + 1]:
                inbox.prepare(messages)
            arrivals = [float(inbox.take(message)) for message in timetable.needs[i]]
            start = reach(max(free, *arrivals) + host * len(arrivals)) if arrivals else free
            free = reach(start + self._program.cost(Task(action.kind, action.segment)))
            timeline.append(Timed(self._rank, action, start - begin, free - begin))
            if i in self._last:
                reductions.ready(self._last[i], free)
            for message in self._sends[i]:
                free = reach(free + host) if host else free
                link = self._emulation.link(self._replica, message.flow, message.kind)
                wires[message.peer] = max(free, wires.get(message.peer, free)) + link.wire
                arrival = torch.tensor([wires[message.peer] + link.latency], dtype=torch.float64)
                send(self._channels, message.peer, arrival, metas[message.flow])
        free = max(free, reductions.finish())
        reach(free + (self._emulation.optimizer[self._rank] if self._emulation.optimizer else 0.0))
        end = now() - begin
        self._channels.finish()
        return end, timeline

    def _meet(self) -> float:
        """The moment at which all ranks start, a little later than the last one came here."""
        if self._world.size == 1:
            return now() + MARGIN
        return latest(now(), self._world.process_group("world")) + MARGIN

    def _sends_after(self) -> tuple[tuple[Action, ...], ...]:
        """For each action, the sends that follow it."""
        sends: list[list[Action]] = []
        for action in lower(self._timetable.schedule, [self._program] * self._emulation.microbatches).ranks[self._rank]:
            if action.kind.is_send:
                sends[-1].append(action)
            elif not action.kind.is_message:
                sends.append([])
        return tuple(tuple(after) for after in sends)
