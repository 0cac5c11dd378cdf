"""The search: all degrees in the order of what they take at least; cuts, prediction, and a look around the best.

::

    degrees, by lower bound ──▶ placements x schedules ──▶ exact cuts ──▶ simulate ──▶ keep the best
         stop: the bound is above all kept       too large: shard, recompute        then: move cuts, recompute less

The lower bound is the work of all microbatches spread over the fastest devices, and the reduction of their gradients
over the fastest links, without bubbles and messages: what it cuts off cannot be among the best. So that it cuts off
much, the degrees that a simple guess likes best come before all others.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from smpar.errors import PlanError
from smpar.planner.balance import Balancer
from smpar.planner.cost import CostModel, Prediction
from smpar.planner.plans import Plan, Plans, explain
from smpar.planner.space import Constraints, Degrees, degrees, every_placement, placements, schedules
from smpar.planner.strategy import Strategy

Progress = Callable[[int, int, float], None]
"""Called now and then with: degrees done, degrees in all, best seconds so far (infinity before the first)."""

_PROMISING = 48
"""So many degrees are tried first, those thought to be fastest; what is found lets the bound exclude most others."""
_PLACED = 2
"""Of the placements of some degrees, how many are tried under every schedule: the fastest under the first."""
_SAMPLED, _HOPELESS = 4, 1.3
"""After so many placements the others are left out, if the fastest is slower by that factor than all plans kept."""
_REFINED, _TRIED = 3, 8  # of the best strategies, whose cuts are moved to and fro; and if they have few stages
_SLACKS = (1.0, 1.25, 1.6)  # times their memory that cuts may seem to need; the simulation decides
_LONG = 0.3  # times the pace of the slowest rank that messages take where cuts look at them, too
_SHORT = 8  # so many layers at most are a short chain
_ALL = 6  # placements that are tried if these are all there are
_ELSEWHERE = 24  # placements of a good strategy that are tried once more at the end
_FEW = 8  # so many stages at most have several of their cuts moved at once


def search(
    model: CostModel,
    global_batch: int,
    constraints: Constraints | None = None,
    keep: int = 10,
    progress: Progress | None = None,
) -> Plans:
    """The best strategies for a model on a cluster (AMP, arXiv 2210.07297, section 4, with a simulation as its cost).

    Args:
        model: of profile, cluster and runtime.
        global_batch: samples of a step.
        constraints: what is allowed; None: everything.
        keep: how many plans to return at most.
        progress: told how far it is.

    Returns:
        At least one plan. Interrupted (``KeyboardInterrupt``) with a plan found, the best so far.

    Raises:
        PlanError: nothing is allowed, or nothing fits: by how much, and what would help.
    """
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise PlanError(
            "the global batch is a whole number of samples, 1 or more", f"{global_batch!r}", "global_batch=32"
        )
    return _Search(model, global_batch, constraints or Constraints(), keep, progress).run()


class _Thrift(NamedTuple):
    """Ways to save memory."""

    recompute: bool
    shard: bool


_THRIFTS = tuple(_Thrift(recompute, shard) for recompute in (False, True) for shard in (False, True))


@dataclass(frozen=True)
class _Found:
    strategy: Strategy
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def fits(self) -> bool:
        return self.prediction.fits

    @property
    def kind(self) -> tuple[object, ...]:
        """Of strategies that differ in placement, cuts and thrift only, one is kept."""
        s = self.strategy
        return s.tp, s.pp, s.dp, s.microbatch, s.schedule, s.virtual_stages


class _Search:
    def __init__(
        self, model: CostModel, global_batch: int, constraints: Constraints, keep: int, progress: Progress | None
    ) -> None:
        self.model, self.batch, self.constraints, self.keep, self.progress = (
            model, global_batch, constraints, keep, progress,
        )  # fmt: skip
        self.balancer = Balancer(model)
        self.short = model.profile.size <= _SHORT  # cutting again and again is cheap there, and single layers matter
        self.slacks = _SLACKS if self.short else _SLACKS[:1]
        self.best: dict[tuple[object, ...], _Found] = {}
        self.worst_kept = float("inf")
        self.speeds: dict[tuple[int, int], tuple[list[tuple[float, int]], float]] = {}
        self.counts: Counter[str] = Counter()
        self.done: set[int] = set()
        self.frontier: dict[int, float] = {}
        self.by_degrees: dict[tuple[int, int, int], float] = {}
        self.nearest: tuple[float, Strategy] | None = None  # of those too large, the one that lacks least

    def run(self) -> Plans:
        started = time.perf_counter()
        cases = sorted(((*self._bound(d), i, d) for i, d in enumerate(self._degrees())), key=lambda case: case[:3])
        if not cases:
            raise self._nothing_allowed()
        complete, done = True, 0
        try:
            promising = sorted(cases, key=lambda case: case[1:3])[:_PROMISING]
            for bound, _, index, case in (*promising, *cases):
                if self.progress is not None:
                    self.progress(done, len(cases), min((f.seconds for f in self.best.values()), default=float("inf")))
                if bound >= self.worst_kept and done >= len(promising):
                    self.counts["bounded"] += len(cases) - done
                    break
                if index not in self.done:
                    self.done.add(index)
                    done += 1
                    self._try(case)
            self._refine()
        except KeyboardInterrupt:
            if not self.best:
                raise
            complete = False
        if not self.best:
            raise self._too_large()
        ranked = sorted(self.best.values(), key=lambda found: found.seconds)[: self.keep]
        names = tuple(layer.name for layer in self.model.profile.layers)
        plans = [
            Plan(f.strategy, f.prediction, names, self.model.cluster, parts=self.model.parts(f.strategy))
            for f in ranked
        ]
        told = [replace(plan, why=explain(self.model, plans[0], plan)) for plan in plans]
        return Plans(
            tuple(told),
            dict(self.counts),
            dict(sorted(self.frontier.items())),
            time.perf_counter() - started,
            complete,
            self.by_degrees,
            self.model,
        )

    # -- candidates -----------------------------------------------------------------------------

    def _degrees(self) -> Iterator[Degrees]:
        profile, cluster = self.model.profile, self.model.cluster
        tensor = {tp for node in cluster.nodes for tp in profile.degrees(node.device)}
        tensor = tensor if self.model.runtime.tensor else tensor & {1}
        return degrees(cluster, profile.size, tuple(tensor), self.batch, self.constraints)

    def _bound(self, case: Degrees) -> tuple[float, float]:
        """Seconds that a step takes at least: all work spread over the fastest devices, or one microbatch's way.

        And a guess of what it will take: with the bubble of 1F1B.
        """
        key = case.tp, case.microbatch
        if key not in self.speeds:
            self.speeds[key] = self._speeds(*key)
        speeds, way = self.speeds[key]
        used, left = 0.0, case.pp * case.dp
        for speed, slots in speeds:
            taken = min(slots, left)
            used, left = used + taken * speed, left - taken
        if not used:
            return float("inf"), float("inf")
        computing, reducing = case.dp * case.microbatches / used, self._reduction(case)
        ramp = (case.pp - 1) / case.microbatches
        return max(way, computing + reducing), computing * (1 + ramp) + reducing

    def _reduction(self, case: Degrees) -> float:
        """Seconds of the reduction of evenly spread gradients over the fastest links, at least."""
        nodes, runtime = self.model.cluster.nodes, self.model.runtime
        inside = case.dp <= max(node.count // case.tp for node in nodes)
        if case.dp == 1 or inside or self.model.cluster.matrix is not None:
            return 0.0
        rate = max(node.nic.bandwidth for node in nodes)
        held = self.model.flow(case.tp).parameters_of(0, self.model.profile.size) / case.pp
        return 2 * (case.dp - 1) / case.dp * held * runtime.reduced / rate

    def _speeds(self, tp: int, microbatch: int) -> tuple[list[tuple[float, int]], float]:
        """What device types do, fastest first, and the least time of one microbatch.

        Returns:
            microbatches per second of a group of `tp` that holds the whole model, and the number of such groups; the
            seconds of a forward and of a backward without what may be put off.
        """
        slots: Counter[str] = Counter()
        for node in self.model.cluster.nodes:
            slots[node.device] += node.count // tp
        speeds, ways = [], []
        for name in self._types(tp):
            rows = self.model.rows(name, tp, microbatch)
            whole = rows.whole
            speeds.append((1.0 / whole if whole > 0.0 else float("inf"), slots[name]))
            ways.append(whole - float(rows.weight[-1]))
        return sorted(speeds, reverse=True), min(ways, default=0.0)

    def _try(self, case: Degrees) -> None:
        """All placements under the first schedule; the best few of them under the others, too."""
        names = list(schedules(case.pp, self.model.profile.size, self.constraints, self.model.runtime.schedules))
        if not names:
            return
        first, *others = names
        tried: list[tuple[float, int, tuple[int, ...], _Thrift | None]] = []
        for devices in self._placements(case):
            if len(tried) >= _SAMPLED and min(tried)[0] > _HOPELESS * self.worst_kept:
                break
            seconds, thrift = self._try_thrift(case, devices, *first)
            tried.append((seconds, len(tried), devices, thrift))
        for simple, _, devices, thrift in sorted(tried)[:_PLACED]:
            vain: set[str] = set()
            for name, virtual in others:
                if name not in vain and self._try_thrift(case, devices, name, virtual, thrift)[0] >= simple:
                    vain.add(name)  # more virtual stages will not help where fewer did not

    def _placements(self, case: Degrees) -> Iterator[tuple[int, ...]]:
        """On devices that have times."""
        speeds = {name: 1.0 / self._whole(name, case) for name in self._types(case.tp)}
        known = {node.device: speeds.get(node.device, 0.0) for node in self.model.cluster.nodes}
        few = every_placement(self.model.cluster, case.tp, case.pp * case.dp, _ALL)
        for devices in few or placements(self.model.cluster, case.tp, case.pp, case.dp, known):
            if {self.model.cluster.type_of(device).name for device in devices} <= speeds.keys():
                yield devices

    def _hopeless(self, strategy: Strategy) -> float | None:
        """Seconds at least, if even stages on devices as fast as these in all would be too slow."""
        net = self.model.network(strategy.tp, strategy.pp, strategy.dp, strategy.devices)
        whole = {n: self._whole(n, strategy) for names in net.types for n in names}
        each = [1.0 / sum(1.0 / max(whole[n] for n in names) for names in net.types)] * strategy.pp
        least = self.model.at_least(strategy, each, each)
        return least if least >= self.worst_kept else None

    def _types(self, tp: int) -> list[str]:
        there = {node.device for node in self.model.cluster.nodes}
        return [n for n in self.model.profile.devices if n in there and tp in self.model.profile.degrees(n)]

    def _whole(self, name: str, case: Degrees | Strategy) -> float:
        """Seconds of the whole model on that device type; something to divide by."""
        return max(self.model.rows(name, case.tp, case.microbatch).whole, 1e-300)

    def _try_thrift(
        self, case: Degrees, devices: tuple[int, ...], name: str, virtual: int, known: _Thrift | None = None
    ) -> tuple[float, _Thrift | None]:
        """The best of the ways to save memory: its seconds, and which it is; infinity and None if nothing fits.

        No more is recomputed than has to be, as that only takes time.

        Args:
            known: which one was best under another schedule: the first from there on that fits is taken.
        """
        best: tuple[float, _Thrift | None] = float("inf"), None
        for thrift in _THRIFTS[_THRIFTS.index(known) if known else 0 :]:
            if best[1] is not None and (known or thrift.recompute != best[1].recompute):
                break
            if self._may(thrift, case):
                seconds = self._evaluate(case, devices, name, virtual, thrift)
                best = (seconds, thrift) if seconds < best[0] else best
        return best

    def _may(self, thrift: _Thrift, case: Degrees) -> bool:
        runtime, allows = self.model.runtime, self.constraints.allows
        shard = not thrift.shard or (case.dp > 1 and runtime.shards)
        return (
            shard
            and (runtime.recomputes or not thrift.recompute)
            and allows("recompute", "full" if thrift.recompute else "none")
            and allows("shard_optimizer", thrift.shard)
        )

    def _evaluate(self, case: Degrees, devices: tuple[int, ...], name: str, virtual: int, thrift: _Thrift) -> float:
        """Seconds of a strategy, kept if it is good; if it cannot be, at least so many; infinity: too large."""
        stages = case.pp * virtual
        strategy = Strategy(
            case.tp, case.pp, case.dp, case.microbatch, case.microbatches, name, virtual,
            tuple(range(stages)), devices, (True,) * stages if thrift.recompute else (), thrift.shard,
        )  # fmt: skip
        hopeless = self._hopeless(strategy)
        if hopeless is not None:
            self.counts["bounded"] += 1
            return hopeless
        tried, quick = None, virtual > 1 and not self.short
        for slack in self.slacks:
            cuts = self.balancer.cuts(strategy, slack, quick=quick)
            if cuts is None or cuts == tried:
                continue
            tried = cuts
            least = self.model.at_least(strategy, cuts.stages, cuts.ranks)
            if least >= self.worst_kept:
                self.counts["bounded"] += 1
                return least
            found = self._consider(replace(strategy, cuts=cuts.cuts))
            if quick and not found.fits and found.seconds < self.worst_kept:  # worth cuts made with care
                careful = self.balancer.cuts(strategy, slack)
                found = found if careful is None else self._consider(replace(strategy, cuts=careful.cuts))
            if found.fits:
                return min(found.seconds, self._linked(found, slack, max(cuts.ranks)))
        if tried is None:
            self.counts["too large"] += 1
        if self.best or not (self.short or virtual == 1):
            return float("inf")
        last = self._consider(replace(strategy, cuts=self.balancer.nearest(strategy)))  # by how much it is too large
        return last.seconds if last.fits else float("inf")

    def _linked(self, found: _Found, slack: float, pace: float) -> float:
        """Seconds with cuts that avoid messages, if these take long beside the slowest rank's `pace`."""
        received = max(stage.receives for stage in found.prediction.stages)
        if received * found.strategy.virtual_stages <= _LONG * pace or self.model.runtime.blocking:
            return found.seconds
        flags = (True,) * found.strategy.stages if any(found.strategy.recompute) else ()
        cuts = self.balancer.cuts(replace(found.strategy, recompute=flags), slack, links=True, quick=not self.short)
        if cuts is None or cuts.cuts == found.strategy.cuts:
            return found.seconds
        other = self._consider(replace(found.strategy, cuts=cuts.cuts, recompute=flags))
        return other.seconds if other.fits else found.seconds

    def _consider(self, strategy: Strategy) -> _Found:
        """Predict it; kept if it fits and is good."""
        found = _Found(strategy, self.model.predict(strategy))
        self.counts["simulated"] += 1
        if not found.fits:
            self._missed(strategy, found.prediction)
            return found
        if self.short and any(strategy.recompute) and found.seconds < _HOPELESS * self.worst_kept:
            found = self._relieved(found)
        self._note(found)
        before = self.best.get(found.kind)
        if before is None or found.seconds < before.seconds:
            self.best[found.kind] = found
            if len(self.best) >= self.keep:
                self.worst_kept = heapq.nsmallest(self.keep, (f.seconds for f in self.best.values()))[-1]
        return found

    def _note(self, found: _Found) -> None:
        """The best seconds with so many devices, and with such degrees."""
        s = found.strategy
        devices, degrees = len(s.devices), (s.tp, s.pp, s.dp)
        self.frontier[devices] = min(self.frontier.get(devices, float("inf")), found.seconds)
        self.by_degrees[degrees] = min(self.by_degrees.get(degrees, float("inf")), found.seconds)

    def _missed(self, strategy: Strategy, prediction: Prediction) -> None:
        self.counts["too large"] += 1
        if self.nearest is None or prediction.excess < self.nearest[0]:
            self.nearest = prediction.excess, strategy

    # -- a look around --------------------------------------------------------------------------

    def _refine(self) -> None:
        """Move single cuts of the best strategies, and recompute less, as long as that helps."""
        for found in sorted(self.best.values(), key=lambda f: f.seconds)[: self.keep]:
            if found.strategy.virtual_stages > 1 and (cuts := self.balancer.cuts(found.strategy)) is not None:
                self._consider(replace(found.strategy, cuts=cuts.cuts))
        for found in sorted(self.best.values(), key=lambda f: f.seconds)[: self.keep]:
            if not self.short:  # short chains are relieved as they are found
                self.best[found.kind] = self._relieved(found)
        ranked = sorted(self.best.values(), key=lambda f: f.seconds)
        for place, found in enumerate(ranked[: _TRIED if self.short else _REFINED]):
            few = found.strategy.stages <= _FEW and found.seconds < _HOPELESS * ranked[0].seconds
            if place >= _REFINED and not few:
                continue
            here = self._elsewhere(found) if self.short else found
            while (better := self._neighbour(here)) is not None:
                here = better
            self.best[here.kind] = here
            self._note(here)

    def _elsewhere(self, found: _Found) -> _Found:
        """On other devices, with the same cuts or those made for there."""
        s, best = found.strategy, found
        case = Degrees(s.tp, s.pp, s.dp, s.microbatch, s.microbatches)
        every = every_placement(self.model.cluster, s.tp, s.pp * s.dp, _ELSEWHERE)
        for devices in every or itertools.islice(self._placements(case), _ELSEWHERE):
            if not {self.model.cluster.type_of(device).name for device in devices} <= set(self._types(s.tp)):
                continue  # without times there
            there = replace(s, devices=devices)
            balanced = (self.balancer.cuts(there, slack) for slack in self.slacks)
            made = {cuts.cuts: cuts for cuts in balanced if cuts is not None}
            good = [c for c, x in made.items() if self.model.at_least(there, x.stages, x.ranks) < best.seconds]
            for moved in dict.fromkeys([s.cuts, *good]):
                strategy = replace(there, cuts=moved)
                prediction = self.model.predict(strategy)
                if prediction.fits and prediction.seconds < best.seconds:
                    best = _Found(strategy, prediction)
        return best

    def _neighbour(self, found: _Found) -> _Found | None:
        for strategy in (*self._less_recomputing(found.strategy), *self._both(found.strategy)):
            prediction = self.model.predict(strategy)
            if prediction.fits and prediction.seconds < found.seconds * (1 - 1e-9):
                return _Found(strategy, prediction)
        return None

    def _relieved(self, found: _Found) -> _Found:
        """With each stage in turn, last ones first, computing nothing again if it fits so."""
        for stage in reversed(range(found.strategy.stages)):
            if found.strategy.recomputes(stage) and self.constraints.allows("recompute", "none"):
                less = _toggled(found.strategy, stage)
                prediction = self.model.predict(less)
                if prediction.fits and prediction.seconds <= found.seconds:
                    found = _Found(less, prediction)
        return found

    def _less_recomputing(self, strategy: Strategy) -> Iterator[Strategy]:
        if not self.constraints.allows("recompute", "none"):
            return
        for stage in reversed(range(strategy.stages)):
            if strategy.recomputes(stage):
                yield _toggled(strategy, stage)

    def _both(self, strategy: Strategy) -> Iterator[Strategy]:
        """Cuts moved; where stages recompute and are few, also with any one of them changing its way."""
        allows = self.constraints.allows
        mixed = strategy.recompute and allows("recompute", "none") and allows("recompute", "full")
        for moved in self._moved(strategy):
            yield moved
            for stage in range(strategy.stages if mixed and strategy.stages <= _FEW else 0):
                yield _toggled(moved, stage)

    def _moved(self, strategy: Strategy) -> Iterator[Strategy]:
        """One cut moved by a layer, or, in a short chain, several next to each other."""
        cuts, size = strategy.cuts, self.model.profile.size
        widest = len(cuts) if self.short and len(cuts) <= _FEW else 1
        for width in range(1, widest + 1):
            for place in range(1, len(cuts) - width + 1):
                for step in (-1, 1):
                    moved = (
                        *cuts[:place],
                        *(cut + step for cut in cuts[place : place + width]),
                        *cuts[place + width :],
                    )
                    if all(a < b for a, b in zip(moved, (*moved[1:], size), strict=True)):
                        yield replace(strategy, cuts=moved)

    # -- nothing found --------------------------------------------------------------------------

    def _nothing_allowed(self) -> PlanError:
        cluster, profile = self.model.cluster, self.model.profile
        known: Mapping[str, tuple[int, ...]] = {name: profile.degrees(name) for name in profile.devices}
        return PlanError(
            "some degrees keep the constraints: tp x pp x dp devices, a batch that dp and the microbatch divide, at "
            "least a layer for each stage, and times in the profile for the device types and tensor-parallel degrees",
            f"constraints: {self.constraints}; {cluster.size} devices of {sorted({n.device for n in cluster.nodes})}, "
            f"global batch {self.batch}, {profile.size} layers, times for {known}"
            + f"; no tensor parallelism: {profile.undivided}"
            * bool(profile.undivided),
            "relax the constraints, change the global batch, or profile the model on these devices",
        )

    def _too_large(self) -> PlanError:
        if self.nearest is None:
            return self._nothing_allowed()
        excess, strategy = self.nearest
        return PlanError(
            "a plan fits into the memory of its devices",
            f"none of {self.counts['too large']} does; the nearest ({strategy}) lacks {_bytes(excess)} on one",
            self._help(),
        )

    def _help(self) -> str:
        ways = ["more devices or larger ones"]
        if all(times.tp == 1 for times in self.model.profile.times):
            ways.append("tensor parallelism (smpar.set_tensor_parallelism)")
        if not self.constraints.allows("recompute", "full"):
            ways.insert(0, 'allow recompute "full"')
        if not self.constraints.allows("shard_optimizer", True):
            ways.insert(0, "allow shard_optimizer")
        if self.constraints.microbatch is not None and min(self.constraints.microbatch) > 1:
            ways.insert(0, "allow smaller microbatches")
        return "; or ".join(ways)


def _toggled(strategy: Strategy, stage: int) -> Strategy:
    """With that stage recomputing if it does not, and the other way round."""
    flags = tuple(strategy.recomputes(s) != (s == stage) for s in range(strategy.stages))
    return replace(strategy, recompute=flags if any(flags) else ())


def _bytes(number: float) -> str:
    """For a person; not rounded to nothing."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= 0.1 * size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} bytes"
