"""What a strategy costs on a cluster: seconds of a step, and bytes on each device.

::

    rank 0 |0123₀₀₁₁₂₂₃₃|═══reduce═══|opt|       one pipeline is simulated per kind of replica; each stage's gradients
    rank 1 |·01₀₀2₁₁3..  |reduce|opt|            are reduced from its own last backward on; the step ends with the last

Each stage runs at the speed of the slowest device that holds it. A message takes the latency and the bytes over the
link's rate; a network card carries all messages and rings of its node at once, so each gets its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from smpar.planner.cluster import Cluster
from smpar.planner.hardware import SMPAR, Runtime
from smpar.planner.network import FREE, Network, Replica, network, ring_seconds
from smpar.planner.pipeline import Pipeline, Timeline, simulate_named
from smpar.planner.profile import Profile, Seconds
from smpar.planner.strategy import Strategy

Floats = npt.NDArray[np.float64]


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
        optimizer: seconds of the slowest rank's step, and what is left.
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
        self.flow = Flow(profile)
        self._rows: dict[tuple[str, int, int], Rows] = {}
        self._networks: dict[tuple[int, int, int, tuple[int, ...]], Network] = {}
        self._ties: dict[tuple[int, int, int, tuple[int, ...], tuple[int, ...]], float] = {}

    def rows(self, device: str, tp: int, microbatch: int) -> Rows:
        """Times of the layers there."""
        key = device, tp, microbatch
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = Rows.make(self.profile.seconds(device, tp, microbatch))
        return found

    def network(self, tp: int, pp: int, dp: int, devices: tuple[int, ...]) -> Network:
        """Ways between the devices of placed degrees."""
        key = tp, pp, dp, devices
        found = self._networks.get(key)
        if found is None:
            names = {self.cluster.type_of(device).name for device in devices}
            whole = {name: self._whole(name, tp) for name in names}
            found = self._networks[key] = network(self.cluster, self.runtime, tp, pp, dp, devices, whole)
        return found

    def tie(self, strategy: Strategy, ranks: tuple[int, ...]) -> float:
        """Seconds per byte of a sum over these pipeline ranks, of all replicas at once."""
        key = strategy.tp, strategy.pp, strategy.dp, strategy.devices, ranks
        found = self._ties.get(key)
        if found is None:
            width = strategy.tp * strategy.dp
            groups = [[[rank * width + i for rank in ranks] for i in range(width)]]
            (found,) = ring_seconds(self.cluster, self.runtime, groups, strategy.devices)
            self._ties[key] = found
        return found

    def slowest(self, names: Sequence[str], tp: int) -> str:
        """Of device types, the one on which the whole model takes longest."""
        return names[0] if len(names) == 1 else max(names, key=lambda name: self._whole(name, tp))

    def _whole(self, name: str, tp: int) -> float:
        rows = self.rows(name, tp, 1)
        return float(rows.forward[-1] + rows.backward[-1])

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
        lines = [simulate_named(p, strategy.schedule, strategy.microbatches) for p in case.pipelines]
        return [max(line.busy[rank] for line in lines) for rank in range(strategy.pp)]

    def timeline(self, strategy: Strategy) -> Timeline:
        """The simulated pipeline of the slowest kind of replica, with all its actions."""
        case = _Case(self, strategy)
        slowest = max(case.pipelines, key=lambda p: simulate_named(p, strategy.schedule, strategy.microbatches).seconds)
        return simulate_named(slowest, strategy.schedule, strategy.microbatches, timetable=True)


@dataclass(frozen=True)
class Rows:
    """Sums of layers' times from the first one on: ``forward[i]`` is that of layers 0 to i - 1."""

    forward: Floats
    backward: Floats
    weight: Floats

    @classmethod
    def make(cls, seconds: Seconds) -> Rows:
        """From the times by layer."""
        return cls(*(_sums(row) for row in seconds))


class Flow:
    """What crosses the edges of stages, and what layers keep; per sample and element."""

    def __init__(self, profile: Profile) -> None:
        layers, tensors = profile.layers, profile.tensors
        self._source = np.array([t.source for t in tensors for _ in t.targets], dtype=np.int64)
        self._target = np.array([i for t in tensors for i in t.targets], dtype=np.int64)
        self._tensor = np.array([k for k, t in enumerate(tensors) for _ in t.targets], dtype=np.int64)
        self._elements = np.array([t.elements for t in tensors])
        self._graded = np.array([t.elements * t.gradient for t in tensors])
        self._known: dict[tuple[int, int], tuple[float, float]] = {}
        self.parameters = _sums([x.parameters for x in layers])
        self.whole_parameters = _sums([x.whole_parameters for x in layers])
        self.saved = _sums([x.saved for x in layers])
        self.whole_saved = _sums([x.whole_saved for x in layers])
        self.transient = [x.transient for x in layers]
        self.mean_boundary = sum(self.into(i, len(layers))[0] for i in range(1, len(layers))) / max(1, len(layers) - 1)

    def into(self, first: int, end: int) -> tuple[float, float]:
        """Elements per sample that layers `first` to `end` - 1 get from others, and of gradients that they return."""
        found = self._known.get((first, end))
        if found is None:
            outside = (self._source < first) | (self._source >= end)
            used = np.unique(self._tensor[outside & (self._target >= first) & (self._target < end)])
            found = self._known[first, end] = float(self._elements[used].sum()), float(self._graded[used].sum())
        return found

    def parameters_of(self, first: int, end: int, tp: int) -> float:
        """Parameters on a device that holds these layers."""
        return _divided(self.parameters, self.whole_parameters, first, end, tp)

    def saved_of(self, first: int, end: int, tp: int) -> float:
        """Bytes per sample kept there until the backward."""
        return _divided(self.saved, self.whole_saved, first, end, tp)


class _Case:
    """One prediction."""

    def __init__(self, model: CostModel, strategy: Strategy) -> None:
        self.model, self.strategy = model, strategy
        self.ranks = strategy.ranks
        self.net = model.network(strategy.tp, strategy.pp, strategy.dp, strategy.devices)
        self.intervals = list(zip(strategy.cuts, (*strategy.cuts[1:], model.profile.size), strict=True))
        self.parameters = [
            model.flow.parameters_of(a, b, strategy.tp) - self._repeated(a, b) / strategy.tp for a, b in self.intervals
        ]
        self.saved = [model.flow.saved_of(a, b, strategy.tp) * strategy.microbatch for a, b in self.intervals]
        self.kept = [
            model.flow.into(a, b)[0] * model.runtime.message * strategy.microbatch if strategy.recomputes(s) else saved
            for s, ((a, b), saved) in enumerate(zip(self.intervals, self.saved, strict=True))
        ]

    def _repeated(self, first: int, end: int) -> float:
        """Parameters that several layers of a stage share, counted more than once in the layers' sum."""
        return sum(
            tied.parameters * max(0, sum(first <= i < end for i in set(tied.layers)) - 1)
            for tied in self.model.profile.tied
        )

    @cached_property
    def pipelines(self) -> list[Pipeline]:
        """One for each kind of replica."""
        return [self._pipeline(replica) for replica in self.net.replicas]

    def _pipeline(self, replica: Replica) -> Pipeline:
        strategy, ranks, runtime = self.strategy, self.ranks, self.model.runtime
        forward, backward, weight = [], [], []
        for stage, (a, b) in enumerate(self.intervals):
            rows = self.model.rows(replica.types[ranks[stage]], strategy.tp, strategy.microbatch)
            forward.append(float(rows.forward[b] - rows.forward[a]))
            backward.append(float(rows.backward[b] - rows.backward[a]) + forward[-1] * strategy.recomputes(stage))
            weight.append(float(rows.weight[b] - rows.weight[a]))
        wires: tuple[list[float], list[float]] = ([], [])
        latency = []
        for stage in range(strategy.stages - 1):
            source, target = ranks[stage], ranks[stage + 1]
            way = FREE
            if source != target:
                way = replica.ways[source if target == (source + 1) % strategy.pp else target]
            latency.append(way.latency)
            for wire, elements in zip(wires, self.model.flow.into(*self.intervals[stage + 1]), strict=True):
                wire.append(elements * runtime.message * strategy.microbatch * way.per_byte)
        if runtime.blocking:  # the sender waits with its message, which arrives when both are done
            for stage, (there, back, late) in enumerate(zip(*wires, latency, strict=True)):
                forward[stage] += there + late
                backward[stage + 1] += back + late
            wires, latency = ([0.0] * len(latency), [0.0] * len(latency)), [0.0] * len(latency)
        return Pipeline(
            tuple(ranks), tuple(forward), tuple(backward), tuple(weight), tuple(map(math.ceil, self.kept)),
            tuple(wires[0]), tuple(wires[1]), tuple(latency), tuple(latency),
        )  # fmt: skip

    def prediction(self) -> Prediction:
        strategy, runtime, net = self.strategy, self.model.runtime, self.net
        lines = [simulate_named(p, strategy.schedule, strategy.microbatches) for p in self.pipelines]
        ends = [max(line.last_backward[s] for line in lines) for s in range(strategy.stages)]
        end = max(line.seconds for line in lines)
        reductions = [
            self.parameters[s] * runtime.reduced * net.reduction[self.ranks[s]] for s in range(strategy.stages)
        ]
        ends = self._tied(ends)
        done = [0.0] * strategy.pp
        for stage in sorted(range(strategy.stages), key=ends.__getitem__):  # a rank's reductions come one by one
            rank = self.ranks[stage]
            done[rank] = max(done[rank], ends[stage]) + reductions[stage]
        reduced = max(end, *done)
        steps = [
            self._held(rank)
            * runtime.step
            / (strategy.dp if strategy.shard_optimizer else 1)
            / (net.bandwidths[rank] * runtime.memory)
            for rank in range(strategy.pp)
        ]
        total = max(max(end, done[rank]) + steps[rank] + self._gathering(rank) for rank in range(strategy.pp))
        busy = [max(line.busy[rank] for line in lines) for rank in range(strategy.pp)]
        return Prediction(
            total + runtime.fixed,
            end,
            reduced - end,
            total - reduced,
            1.0 - sum(busy) / (strategy.pp * end) if end else 0.0,
            tuple(self._memory(rank, max(line.peak_bytes[rank] for line in lines)) for rank in range(strategy.pp)),
            net.limits,
            self._stages(reductions),
        )

    def _tied(self, ends: list[float]) -> list[float]:
        """When each stage has the gradients of its parameters complete: tied ones are first summed over their stages.

        A sum starts when the last of its stages has its part.
        """
        ends = list(ends)
        for tied, (stages, seconds) in self._ties().items():
            end = max(ends[s] for s in stages) + seconds * self.model.profile.tied[tied].parameters
            for stage in stages:
                ends[stage] = end
        return ends

    def _ties(self) -> dict[int, tuple[tuple[int, ...], float]]:
        """Tied parameters on several ranks: their stages, and seconds per parameter of the sum over those."""
        strategy, runtime = self.strategy, self.model.runtime
        found: dict[int, tuple[tuple[int, ...], float]] = {}
        for index, tied in enumerate(self.model.profile.tied):
            stages = tuple(s for s, (a, b) in enumerate(self.intervals) if any(a <= i < b for i in tied.layers))
            ranks = tuple(dict.fromkeys(self.ranks[s] for s in stages))
            if len(ranks) > 1:
                per_byte = self.model.tie(strategy, ranks)
                found[index] = stages, per_byte * runtime.tied / strategy.tp
        return found

    def _held(self, rank: int) -> float:
        """Parameters on a device of that rank; those tied between its stages count twice."""
        return sum(p for p, r in zip(self.parameters, self.ranks, strict=True) if r == rank)

    def _gathering(self, rank: int) -> float:
        """Seconds in which replicas that share the optimizer's work tell each other the new parameters."""
        if not self.strategy.shard_optimizer:
            return 0.0
        return self._held(rank) * self.model.runtime.weight * self.net.reduction[rank] / 2

    def _memory(self, rank: int, activations: float) -> float:
        """Bytes on a device: state, what is kept of microbatches in flight, and the largest layer's working memory."""
        strategy, runtime = self.strategy, self.model.runtime
        optimizer = runtime.optimizer / (strategy.dp if strategy.shard_optimizer else 1)
        working = 0.0
        for stage, (a, b) in enumerate(self.intervals):
            if self.ranks[stage] == rank:
                again = self.saved[stage] if strategy.recomputes(stage) else 0.0
                layers = max(self.model.flow.transient[a:b], default=0.0) * strategy.microbatch / strategy.tp
                working = max(working, again + layers)
        return self._held(rank) * (runtime.weight + runtime.gradient + optimizer) + activations + working

    def _stages(self, reductions: list[float]) -> tuple[Stage, ...]:
        state = self.model.runtime.state
        slow = max(self.pipelines, key=lambda p: sum(p.forward) + sum(p.backward))
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


def _sums(row: Sequence[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.asarray(row, dtype=np.float64))))


def _divided(sums: Floats, whole: Floats, first: int, end: int, tp: int) -> float:
    all_, undivided = float(sums[end] - sums[first]), float(whole[end] - whole[first])
    return undivided + (all_ - undivided) / tp
