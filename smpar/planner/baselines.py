"""What others would choose: rules and searches to compare the planner with. Nothing of smpar plans by them.

==============  ==========================================================  ======================================
name            degrees and size of microbatches                            cuts
==============  ==========================================================  ======================================
amp             all on all devices, by AMP's closed form                    by AMP's closed form
uniform         the best simulated                                          equal numbers of layers
megatron        tensor parallelism through a node; then pipeline until it   equal numbers of layers
                fits; then replicas; microbatches the best simulated
megatron_least  as little model parallelism as fits, tensor first           equal numbers of layers
smp             the best simulated                                          SMP's tree, by forward and backward
==============  ==========================================================  ======================================

All of them know what fits: each takes its first choice that does, as a user would after some tries, and recomputes only
if nothing fits otherwise. Only amp places device types; the others take devices in the cluster's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from smpar.errors import PlanError
from smpar.planner.amp_form import AmpCosts, amp_candidates
from smpar.planner.cost import CostModel
from smpar.planner.smp_tree import smp_cuts, tree
from smpar.planner.space import Constraints, Degrees, degrees, schedules
from smpar.planner.strategy import Strategy

Baseline = Callable[[CostModel, int, Constraints], Strategy]
"""Of a model on its cluster, a global batch and constraints, the strategy that it chooses.

Raises:
    PlanError: nothing that it looks at is allowed and fits.
"""

ALL = Constraints()


def amp(model: CostModel, global_batch: int, constraints: Constraints = ALL, costs: AmpCosts | None = None) -> Strategy:
    """AMP (arXiv 2210.07297): the best by its own closed form that fits.

    Args:
        costs: the model as AMP has measured it; None: of the profile.
    """
    found = sorted(
        amp_candidates(model, costs or AmpCosts.of(model.profile), global_batch, constraints), key=lambda pair: pair[0]
    )
    for recompute in (False, True):
        for _, strategy in found:
            thrifty = _recomputing(strategy, recompute)
            if _may(constraints, recompute) and model.predict(thrifty).fits:
                return thrifty
    raise _none("amp", constraints)


def uniform(model: CostModel, global_batch: int, constraints: Constraints = ALL) -> Strategy:
    """Equal numbers of layers on all stages; everything else the best simulated."""
    return _best(
        "uniform", model, constraints, lambda: _even(model, _degrees(model, global_batch, constraints), constraints)
    )


def smp(model: CostModel, global_batch: int, constraints: Constraints = ALL) -> Strategy:
    """SMP's tree partition with D'Hondt (arXiv 2111.05972, section 3); everything else the best simulated.

    SMP leaves degrees and microbatches to the user; the best ones are the fair choice. Its cost of a module is a
    weighted sum of time and memory; here it is the time.
    """
    return _best(
        "smp", model, constraints, lambda: _trees(model, _degrees(model, global_batch, constraints), constraints)
    )


def megatron(model: CostModel, global_batch: int, constraints: Constraints = ALL) -> Strategy:
    """Megatron's rule of thumb (arXiv 2104.04473, takeaways 1 to 3), tensor parallelism through a whole node.

    On equal nodes takeaway 1 says: tensor parallelism inside a node, pipelines across; takeaway 2: model parallelism
    until it fits, data parallelism for the rest; takeaway 3: a microbatch size by trying.
    """
    cases = _whole(model, global_batch, constraints)
    widest = max((case.tp for case in cases), default=1)
    return _ruled("megatron", model, [case for case in cases if case.tp == widest], constraints)


def megatron_least(model: CostModel, global_batch: int, constraints: Constraints = ALL) -> Strategy:
    """The same with takeaway 2 before takeaway 1: a narrower group if the model fits there, and pipelines only then."""
    cases = _whole(model, global_batch, constraints)
    widest = max((case.tp for case in cases), default=1)
    return _ruled("megatron_least", model, [case for case in cases if case.pp == 1 or case.tp == widest], constraints)


BASELINES: Mapping[str, Baseline] = {
    "amp": amp,
    "uniform": uniform,
    "megatron": megatron,
    "megatron_least": megatron_least,
    "smp": smp,
}
"""By name."""


# ---- candidates ------------------------------------------------------------------------------------------------


def _degrees(model: CostModel, global_batch: int, constraints: Constraints) -> list[Degrees]:
    cluster, profile = model.cluster, model.profile
    known = {node.device for node in cluster.nodes}
    tensor = set.intersection(*(set(profile.degrees(name)) for name in known))
    tensor = tensor if model.runtime.tensor else tensor & {1}
    return list(degrees(cluster, profile.size, tuple(tensor), global_batch, constraints))


def _whole(model: CostModel, global_batch: int, constraints: Constraints) -> list[Degrees]:
    """Of all degrees, those that use the most devices."""
    cases = _degrees(model, global_batch, constraints)
    most = max((case.devices for case in cases), default=0)
    return [case for case in cases if case.devices == most]


def _ruled(name: str, model: CostModel, cases: list[Degrees], constraints: Constraints) -> Strategy:
    """The smallest model-parallel size that fits, at its best microbatch size."""
    for recompute in (False, True):
        for size in sorted({case.tp * case.pp for case in cases}):
            here = [case for case in cases if case.tp * case.pp == size]
            found = _fastest(model, _even(model, here, constraints, interleaved=True), constraints, recompute)
            if found is not None:
                return found
    raise _none(name, constraints)


def _even(
    model: CostModel, cases: list[Degrees], constraints: Constraints, interleaved: bool = False
) -> Iterator[Strategy]:
    size = model.profile.size
    names = ("1f1b", "interleaved_1f1b") if interleaved and "interleaved_1f1b" in model.runtime.schedules else ("1f1b",)
    for case in cases:
        for name, virtual in schedules(case.pp, size, constraints, names):
            stages = case.pp * virtual
            yield _strategy(model, case, name, virtual, tuple(i * size // stages for i in range(stages)))


def _trees(model: CostModel, cases: list[Degrees], constraints: Constraints) -> Iterator[Strategy]:
    names = [layer.name for layer in model.profile.layers]
    known: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for case in cases:
        for name, virtual in schedules(case.pp, model.profile.size, constraints, ("1f1b",)):
            stages = case.pp * virtual
            key = case.tp, case.microbatch, stages
            if key not in known:
                kinds = sorted({node.device for node in model.cluster.nodes})
                seconds = model.layer_seconds(model.slowest(kinds, case.tp), case.tp, case.microbatch, again=False)
                known[key] = smp_cuts(tree(names, seconds), stages)
            if len(known[key]) == stages:
                yield _strategy(model, case, name, virtual, known[key])


def _strategy(model: CostModel, case: Degrees, name: str, virtual: int, cuts: tuple[int, ...]) -> Strategy:
    """On the cluster's first devices, stage by stage."""
    starts, nodes = model.cluster.starts, model.cluster.nodes
    groups = (
        range(start + k, start + k + case.tp)
        for start, node in zip(starts, nodes, strict=True)
        for k in range(0, node.count - case.tp + 1, case.tp)
    )
    devices = tuple(device for group in islice(groups, case.pp * case.dp) for device in group)
    return Strategy(case.tp, case.pp, case.dp, case.microbatch, case.microbatches, name, virtual, cuts, devices)


# ---- choices ---------------------------------------------------------------------------------------------------


def _best(
    name: str, model: CostModel, constraints: Constraints, candidates: Callable[[], Iterator[Strategy]]
) -> Strategy:
    for recompute in (False, True):
        found = _fastest(model, candidates(), constraints, recompute)
        if found is not None:
            return found
    raise _none(name, constraints)


def _fastest(
    model: CostModel, candidates: Iterator[Strategy], constraints: Constraints, recompute: bool
) -> Strategy | None:
    """The one that is simulated to be fastest of those that fit."""
    if not _may(constraints, recompute):
        return None
    best, found = float("inf"), None
    bounded = sorted(((_bound(model, s), i, s) for i, s in enumerate(candidates)), key=lambda candidate: candidate[:2])
    for bound, _, strategy in bounded:
        if bound >= best:
            break
        thrifty = _recomputing(strategy, recompute)
        prediction = model.predict(thrifty)
        if prediction.fits and prediction.seconds < best:
            best, found = prediction.seconds, thrifty
    return found


def _bound(model: CostModel, strategy: Strategy) -> float:
    """Seconds that the busiest rank computes, at least: at the speed of the fastest device type."""
    kinds = {node.device for node in model.cluster.nodes}
    most = float("inf")
    for kind in kinds:
        rows = model.rows(kind, strategy.tp, strategy.microbatch)
        sums = [0.0] * strategy.pp
        for stage, rank in enumerate(strategy.ranks):
            a, b = strategy.cuts[stage], (*strategy.cuts[1:], model.profile.size)[stage]
            sums[rank] += float(rows.forward[b] - rows.forward[a] + rows.backward[b] - rows.backward[a])
        most = min(most, max(sums))
    return strategy.microbatches * most


def _recomputing(strategy: Strategy, recompute: bool) -> Strategy:
    return replace(strategy, recompute=(True,) * strategy.stages) if recompute else strategy


def _may(constraints: Constraints, recompute: bool) -> bool:
    return constraints.allows("recompute", "full" if recompute else "none")


def _none(name: str, constraints: Constraints) -> PlanError:
    return PlanError(
        "a baseline has a strategy that is allowed and fits",
        f"{name} has none; constraints: {constraints}",
        "relax the constraints, or give more devices",
    )
