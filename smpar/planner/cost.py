"""What a strategy costs on a cluster: seconds of a step, and bytes on each device.

::

    rank 0 |0123₀₀₁₁₂₂₃₃|═══reduce═══|opt|       one pipeline is simulated per kind of replica; each stage's gradients
    rank 1 |·01₀₀2₁₁3..  |reduce|opt|            are reduced from its own last backward on; the step ends with the last

Each stage runs at the speed of the slowest device that holds it. A message takes the latency and the bytes over the
link's rate; a network card carries all messages and rings of its node at once, so each gets its share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from smpar.planner.cluster import Cluster
from smpar.planner.flow import Flow, Rows
from smpar.planner.hardware import SMPAR, Runtime
from smpar.planner.network import Network, Replica, Wiring
from smpar.planner.parts import Memory, Parts
from smpar.planner.pipeline import Pipeline, Timeline, simulate_named
from smpar.planner.profile import Profile
from smpar.planner.strategy import Strategy

CPU = "cpu"
"""The device type whose kernels run on the host itself."""


@dataclass(frozen=True)
class Stage:
    """What one (virtual) stage is predicted to take; of the slowest replica.

    Attributes:
        layers: its first layer, and the one after its last.
        forward, backward: seconds per microbatch, recomputation included.
        receives: seconds per microbatch of what comes in from the stage before.
        reduction: seconds per step.
        memory: bytes of its parameters' state, and of what it keeps of microbatches.
    """

    layers: tuple[int, int]
    forward: float
    backward: float
    receives: float
    reduction: float
    memory: float


@dataclass(frozen=True)
class Prediction:
    """A strategy's cost.

    Attributes:
        seconds: of a step.
        pipeline: seconds up to the last backward.
        reduction: seconds from there to the end of the last reduction.
        optimizer: seconds from there to the end: the slowest rank's step, and what each step costs besides.
        bubble: share of the ranks' time, up to the last backward, in which they compute nothing.
        memory: bytes on a device of each pipeline rank, the worst replica's.
        limits: bytes that those devices have.
        stages: see `Stage`.
    """

    seconds: float
    pipeline: float
    reduction: float
    optimizer: float
    bubble: float
    memory: tuple[float, ...]
    limits: tuple[float, ...]
    stages: tuple[Stage, ...]

    @property
    def fits(self) -> bool:
        """Whether each device can hold what it has to."""
        return all(need <= limit for need, limit in zip(self.memory, self.limits, strict=True))

    @property
    def excess(self) -> float:
        """Bytes that the fullest device lacks; negative: has left."""
        return max(need - limit for need, limit in zip(self.memory, self.limits, strict=True))


class CostModel:
    """Predicts strategies of one model on one cluster.

    Args:
        profile: the model.
        cluster: the devices.
        runtime: what will train it.
    """

    def __init__(self, profile: Profile, cluster: Cluster, runtime: Runtime = SMPAR) -> None:
        self.profile, self.cluster, self.runtime = profile, cluster, runtime
        self._flows: dict[int, Flow] = {}
        self._wiring = Wiring(cluster, runtime)
        self._rows: dict[tuple[str, int, int], Rows] = {}
        self._networks: dict[tuple[int, int, int, tuple[int, ...]], Network] = {}
        self._ties: dict[tuple[int, int, int, tuple[int, ...], tuple[int, ...]], float] = {}

    def flow(self, tp: int) -> Flow:
        """What layers keep, and what flows between them, at that tensor-parallel degree."""
        found = self._flows.get(tp)
        if found is None:
            found = self._flows[tp] = Flow(self.profile, tp)
        return found

    def rows(self, device: str, tp: int, microbatch: int) -> Rows:
        """Times of the layers there, with the collectives of a tensor-parallel group inside a node."""
        key = device, tp, microbatch
        found = self._rows.get(key)
        if found is None:
            seconds, ring = self.profile.seconds(device, tp, microbatch), self._wiring.near(device, tp)
            found = self._rows[key] = Rows.make(seconds, self.profile.at(tp), microbatch, ring)
        return found

    def network(self, tp: int, pp: int, dp: int, devices: tuple[int, ...]) -> Network:
        """Ways between the devices of placed degrees."""
        key = tp, pp, dp, devices
        found = self._networks.get(key)
        if found is None:
            names = {self.cluster.type_of(device).name for device in devices}
            whole = {name: self._whole(name, tp) for name in names}
            found = self._networks[key] = self._wiring.network(tp, pp, dp, devices, whole)
        return found

    def tie(self, strategy: Strategy, ranks: tuple[int, ...]) -> float:
        """Seconds per byte of a sum over these pipeline ranks, of all replicas at once."""
        key = strategy.tp, strategy.pp, strategy.dp, strategy.devices, ranks
        found = self._ties.get(key)
        if found is None:
            width = strategy.tp * strategy.dp
            groups = [[strategy.devices[rank * width + i] for rank in ranks] for i in range(width)]
            (found,) = self._wiring.ring_seconds([groups])
            self._ties[key] = found
        return found

    def slowest(self, names: Sequence[str], tp: int) -> str:
        """Of device types, the one on which the whole model takes longest."""
        return names[0] if len(names) == 1 else max(names, key=lambda name: self._whole(name, tp))

    def _whole(self, name: str, tp: int) -> float:
        return self.rows(name, tp, 1).whole

    def layer_seconds(self, device: str, tp: int, microbatch: int, again: bool) -> list[float]:
        """Forward and backward of each layer; with the forward twice if it is to run `again`."""
        rows = self.rows(device, tp, microbatch)
        both = np.diff(rows.forward) * (2 if again else 1) + np.diff(rows.backward)
        return [float(seconds) for seconds in both]

    def predict(self, strategy: Strategy) -> Prediction:
        """The strategy's cost.

        Raises:
            ProfileError: the profile has no times for a device type at that tensor-parallel degree.
        """
        return _Case(self, strategy).prediction()

    def busy(self, strategy: Strategy) -> list[float]:
        """Seconds of a step that each pipeline rank computes, in the slowest replica."""
        case = _Case(self, strategy)
        return [max(line.busy[rank] for line in case.lines) for rank in range(strategy.pp)]

    def at_least(self, strategy: Strategy, stages: Sequence[float], ranks: Sequence[float]) -> float:
        """Seconds that a step takes at least, from those per microbatch of stages, and of ranks, alone.

        A rank computes all microbatches, then its gradients are reduced (with several stages, all but the last one's
        perhaps before) and its parameters stepped: ``end = computing + per_parameter * held``. Whoever holds how many
        of the parameters, the mean of the ends, weighted by ``1 / per_parameter``, does not change. Of whole backwards,
        the first microbatch crosses all stages before a stage, and the last comes back over them, if one replica has
        these stages.
        """
        net, runtime, m = (
            self.network(strategy.tp, strategy.pp, strategy.dp, strategy.devices),
            self.runtime,
            strategy.microbatches,
        )
        most = max(ranks) * m
        if strategy.schedule in ("1f1b", "gpipe", "simple", "interleaved") and self._in_one(net, strategy.tp):
            before = 0.0
            for seconds in stages:
                before += seconds
                most = max(most, before + (m - 1) * seconds)
        shards = strategy.dp if strategy.shard_optimizer else 1
        held = self.flow(strategy.tp).parameters_of(0, self.profile.size)
        reduced = runtime.reduced if strategy.virtual_stages == 1 else 0.0
        each = [
            reduced * per_byte + runtime.step / shards / (bandwidth * runtime.memory)
            for per_byte, bandwidth in zip(net.reduction, net.bandwidths, strict=True)
        ]
        if min(each) > 0.0:
            ends = held + sum(m * seconds / per for seconds, per in zip(ranks, each, strict=True))
            most = max(most, ends / sum(1.0 / per for per in each))
        return most + runtime.fixed

    def _in_one(self, net: Network, tp: int) -> bool:
        """Whether one replica has the slowest device of every rank."""
        if all(len(names) == 1 for names in net.types):
            return True
        slowest = tuple(self.slowest(names, tp) for names in net.types)
        return any(replica.types == slowest for replica in net.replicas)

    def parts(self, strategy: Strategy) -> Parts:
        """What the strategy's step is made of, for those who execute it.

        Raises:
            ProfileError: as for `predict`.
        """
        return _Case(self, strategy).parts()

    def memory(self, strategy: Strategy) -> list[Memory]:
        """What fills a device of each pipeline rank, in the replica that keeps most."""
        return _Case(self, strategy).memory()

    def timeline(self, strategy: Strategy) -> Timeline:
        """The simulated pipeline of the slowest kind of replica, with all its actions."""
        case = _Case(self, strategy)
        _, slowest = max(zip(case.lines, case.slow, strict=True), key=lambda pair: pair[0].seconds)
        return simulate_named(slowest, strategy.schedule, strategy.microbatches, timetable=True)


class _Case:
    """One prediction."""

    def __init__(self, model: CostModel, strategy: Strategy) -> None:
        self.model, self.strategy = model, strategy
        self.ranks = strategy.ranks
        self.net = model.network(strategy.tp, strategy.pp, strategy.dp, strategy.devices)
        self.intervals = list(zip(strategy.cuts, (*strategy.cuts[1:], model.profile.size), strict=True))
        self.flow = model.flow(strategy.tp)
        self.parameters = [self.flow.parameters_of(a, b) for a, b in self.intervals]
        self.saved = [self.flow.saved_of(a, b) * strategy.microbatch for a, b in self.intervals]
        self.kept = [
            self.flow.into(a, b)[0] * model.runtime.message * strategy.microbatch if strategy.recomputes(s) else saved
            for s, ((a, b), saved) in enumerate(zip(self.intervals, self.saved, strict=True))
        ]

    @cached_property
    def slow(self) -> list[Pipeline]:
        """Those of the kinds of replica of which one is the slowest."""
        return [self._pipeline(self.net.replicas[kind]) for kind in self.net.slow]

    @cached_property
    def lines(self) -> list[Timeline]:
        """Their simulations."""
        strategy = self.strategy
        return [simulate_named(p, strategy.schedule, strategy.microbatches) for p in self.slow]

    def _pipeline(self, replica: Replica) -> Pipeline:
        strategy, ranks, runtime = self.strategy, self.ranks, self.model.runtime
        times = {name: self._times(name) for name in set(replica.types)}
        forward, backward, weight = (
            [times[replica.types[rank]][part][stage] for stage, rank in enumerate(ranks)] for part in range(3)
        )
        ways = [replica.way(a, b) for a, b in itertools.pairwise(ranks)]
        size = runtime.message * strategy.microbatch
        crossing = [self.flow.into(*interval) for interval in self.intervals[1:]]
        there = [elements * size * way.per_byte for (elements, _), way in zip(crossing, ways, strict=True)]
        back = [elements * size * way.per_byte for (_, elements), way in zip(crossing, ways, strict=True)]
        latency = [way.latency for way in ways]
        if runtime.blocking:  # the sender waits with its message, which arrives when both are done
            for stage, late in enumerate(latency):
                forward[stage] += there[stage] + late
                backward[stage + 1] += back[stage] + late
            there = back = latency = [0.0] * len(ways)
        return Pipeline(
            ranks, tuple(forward), tuple(backward), tuple(weight), tuple(map(math.ceil, self.kept)),
            tuple(there), tuple(back), tuple(latency), tuple(latency),
        )  # fmt: skip

    def _times(self, device: str) -> tuple[list[float], list[float], list[float]]:
        """Forward, backward and its weights' part of each stage on that device type."""
        strategy = self.strategy
        rows = self.model.rows(device, strategy.tp, strategy.microbatch)
        edges = [*strategy.cuts, self.model.profile.size]
        forward, backward, weight = (np.diff(row[edges]) for row in (rows.forward, rows.backward, rows.weight))
        if strategy.recompute:
            backward = backward + forward * strategy.recompute
        weight = np.minimum(weight, backward)  # sums are rounded
        runtime = self.model.runtime
        glue = runtime.action + runtime.unit * self.model.profile.size / strategy.virtual_stages
        beside = np.add if device == CPU else np.maximum  # a GPU works while the host prepares what comes next
        return beside(forward, glue).tolist(), beside(backward, runtime.action).tolist(), weight.tolist()

    def prediction(self) -> Prediction:
        strategy, runtime, net = self.strategy, self.model.runtime, self.net
        ends = [max(line.last_backward[s] for line in self.lines) for s in range(strategy.stages)]
        end = max(line.seconds for line in self.lines)
        reductions = self._reductions()
        ends = self._tied(ends)
        done = [0.0] * strategy.pp
        for stage in sorted(range(strategy.stages), key=ends.__getitem__):  # a rank's reductions come one by one
            rank = self.ranks[stage]
            done[rank] = max(done[rank], ends[stage]) + reductions[stage]
        reduced = max(end, *done)
        total = max(max(end, done[rank]) + self._step(rank) for rank in range(strategy.pp))
        busy = [max(line.busy[rank] for line in self.lines) for rank in range(strategy.pp)]
        return Prediction(
            total + runtime.fixed,
            end,
            reduced - end,
            total + runtime.fixed - reduced,
            1.0 - sum(busy) / (strategy.pp * end) if end else 0.0,
            self._memory([max(line.peak_bytes[rank] for line in self.lines) for rank in range(strategy.pp)]),
            net.limits,
            self._stages(reductions),
        )

    def _tied(self, ends: list[float]) -> list[float]:
        """When each stage has the gradients of its parameters complete: tied ones are first summed over their stages.

        A sum starts when the last of its stages has its part.
        """
        ends = list(ends)
        for stages, seconds in self._ties():
            end = max(ends[s] for s in stages) + seconds
            for stage in stages:
                ends[stage] = end
        return ends

    def _ties(self) -> list[tuple[tuple[int, ...], float]]:
        """Tied parameters on several ranks: their stages, and seconds of the sum over those."""
        strategy, runtime = self.strategy, self.model.runtime
        found: list[tuple[tuple[int, ...], float]] = []
        for tied, parameters in zip(self.model.profile.tied, self.flow.tied, strict=True):
            stages = tuple(s for s, (a, b) in enumerate(self.intervals) if any(a <= i < b for i in tied.layers))
            ranks = tuple(dict.fromkeys(self.ranks[s] for s in stages))
            if len(ranks) > 1:
                found.append((stages, self.model.tie(strategy, ranks) * runtime.tied * parameters))
        return found

    @cached_property
    def layers(self) -> list[int]:
        """How many layers each rank holds."""
        count = [0] * self.strategy.pp
        for (a, b), rank in zip(self.intervals, self.ranks, strict=True):
            count[rank] += b - a
        return count

    @cached_property
    def held(self) -> list[float]:
        """Parameters on a device of each rank; those tied between its stages count twice."""
        held = [0.0] * self.strategy.pp
        for parameters, rank in zip(self.parameters, self.ranks, strict=True):
            held[rank] += parameters
        return held

    def parts(self) -> Parts:
        return Parts(
            tuple(map(self._pipeline, self.net.replicas)),
            self.net.kinds,
            tuple(self._reductions()),
            tuple(self._ties()),
            tuple(self._step(rank) + self.model.runtime.fixed for rank in range(self.strategy.pp)),
        )

    def _reductions(self) -> list[float]:
        """By stage, seconds of the reduction of its gradients over the replicas.

        What every rank of a tensor-parallel group has is averaged over those ranks, too.
        """
        reduced, net = self.model.runtime.reduced, self.net
        whole = [self.flow.whole_of(a, b) for a, b in self.intervals]
        return [
            reduced * ((p - w) * net.reduction[r] + w * net.wide[r])
            for p, w, r in zip(self.parameters, whole, self.ranks, strict=True)
        ]

    def _step(self, rank: int) -> float:
        """Seconds of the optimizer on a device of that rank."""
        runtime, parts = self.model.runtime, self.strategy.dp if self.strategy.shard_optimizer else 1
        seconds = self.held[rank] * runtime.step / parts / (self.net.bandwidths[rank] * runtime.memory)
        launches = self.layers[rank] * runtime.launches
        seconds = seconds + launches if CPU in self.net.types[rank] else max(seconds, launches)
        return seconds + self._gathering(rank)

    def _gathering(self, rank: int) -> float:
        """Seconds in which replicas that share the optimizer's work tell each other the new parameters."""
        if not self.strategy.shard_optimizer:
            return 0.0
        return self.held[rank] * self.model.runtime.weight * self.net.reduction[rank] / 2

    def _memory(self, activations: list[int]) -> tuple[float, ...]:
        """Bytes on a device of each rank: state, what is kept of microbatches in flight, and working memory.

        A rank works on one stage at a time: on its largest layer, and on all that it computes again.
        """
        runtime = self.model.runtime
        state = runtime.weight + runtime.gradient + runtime.optimizer / self._shards
        return tuple(
            held * state + kept + most for held, kept, most in zip(self.held, activations, self._working(), strict=True)
        )

    def memory(self) -> list[Memory]:
        """The same by its parts."""
        runtime = self.model.runtime
        return [
            Memory(
                held * runtime.weight,
                held * runtime.gradient,
                held * runtime.optimizer / self._shards,
                max(line.peak_bytes[rank] for line in self.lines),
                working,
            )
            for rank, (held, working) in enumerate(zip(self.held, self._working(), strict=True))
        ]

    @property
    def _shards(self) -> int:
        """Replicas that divide the optimizer's state."""
        return self.strategy.dp if self.strategy.shard_optimizer else 1

    def _working(self) -> list[float]:
        """Bytes that each rank needs only while it runs a stage."""
        strategy = self.strategy
        working = [0.0] * strategy.pp
        for stage, (a, b) in enumerate(self.intervals):
            layers = self.flow.most_transient(a, b) * strategy.microbatch
            again = self.saved[stage] if strategy.recomputes(stage) else 0.0
            rank = self.ranks[stage]
            working[rank] = max(working[rank], layers + again)
        return working

    def _stages(self, reductions: list[float]) -> tuple[Stage, ...]:
        state = self.model.runtime.state
        slow = max(self.slow, key=lambda p: sum(p.forward) + sum(p.backward))
        return tuple(
            Stage(
                interval,
                slow.forward[s],
                slow.backward[s],
                (slow.wire_forward[s - 1] + slow.latency_forward[s - 1]) if s else 0.0,
                reductions[s],
                self.parameters[s] * state + self.kept[s],
            )
            for s, interval in enumerate(self.intervals)
        )
