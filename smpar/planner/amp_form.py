"""AMP's own closed form (arXiv 2210.07297, section 3), and the search of its space; a baseline.

With c_k the seconds of stage k for a microbatch, n microbatches, and e_k the seconds of one message behind stage k::

    sum of c + (n - 1) max of c  +  sum of e  +  max of reductions
    |0 1 2 3 ...                 |  once each   |  after the last

Times are proportional to the microbatch's size, forward and backward together three times the forward; elements and
gradients have four bytes; nothing shares a network card; memory is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.profile import Profile, Tied
from smpar.planner.space import Constraints, degrees, placements
from smpar.planner.strategy import Strategy

FULL = 4.0
"""Bytes of an element, of activations as of gradients."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AmpCosts:
    """A model as AMP sees it.

    Attributes:
        forward: (device type, tensor-parallel degree) -> by layer, seconds of one sample's forward.
        parameters: by layer; tensor parallelism divides them.
        boundary: by layer, elements per sample that cross a boundary behind it.
        divided: by layer, whether tensor parallelism divides `boundary`.
        places: layers before which a cut may be.
        tied: parameters that a stage with all their layers has once.
    """

    forward: Mapping[tuple[str, int], tuple[float, ...]]
    parameters: tuple[float, ...]
    boundary: tuple[float, ...]
    divided: tuple[bool, ...]
    places: tuple[int, ...]
    tied: tuple[Tied, ...] = ()

    @classmethod
    def of(cls, profile: Profile) -> AmpCosts:
        """Of a profile, by its times for one sample and the tensors that its boundaries cut."""
        size = profile.size
        crossing = [
            sum(t.elements for t in profile.tensors if t.source <= i < max(t.targets, default=-1)) for i in range(size)
        ]
        return cls(
            {(t.device, t.tp): profile.seconds(t.device, t.tp, 1).forward for t in profile.times},
            tuple(layer.parameters for layer in profile.layers),
            tuple(crossing),
            (False,) * size,
            tuple(range(1, size)),
            profile.tied,
        )


def amp_seconds(costs: AmpCosts, cluster: Cluster, strategy: Strategy) -> float:
    """What AMP's closed form says that a step takes."""
    cuts = strategy.cuts
    ends = (*cuts[1:], len(costs.parameters))
    sums = {device: _sums(row) for (device, tp), row in costs.forward.items() if tp == strategy.tp}
    stages = [
        3 * strategy.microbatch * (sums[name][b] - sums[name][a])
        for name, a, b in zip(_types(costs, cluster, strategy), cuts, ends, strict=True)
    ]
    messages = sum(_message(costs, cluster, strategy, stage, end - 1) for stage, end in enumerate(ends[:-1]))
    reductions = [
        _ring(cluster, strategy, stage) * _parameters(costs, a, b)
        for stage, (a, b) in enumerate(zip(cuts, ends, strict=True))
    ]
    return float(sum(stages) + (strategy.microbatches - 1) * max(stages) + messages + max(reductions))


def amp_cuts(costs: AmpCosts, cluster: Cluster, strategy: Strategy) -> tuple[int, ...] | None:
    """The cuts that are best by the closed form, whatever the strategy's own; None if there are too few places.

    As AMP's dynamic program, with the largest stage's seconds given; but only those that can be best are tried. The
    largest reduction is then forbidden, as long as what is left may be better.
    """
    at = np.array([0, *costs.places, len(costs.parameters)])
    if len(at) <= strategy.pp:
        return None
    later = at[:, None] < at[None, :]
    each, reductions, messages = [], [], []  # by stage, of layers from one place to another
    parameters = np.array([[_parameters(costs, a, b) if a < b else 0.0 for b in at] for a in at])
    for stage, name in enumerate(_types(costs, cluster, strategy)):
        sums = np.array(_sums(costs.forward[name, strategy.tp]))[at] * 3 * strategy.microbatch
        each.append(np.where(later, sums[None, :] - sums[:, None], np.inf))
        reductions.append(_ring(cluster, strategy, stage) * parameters)
        last = stage == strategy.pp - 1
        messages.append(
            np.array([0.0 if last else _message(costs, cluster, strategy, stage, max(0, end - 1)) for end in at])
        )
    best, found = np.inf, None
    while True:
        seconds, places = _pipeline(each, messages, strategy.microbatches - 1)
        if seconds >= best:
            return tuple(int(at[i]) for i in found) if found is not None else None
        ends = (*places[1:], len(at) - 1)
        most = max(float(r[a, b]) for r, a, b in zip(reductions, places, ends, strict=True))
        if seconds + most < best:
            best, found = seconds + most, places
        each = [np.where(r < most, e, np.inf) for e, r in zip(each, reductions, strict=True)]


def _pipeline(each: Sequence[Floats], messages: Sequence[Floats], follow: int) -> tuple[float, list[int]]:
    """The least of sum + follow * max of stages + messages, and the places where stages begin."""
    largest = np.unique(np.concatenate([stage[np.isfinite(stage)] for stage in each]))
    if not len(largest):
        return np.inf, []
    low, high = 0, len(largest) - 1
    while low < high:  # the smallest of the largest that any cuts have
        middle = (low + high) // 2
        low, high = (low, middle) if np.isfinite(_under(each, messages, largest[middle])[0]) else (middle + 1, high)
    least = _under(each, messages, np.inf)[0]
    best: tuple[float, list[int]] = np.inf, []
    for cap in largest[low:]:
        if follow * cap + least >= best[0]:
            break
        total, places = _under(each, messages, cap)
        if total + follow * cap < best[0]:
            best = total + follow * float(cap), places
    return best


def _under(each: Sequence[Floats], leaving: Sequence[Floats], cap: float) -> tuple[float, list[int]]:
    """The least sum of stages and messages with no stage above `cap`, and the places where its stages begin."""
    size = len(each[0])
    reached = np.full(size, np.inf)
    reached[0] = 0.0
    back = []
    for stage, after in zip(each, leaving, strict=True):
        sums = reached[:, None] + np.where(stage <= cap, stage, np.inf) + after[None, :]
        back.append(np.argmin(sums, axis=0))
        reached = sums[back[-1], np.arange(size)]
    here, starts = size - 1, []
    for before in reversed(back):
        here = int(before[here])
        starts.append(here)
    return float(reached[-1]), starts[::-1]


def amp_candidates(
    model: CostModel, costs: AmpCosts, global_batch: int, constraints: Constraints
) -> Iterator[tuple[float, Strategy]]:
    """AMP's space: all degrees that use the most devices that any can use, and all ways along these.

    Yields:
        Seconds by its closed form, and the strategy with its best cuts, in no order.
    """
    cluster = model.cluster
    known = {node.device for node in cluster.nodes}
    tensor = {tp for name, tp in costs.forward if name in known}
    cases = list(degrees(cluster, len(costs.places) + 1, tuple(tensor), global_batch, constraints))
    most = max((case.devices for case in cases), default=0)
    for case in cases:
        if case.devices < most or not all((name, case.tp) in costs.forward for name in known):
            continue
        speed = {name: 1 / max(sum(costs.forward[name, case.tp]), 1e-300) for name in known}
        orders = [tuple(range(cluster.size)), *placements(cluster, case.tp, case.pp, case.dp, speed)]
        for devices in dict.fromkeys(orders if len(known) > 1 else orders[:1]):
            strategy = Strategy(
                case.tp, case.pp, case.dp, case.microbatch, case.microbatches, "1f1b", 1, tuple(range(case.pp)), devices
            )
            cuts = amp_cuts(costs, cluster, strategy)
            if cuts is not None:
                strategy = replace(strategy, cuts=cuts)
                yield amp_seconds(costs, cluster, strategy), strategy


def _types(costs: AmpCosts, cluster: Cluster, strategy: Strategy) -> list[str]:
    """By stage, the slowest device type that holds it."""
    width = strategy.tp * strategy.dp
    found = []
    for stage in range(strategy.pp):
        names = {cluster.type_of(device).name for device in strategy.devices[stage * width : (stage + 1) * width]}
        found.append(max(sorted(names), key=lambda name: sum(costs.forward[name, strategy.tp])))
    return found


def _message(costs: AmpCosts, cluster: Cluster, strategy: Strategy, stage: int, layer: int) -> float:
    """Seconds of a message behind a stage whose last layer is `layer`, between the stages' first devices."""
    elements = strategy.microbatch * costs.boundary[layer] / (strategy.tp if costs.divided[layer] else 1)
    return FULL * elements / cluster.link(strategy.place(stage), strategy.place(stage + 1)).bandwidth


def _parameters(costs: AmpCosts, first: int, end: int) -> float:
    """Of a stage."""
    return sum(costs.parameters[first:end]) - sum(
        t.parameters * (len(t.layers) - 1) for t in costs.tied if all(first <= i < end for i in t.layers)
    )


def _ring(cluster: Cluster, strategy: Strategy, stage: int) -> float:
    """Seconds per parameter of a stage's reduction, a ring over the replicas."""
    if strategy.dp == 1:
        return 0.0
    ring = [strategy.place(stage, d) for d in range(strategy.dp)]
    slowest = min(cluster.link(a, b).bandwidth for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))
    return 2 * (strategy.dp - 1) / strategy.dp * FULL / strategy.tp / slowest


def _sums(row: Sequence[float]) -> list[float]:
    sums = [0.0]
    for seconds in row:
        sums.append(sums[-1] + seconds)
    return sums
