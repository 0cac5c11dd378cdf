"""Cuts for a placed strategy: what each stage's place can do, given to the exact partitioner `smpar.planner.stages`.

Memory is kept as far as a sum over layers tells; the simulation has the last word on what fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from smpar.planner.cost import CostModel
from smpar.planner.network import FREE, Network, Way
from smpar.planner.partition import EVENNESS
from smpar.planner.stages import Layers, Place, Tensor, find_cuts, nearest_cuts
from smpar.planner.strategy import Strategy

_LEAST_RAMP = 0.1
"""The part of a ramp that split backwards leave at least."""


@dataclass(frozen=True)
class Balanced:
    """The best cuts.

    Attributes:
        cuts: as `Strategy.cuts`.
        stages, ranks: seconds per microbatch of each stage, and of each rank's stages together.
    """

    cuts: tuple[int, ...]
    stages: tuple[float, ...]
    ranks: tuple[float, ...]


class Balancer:
    """Cuts the layers of one model for strategies."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._layers: dict[tuple[object, ...], Layers] = {}
        self._found: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[float, ...]] | None] = {}

    def cuts(self, strategy: Strategy, slack: float = 1.0, links: bool = False, quick: bool = False) -> Balanced | None:
        """The best cuts for a strategy, whose own are not looked at; None if no cuts keep within the memory.

        Args:
            slack: the devices' memory is taken to be so many times what it is, for those who look again: sums over
                layers may exceed what a simulation finds (stages of one rank are not at their fullest at once).
            links: whether messages cost time even if they do not hold up their sender, as where links are slow.
            quick: where ranks hold several stages, balance the stages alone instead of the ranks' sums, and keep each
                stage's memory alone: a tenth of the time, for plans 2 % slower, as a rule.

        Raises:
            TooFewUnits: more stages than layers.
        """
        net = self.model.network(strategy.tp, strategy.pp, strategy.dp, strategy.devices)
        if strategy.stages == 1:
            name = self.model.slowest(net.types[0], strategy.tp)
            again = strategy.recomputes(0)
            whole = sum(self.model.layer_seconds(name, strategy.tp, strategy.microbatch, again))
            return Balanced((0,), (whole,), (whole,))
        places = self._places(strategy, net, slack, links)
        layers = self._chain(strategy)
        ranks = () if quick or strategy.virtual_stages == 1 else strategy.ranks
        key = id(layers), tuple(places), self._as_if(strategy), ranks
        if key not in self._found:
            found = find_cuts(layers, places, self._as_if(strategy), ranks, EVENNESS if ranks else 0.0)
            self._found[key] = None if found is None else (found.cuts, found.stage_time)
        known = self._found[key]
        if known is None:
            return None
        sums = [0.0] * strategy.pp
        for rank, seconds in zip(strategy.ranks, known[1], strict=True):
            sums[rank] += seconds
        return Balanced(*known, tuple(sums))

    def nearest(self, strategy: Strategy) -> tuple[int, ...]:
        """The cuts that spread memory best, for a strategy whose own are not looked at."""
        if strategy.stages == 1:
            return (0,)
        net = self.model.network(strategy.tp, strategy.pp, strategy.dp, strategy.devices)
        ranks = strategy.ranks if strategy.virtual_stages > 1 else ()
        return nearest_cuts(self._chain(strategy), self._places(strategy, net), ranks)

    def _as_if(self, strategy: Strategy) -> int:
        """Microbatches for which the partitioner's objective, one way across and then the pace, weighs both right.

        Split backwards fill much of the ramp: of a stage's F + B, only F + B - 2 W remain of it (arXiv 2401.10241,
        section 2.3), so the pace counts for more.
        """
        m = strategy.microbatches
        if strategy.schedule != "zb":
            return m
        name = self._types(strategy.tp)[0]
        rows = self.model.rows(name, strategy.tp, strategy.microbatch)
        both, weight = rows.whole, float(rows.weight[-1])
        return 1 + round((m - 1) * both / max(both - 2 * weight, _LEAST_RAMP * both)) if both > 0.0 else m

    def _chain(self, strategy: Strategy) -> Layers:
        """Layers as the partitioner sees them: one row of times for each device type of the profile."""
        model, size = self.model, strategy.microbatch
        again = bool(strategy.recompute)
        shards = strategy.dp if strategy.shard_optimizer else 1
        key = strategy.tp, size, again, shards
        found = self._layers.get(key)
        if found is None:
            runtime, profile, flow = model.runtime, model.profile, model.flow(strategy.tp)
            state = runtime.weight + runtime.gradient + runtime.optimizer / shards
            found = self._layers[key] = Layers(
                [model.layer_seconds(name, strategy.tp, size, again) for name in self._types(strategy.tp)],
                [
                    flow.parameters_of(i, i + 1) * state + max(0.0, transient - flow.usual_transient) * size
                    for i, transient in enumerate(flow.transient)
                ],
                [flow.saved_of(i, i + 1) * size for i in range(profile.size)],
                [
                    Tensor(t.source, after, elements * (1 + t.gradient) * runtime.message * size)
                    for t, elements in zip(profile.tensors, flow.elements, strict=True)
                    if (after := tuple(i for i in t.targets if i > t.source))
                ],
            )
        return found

    def _types(self, tp: int) -> list[str]:
        return [name for name in self.model.profile.devices if tp in self.model.profile.degrees(name)]

    def _places(self, strategy: Strategy, net: Network, slack: float = 1.0, links: bool = False) -> list[Place]:
        model, ranks = self.model, strategy.ranks
        names = self._types(strategy.tp)
        flow = model.flow(strategy.tp)
        transient = flow.usual_transient * strategy.microbatch
        kept = flow.mean_boundary * model.runtime.message * strategy.microbatch
        places = []
        for stage, rank in enumerate(ranks):
            way = FREE
            if (model.runtime.blocking or links) and stage and ranks[stage - 1] != rank:
                way = _worst(net, ranks[stage - 1], rank)
            held = in_flight(strategy, rank)
            again = strategy.recomputes(stage)
            places.append(
                Place(
                    names.index(model.slowest(net.types[rank], strategy.tp)),
                    way.per_byte,
                    2 * way.latency,
                    1.0 if again else held,
                    transient + (held * kept if again and stage else 0.0),
                    max(0.0, net.limits[rank]) * slack,
                )
            )
        return places


def in_flight(strategy: Strategy, rank: int) -> float:
    """Microbatches whose activations a stage of this rank holds at once, at most (see `smpar.schedule.chains`)."""
    p, v, m = strategy.pp, strategy.virtual_stages, strategy.microbatches
    if strategy.schedule in ("1f1b", "interleaved"):
        return min(m, p - rank)
    if strategy.schedule == "interleaved_1f1b":
        return min(m, (2 * (p - 1 - rank) + (v - 1) * p + 1) / v)
    return min(m, p) if strategy.schedule in ("zb", "zbv") else m


def _worst(net: Network, source: int, target: int) -> Way:
    return max((replica.way(source, target) for replica in net.replicas), key=lambda way: (way.per_byte, way.latency))
