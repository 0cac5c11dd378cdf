"""The pipeline of one model on one rank: partitions at the first step, plans each input signature, runs steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smpar.comm.channels import open_channels
from smpar.comm.messages import CommGroup, allgather, broadcast
from smpar.comm.world import World
from smpar.config import Config
from smpar.errors import ModelError, WriteIntoReplicated
from smpar.observe.progress import Progress
from smpar.observe.spans import Spans
from smpar.observe.transfers import StageChannels
from smpar.runtime.agreement import agree_programs, share_costs
from smpar.runtime.executor import Executor, Timetable
from smpar.runtime.measure import Measurer
from smpar.runtime.partitioning import Explored, Goal, Partitioned, make_layout
from smpar.runtime.planned import planned_layout
from smpar.runtime.planning import explore
from smpar.runtime.reducer import Reducer
from smpar.runtime.structure import Circumstances, Structure, thread_modes
from smpar.runtime.ties import Ties
from smpar.runtime.wires import NoChannels, buffer_for, pack, receive, send
from smpar.schedule import in_turn, make_schedule, placement
from smpar.stage.explorer import ValueNeeded
from smpar.stage.layout import Late, Layout
from smpar.stage.record import MicrobatchProgram
from smpar.stage.run import whole
from smpar.stage.special import patched
from smpar.stage.split import Batch
from smpar.stage.tensor import StageTensor
from smpar.stage.units import marked
from smpar.trace import tree
from smpar.trace.draws import mix
from smpar.trace.fake import FakeRunner
from smpar.trace.graph import ModuleGraph
from smpar.trace.outcome import meta_of
from smpar.trace.outcomes import Outcomes, module_key, states

log = logging.getLogger("smpar")

_REMEMBERED = 128  # programs and timetables kept; the least recently used one goes first


class _Recent(OrderedDict[Any, Any]):
    """A mapping that forgets what was not used for long."""

    def fetch(self, key: Any) -> Any:
        if key in self:
            self.move_to_end(key)
            return self[key]
        return None

    def keep(self, key: Any, value: Any) -> None:
        self[key] = value
        if len(self) > _REMEMBERED:
            self.popitem(last=False)


@functools.cache
def _say_once(warning: str) -> None:
    log.warning(warning)


@dataclasses.dataclass(frozen=True)
class _Dynamic:
    """In place of a program: this signature reads values, for the reason given."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Look:
    """What a step is about to do, before any rank is asked.

    Attributes:
        arguments: the step's.
        keys: the microbatches' input signatures; empty before the partition.
        programs: what is remembered of each; None where nothing is.
        known: whether all are remembered, or not to be known beforehand.
        circumstances: what besides its arguments decides what a step does, in words; equal on all ranks.
        digest: a checksum of these.
    """

    arguments: Any
    keys: tuple[Any, ...]
    programs: tuple[MicrobatchProgram | _Dynamic | None, ...]
    known: bool
    circumstances: Callable[[], dict[str, Any]]
    digest: int


class Pipeline:
    """One model over the stages of this rank's pipeline group.

    Attributes:
        rank, size: this rank's place among the pipeline's ranks, and their number.
        ranks: stage -> the rank that runs it.

    Args:
        model: the user's module, whole on every rank until it is partitioned.
        reducer: of its gradients.
    """

    def __init__(
        self, model: nn.Module, config: Config, world: World, spans: Spans, reducer: Reducer, measure: bool = False
    ) -> None:
        self.reducer = reducer
        self.model = model
        self.config = config
        self.world = world
        self.spans = spans
        self.measure = measure
        self.rank = world.axis_rank("pp")
        self.size = world.axis_size("pp")
        self.ranks = placement(config.pipeline, self.size, config.virtual_stages)
        self.outcomes = Outcomes(FakeRunner(world.device))
        self.partitioned: Partitioned | None = None
        self.timetable: Timetable | None = None
        self.in_order: tuple[MicrobatchProgram, ...] = ()  # what the last step's microbatches did without a timetable
        self.tracing = False
        self.after_partition: list[Callable[[], None]] = []
        self.after_hand_over: list[Callable[[list[Late]], None]] = []
        self._programs: _Recent = _Recent()
        self._signatures: _Recent = _Recent()  # of a step's arguments -> of its microbatches
        self._timetables: _Recent = _Recent()
        self._structure = Structure(model)
        self._circumstances = Circumstances(self._structure)
        self._modes: Any = None
        self._mode: int = -1  # the number of these modes
        self._numbers: _Recent = _Recent()  # modes -> their number
        self._count = itertools.count()
        self._shared: list[nn.Parameter] | None = None
        self._ties: Ties | None = None
        self._channels: StageChannels | None = None

    @property
    def layout(self) -> Layout:
        assert self.partitioned is not None
        return self.partitioned.layout

    @property
    def channels(self) -> StageChannels:
        if self._channels is None:
            opened = open_channels(self.world, self.world.device)
            self._channels = StageChannels(opened or NoChannels(), self.world, self.spans)
        return self._channels

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether this rank has the parameter's data."""
        layout = self.partitioned.layout if self.partitioned is not None else None
        return layout is None or id(parameter) not in layout.holders or self.rank in layout.holding(parameter)

    def holds_everywhere(self, parameter: torch.Tensor) -> bool:
        """Whether this rank has the parameter's data on every replica."""
        layout = self.layout
        return id(parameter) not in layout.holders or self.rank in layout.holding_everywhere(parameter)

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the one that answers for a parameter, in state dicts and norms."""
        return id(parameter) not in self.layout.holders or self.layout.owner(parameter) == self.rank

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones included."""
        return len(self.ranks)

    # -- a step ---------------------------------------------------------------------------------

    def look(self, fn: Callable[..., Any], batch: Batch, arguments: Any) -> Look:
        """What the step is about to do, as far as it can be told before any rank is asked.

        Args:
            arguments: those of the whole step, of which ``batch`` is the split.
        """
        keys = () if self.partitioned is None else self._keys(fn, batch, arguments)
        found: dict[int, Any] = {}
        for key in keys:
            if id(key) not in found:
                found[id(key)] = self._programs.fetch(key)
        programs = tuple(found[id(key)] for key in keys)
        known = bool(keys) and (not self.config.static_mode or None not in found.values())
        state = (self._mode, *thread_modes()) if keys else self._circumstances.state()
        return Look(arguments, keys, programs, known, self._circumstances.described, self._circumstances.digest(state))

    def run(
        self,
        fn: Callable[..., Any],
        batch: Batch,
        shares: Sequence[float],
        seed: int,
        look: Look,
        known: bool,
    ) -> list[Any]:
        """Run one step; returns the function's results by microbatch, whole on every rank.

        Args:
            seed: start of the chains of draws, equal on all ranks of a replica.
            look: what `look` gave for this step.
            known: whether every rank knows its programs, so that they need no comparison.
        """
        seeds = [mix(seed, self.world.axis_rank("rdp"), i) for i in range(len(batch.calls))]
        if self.partitioned is None:
            self._partition(fn, batch)
            self._structure.look()
        if not look.keys:
            look = self.look(fn, batch, look.arguments)
        programs = None if not self.config.static_mode else self._plan(fn, batch, look, seeds)
        if not known and self.config.static_mode:
            self._agree_programs(programs)
        if not self.layout.closed and self.world.axis_size("dp") > 1:
            self.layout.hold_too(allgather(self.layout.holders_by_name(), CommGroup.DP_GROUP))
        self._hand_over()
        if programs is not None:
            self._close()
        executor = Executor(self.layout, self.channels, self.rank, self.spans, self.reducer)
        results: list[Any] = []
        timetable, explored = None, None
        if programs is not None:
            timetable = self._timetable(tuple(programs))
        else:
            with marked(self.layout, inside=True), patched():
                results, explored = executor.forwards(fn, batch, shares, seeds, self.outcomes)
            programs = [run.finish() for run in explored]
            self._agree_programs(programs)
            self._hand_over()  # of what the forwards came to read: backward sums its gradients
            self.in_order = tuple(programs)
        with self.reducer.step(self._shared_parameters(), timetable, self._ties):
            with marked(self.layout, inside=explored is not None), patched():
                if timetable is not None:
                    results = executor.scheduled(fn, batch, shares, seeds, timetable)
                elif explored is not None:
                    executor.backwards(explored, programs)
                self.timetable = timetable
            with self.spans.phase("reduce gradients"):
                self.reducer.finish(any(p.shape.backward for p in programs))
        self._close()
        with self.spans.phase("share results"):
            whole = self._share(results)
        self.channels.finish()
        return whole

    def _partition(self, fn: Callable[..., Any], batch: Batch) -> None:
        if any(p.is_meta for p in self.model.parameters()):
            raise ModelError("the model has parameters on the meta device, which hold no values to train")
        c = self.config
        goal = Goal(
            len(self.ranks),
            c.microbatches,
            c.memory_weight,
            c.auto_partition,
            c.default_partition,
            c.skip_tracing,
            ranks=self.ranks,
        )
        with self._tracing("partitioning the model"), contextlib.ExitStack() as stack:
            if self.measure:
                measurer = stack.enter_context(Measurer(self.outcomes, self._first_tells))
                goal = dataclasses.replace(goal, measure=measurer.measure)
            if self.world.axis_size("tp") > 1:
                goal = dataclasses.replace(goal, measure=functools.partial(self._first_slice_tells, goal.measure))
            if c.plan is not None:
                own = planned_layout(fn, batch.calls[0], self.model, self.outcomes, goal, c.plan)
            else:
                own = make_layout(fn, batch.calls[0], self.model, self.outcomes, goal)
        self.partitioned = own
        if self.world.axis_size("dp") > 1:  # replicas may differ in their first batch, hence in what they would choose
            first = broadcast((own.layout.named(), own.graph, own.stage_of_unit), CommGroup.DP_GROUP, src=0)
            if self.world.axis_rank("dp"):
                self.partitioned = Partitioned(Layout.follow(self.model, self.ranks, first[0]), *first[1:])

    def _first_tells(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives on the replica's first rank, on all of its ranks; first stages do it together."""
        return broadcast(work() if self.rank == 0 else None, CommGroup.MP_GROUP, src=0)

    def _first_slice_tells(self, measure: Callable[[Explored], ModuleGraph] | None, seen: Explored) -> ModuleGraph:
        """The graph as it is on the first rank of the tensor-parallel group, whose slices may be larger.

        Ranks choose alike, and so trace alike: what is joined from their batches is joined in traces, too.
        """
        return broadcast(measure(seen) if measure is not None else seen.graph, CommGroup.TP_GROUP, src=0)

    def _plan(
        self, fn: Callable[..., Any], batch: Batch, look: Look, seeds: Sequence[int]
    ) -> list[MicrobatchProgram] | None:
        """The microbatches' programs; None if they cannot be known beforehand or do not fit one schedule."""
        programs: list[MicrobatchProgram] = []
        for call, key, program, seed in zip(batch.calls, look.keys, look.programs, seeds, strict=True):
            if program is None:
                program = self._programs.fetch(key) or self._explore(fn, call, key, seed)
            if isinstance(program, _Dynamic):
                return None
            programs.append(program)
        return programs if all(p.skeleton == programs[0].skeleton for p in programs) else None

    def _agree_programs(self, programs: list[MicrobatchProgram] | None) -> None:
        share_costs(self.world, programs)
        agree_programs(self.world, programs, self.layout)

    def _keys(self, fn: Callable[..., Any], batch: Batch, arguments: Any) -> tuple[Any, ...]:
        """The microbatches' input signatures."""
        if self._structure.look():
            self._shared = None
            self.layout.adapt(self.model)
        modes = self._current_modes()
        if modes != self._modes:
            number = self._numbers.fetch(modes)
            if number is None:
                number = next(self._count)
                self._numbers.keep(modes, number)
            self._modes, self._mode, self._shared = modes, number, None
            self.outcomes.forget_keys()
        base = (fn, self._mode, *thread_modes())
        whole: list[torch.Tensor] = []
        layout = tree.flatten(arguments, whole)
        # what may split itself tells too little of its parts
        told = not any(c.opaque and not isinstance(c.value, nn.Module) for c in tree.constants(layout))
        step = (*base, layout, tuple(meta_of(t) for t in whole)) if told else None
        found = self._signatures.fetch(step) if told else None
        if found is None:
            signatures: list[Any] = []
            for call in batch.calls:
                leaves: list[torch.Tensor] = []
                spec = tree.flatten(call, leaves)
                signature = (*base, spec, states(spec), tuple(meta_of(t) for t in leaves))
                # most microbatches are alike: they share one key, which is looked up once
                signatures.append(next((s for s in signatures if s == signature), signature))
            found = tuple(signatures)
            if told:
                self._signatures.keep(step, found)
        return found

    def _explore(self, fn: Callable[..., Any], call: Any, key: Any, seed: int) -> MicrobatchProgram | _Dynamic:
        try:
            with self._tracing("planning a step"):
                program, reads = explore(fn, call, self.model, self.layout, self.outcomes, seed)
        except (ValueNeeded, WriteIntoReplicated) as need:
            if isinstance(need, WriteIntoReplicated) and not need.shareable:
                raise
            reason = f"{need.values} writes into a buffer" if isinstance(need, WriteIntoReplicated) else str(need)
            log.warning(
                "smpar: the step needs a value while it runs (%s); its microbatches run in program order, "
                "which stalls the pipeline. Return the tensor from the step instead.", reason
            )  # fmt: skip
            dynamic = _Dynamic(reason)
            self._programs.keep(key, dynamic)
            return dynamic
        if not reads:  # else other values may make another program, so it is planned each time
            self._programs.keep(key, program)
        return program

    @contextlib.contextmanager
    def _tracing(self, what: str) -> Iterator[None]:
        """Around work under fake tensors: rank 0 shows how it goes on."""
        self.tracing = True
        try:
            with Progress(what, "module calls traced", shown=self.world.rank == 0) as progress:
                self.outcomes.on_run = progress.advance
                yield
        finally:
            self.outcomes.on_run = None
            self.tracing = False

    def _current_modes(self) -> Any:
        split = self.layout.split
        return *self._structure.modes(), tuple(module_key(m) for m in self._structure.modules if m in split)

    def _timetable(self, programs: tuple[MicrobatchProgram, ...]) -> Timetable:
        key = tuple(map(id, programs))
        found = self._timetables.fetch(key)
        if found is None or any(a is not b for a, b in zip(found.programs, programs, strict=True)):
            shape = programs[0].shape
            if any(p.shape.backward for p in programs):
                shape = dataclasses.replace(shape, backward=True)
            state = next((p.in_turn for p in programs if p.in_turn), "")
            if state:
                _say_once(
                    f"smpar: microbatches run one after the other, not as the schedule {self.config.pipeline!r} has "
                    f"them, since Python keeps a state between parts of a step: {state}"
                )
                schedule = in_turn(shape, len(programs))
            else:
                schedule = make_schedule(
                    self.config.pipeline, shape, len(programs), active=self.config.active_microbatches or None
                )
            found = Timetable(schedule, programs, self.rank)
            self._timetables.keep(key, found)
        return found

    # -- parameters -----------------------------------------------------------------------------

    def _close(self) -> None:
        """After the first plan: give up the parameters of other ranks."""
        layout = self.layout
        if layout.closed:
            return
        layout.closed = True
        layout.strides = {id(p): tuple(p.stride()) for p in self.model.parameters()}
        with torch.no_grad():
            for p in self.model.parameters():
                if not self.holds(p):
                    self.outcomes.runner.remember_layout(p)
                    filler = float("nan") if p.is_floating_point() or p.is_complex() else 0
                    p.data = torch.full((1,) * p.dim(), filler, dtype=p.dtype, device=p.device).expand(p.shape)
                    p.grad = None
        for hook in self.after_partition:
            hook()

    def _hand_over(self) -> None:
        """Give parameters to ranks that have come to need them, and let the optimizer know."""
        late, self.layout.late = self.layout.late, []
        if not late:
            return
        self._shared = None
        with torch.no_grad():
            for one in late:
                if not one.has_value:
                    self._give(one.parameter, one.owner, one.taker)
        for hook in self.after_hand_over:
            hook(late)

    def share_again(self) -> None:
        """Owners' values, which may have changed, go to the ranks that hold a parameter on this replica only."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                for taker in sorted(self.layout.joined.get(id(parameter), ())):
                    self._give(parameter, self.layout.owner(parameter), taker)
        self.channels.finish()

    def _give(self, parameter: nn.Parameter, owner: int, taker: int) -> None:
        meta = self.outcomes.runner.layout_of(parameter)
        if self.rank == owner:
            send(self.channels, taker, parameter, meta)
        elif self.rank == taker:
            parameter.data = receive(self.channels, owner, meta)

    def _shared_parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank whose gradients are not done with its own backwards."""
        if self._shared is None:
            mine = [p for p in self._structure.parameters if p.requires_grad and self.holds(p)]
            self._shared = [p for p in mine if not self.reducer.idle or len(self.layout.holding(p)) > 1]
            layout = self.layout
            ties = Ties(self._shared, layout.holding, layout.holding_everywhere, layout.owner, self.channels, self.rank)
            self._ties = ties if ties.parameters else None
            if not self.layout.closed:  # further stages may still come to hold one
                shared, self._shared = self._shared, None
                return shared
        return self._shared

    def prepare_reducer(self) -> None:
        """Lay out the buckets of the gradients, as a step does."""
        self.reducer.prepare(self._shared_parameters(), self._ties)

    # -- results --------------------------------------------------------------------------------

    def _share(self, results: list[Any]) -> list[Any]:
        """Give every rank the tensors that the step returned: each home sends its own, packed, to the others."""
        found: dict[int, list[StageTensor]] = {}
        for result in results:
            for leaf in tree.tensors(result):
                if type(leaf) is StageTensor:
                    found.setdefault(self.ranks[leaf.home], []).append(leaf)
        real: dict[int, torch.Tensor] = {}
        for home, tensors in sorted(found.items()):
            unique = list({id(t): t for t in tensors}.values())
            if home == self.rank:
                for t in unique:
                    real[id(t)] = t.parameter if t.parameter is not None else whole(t.value)
                flat = [pack(real[id(t)], meta_of(t)) for t in unique]
                if sum(f.numel() for f in flat):
                    joined = torch.cat(flat) if len(flat) > 1 else flat[0]
                    for rank in range(self.size):
                        if rank != home:
                            self.channels.send(rank, joined)
            else:
                buffers = [buffer_for(meta_of(t)) for t in unique]
                sizes = [memory.numel() for _, memory in buffers]
                joined = torch.empty(sum(sizes), dtype=torch.uint8, device=self.world.device)
                if joined.numel():
                    self.channels.post_recv(home, joined).wait()
                for t, (tensor, memory), part in zip(unique, buffers, joined.split(sizes), strict=True):
                    memory.copy_(part)
                    real[id(t)] = tensor
        return [tree.map_tensors(lambda t: real.get(id(t), t), result) for result in results]
