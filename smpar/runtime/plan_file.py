"""``smpar.init("plan.json")``: the configuration that a plan stands for.

::

    plan.json ──▶ degrees, microbatches, pipeline, virtual_stages     as if the user had given them
             └──▶ Planned: stage of each unit, rank at each place     see smpar.runtime.planned, smpar.mesh
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from smpar.config import ALIASES, Config, Planned
from smpar.errors import ConfigError, NotBuiltYet, PlanFileError
from smpar.planner.plans import Plan

log = logging.getLogger("smpar")

# What a plan decides besides the keys that it sets; with these values a key says nothing else.
_DECIDED = {
    name: Config.__dataclass_fields__[name].default
    for name in ("placement_strategy", "auto_partition", "default_partition", "optimize", "skip_tracing")
}


def with_plan(given: Any) -> dict[str, Any]:
    """The user's configuration with what its plan decides; itself, if it names no plan.

    Args:
        given: keys and values, or the path of a plan.

    Raises:
        PlanFileError: there is no such file, or it is no plan.
        ConfigError: a key contradicts the plan, or the ranks of a tensor-parallel group cannot share its microbatches.
        NotBuiltYet: the plan asks for something that this version does not do.
    """
    if isinstance(given, (str, os.PathLike)):
        given = {"plan": os.fspath(given)}
    given = dict(given)
    if given.get("plan") is None or isinstance(given["plan"], Planned):
        return given
    plan = _read(given.pop("plan"))
    require_built(plan)
    s = plan.strategy
    decided = {
        "pipeline_parallel_degree": s.pp,
        "tensor_parallel_degree": s.tp,
        "microbatches": s.microbatches,
        "pipeline": s.schedule,
        "virtual_stages": s.virtual_stages,
    }
    for key, value in given.items():
        name = ALIASES.get(key, key)
        wanted = decided.get(name, _DECIDED.get(name, value))
        if value != wanted:
            raise ConfigError(
                "a plan decides degrees, schedule, partition and placement; other keys must not say otherwise",
                f"{key} = {value!r}, and {wanted!r} by the plan ({s})",
                f"leave out {key!r}, or plan with it: smpar plan ... --fix",
            )
    if s.microbatch % s.tp and not given.get("prescaled_batch", False):
        raise ConfigError(
            "unless prescaled_batch, each rank of a tensor-parallel group brings its part of a microbatch",
            f"microbatches of {s.microbatch} samples for {s.tp} ranks ({s})",
            'smpar.init({"plan": ..., "prescaled_batch": True}), and give the ranks of a group the same batch '
            "(by smpar.rdp_rank)",
        )
    for alias in ALIASES:
        given.pop(alias, None)
    return given | decided | {"plan": planned(plan)}


def planned(plan: Plan) -> Planned:
    """What a run has to know of a plan.

    torchrun numbers ranks machine by machine, as the cluster numbers devices; devices that the plan leaves out get no
    process.
    """
    s = plan.strategy
    used = sorted(s.devices)
    rank = {device: number for number, device in enumerate(used)}
    nodes = [plan.cluster.node_of(device) for device in used]
    return Planned(
        tuple(zip(plan.layers, plan.stage_of_layer, strict=True)),
        tuple(rank[device] for device in s.devices),
        tuple(nodes.count(node) for node in dict.fromkeys(nodes)),
        s.microbatch * s.microbatches,
    )


@functools.cache
def compare_samples(plan: Planned, samples: int) -> None:
    """Warn, once for each number, if a replica's step has another number of samples than the plan."""
    if samples != plan.samples:
        log.warning(
            "smpar: a step takes %d samples of each replica, and the plan is made for %d: its times and memory are "
            "predicted for that", samples, plan.samples,
        )  # fmt: skip


def _read(source: Any) -> Plan:
    if isinstance(source, Plan):
        return source
    if isinstance(source, (str, os.PathLike)):
        return Plan.from_file(os.fspath(source))
    if isinstance(source, Mapping):
        return Plan.from_dict(source)
    raise PlanFileError(
        "`plan` is a plan of smpar.plan, its dict, or the path of its file",
        f"{type(source).__name__}",
        'smpar.init({"plan": "plan.json"})',
    )


def require_built(plan: Plan) -> None:
    """Raise NotBuiltYet if the plan asks for something that this version does not do."""
    s = plan.strategy
    asked = {
        "recompute forwards": ("recompute", any(s.recompute), "recompute=none"),
        "shard the optimizer state": ("shard_optimizer", s.shard_optimizer, "shard_optimizer=false"),
    }
    for what, (found, yes, fix) in asked.items():
        if yes:
            raise NotBuiltYet(
                f"this version does not {what}", f"{found} in the plan ({s})", f"plan without: smpar plan --fix {fix}"
            )
