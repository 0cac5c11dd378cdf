"""``smpar.plan``: from a model and a cluster to the best plans; no device of that cluster is needed.

model, batch ──trace──▶ Profile ──search──▶ Plans ──▶ plan.json ──▶ smpar.init
             cluster ──────┴─────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smpar.describe.numbers import duration
from smpar.errors import PlanError
from smpar.observe.progress import Progress
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.hardware import DATA_SHEET, PROBED
from smpar.planner.plans import Plans
from smpar.planner.profile import Profile
from smpar.planner.search import search
from smpar.planner.space import Constraints, tensor_degrees

if TYPE_CHECKING:
    from torch import nn

BUILT: dict[str, Any] = {"recompute": "none", "shard_optimizer": False}
"""What this version runs; `plan` keeps to it unless it is told otherwise."""


def plan(
    model: nn.Module | Profile | str | Path,
    batch: Any = (),
    cluster: Cluster | str | Path = "",
    global_batch: int = 0,
    *,
    step: Callable[..., Any] | None = None,
    fix: Mapping[str, Any] | None = None,
    keep: int = 10,
    shown: bool = True,
) -> Plans:
    """Find how a model trains fastest on a cluster (AMP, arXiv 2210.07297, with a simulation as its cost).

    ::

        plans = smpar.plan(model, (inputs, labels), "p3.8xlarge*3", global_batch=64, step=loss_of)
        print(plans)
        plans.best.save("plan.json")      # then, under torchrun: smpar.init("plan.json")

    Args:
        model: a module, which may be on the meta device, or its profile (or the profile's file), measured by
            ``smpar profile``. Tensor parallelism divides what is marked for it (``smpar.set_tensor_parallelism``).
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict of them by name; a few samples
            along the first axis. Not used with a profile.
        cluster: a `Cluster`, its file, or ready ones by name: ``"8xh100"``, ``"p3.8xlarge*2+g4dn.12xlarge"``.
        global_batch: samples of a step, over all replicas.
        step: ``step(model, *batch)`` calls the model and gives the loss; None calls the model alone.
        fix: what is decided already: ``{"tp": 1, "pp": [2, 4], "schedule": "1f1b"}``; see
            `smpar.planner.space.Constraints` for the names. Unless they are among them, recomputation and sharding of
            the optimizer's state are left out, as `smpar.init` does not run them yet:
            ``{"recompute": ["none", "full"]}`` plans with it all the same.
        keep: how many plans to return at most.
        shown: whether progress is shown, on standard error.

    Returns:
        The best plans, best first. Interrupted (Ctrl-C) while it searches, the best so far.

    Raises:
        PlanError: nothing is allowed, or nothing fits: by how much, and what would help.
        ClusterError, ProfileError: a file is missing or broken.
        CommandError: the batch cannot be cut into microbatches, or the model does not run.
    """
    if not isinstance(keep, int) or keep < 1:
        raise PlanError("at least one plan is kept", f"{keep=}", "keep=10")
    machines = cluster if isinstance(cluster, Cluster) else Cluster.from_file(cluster)
    constraints = Constraints.make({**BUILT, **(fix or {})})
    profile = _profile(model, batch, machines, step, shown, tensor_degrees(machines, constraints))
    with Progress("planning", "degrees looked at", shown) as progress:
        return search(
            CostModel(profile, machines),
            global_batch,
            constraints,
            keep,
            lambda _, whole, best: progress.advance(
                f"of {whole}" + (f", best {duration(best)} per step" if best < float("inf") else "")
            ),
        )


def _profile(
    model: Any, batch: Any, cluster: Cluster, step: Callable[..., Any] | None, shown: bool, degrees: Sequence[int]
) -> Profile:
    if isinstance(model, Profile):
        return model
    if isinstance(model, (str, Path)):
        return Profile.from_file(model)
    from smpar.probe.counted import count_profile  # a plan of a profile needs no torch, which takes seconds to load

    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (_arguments(batch), {})
    reached = PROBED if cluster.measured else DATA_SHEET
    with Progress("tracing", "calls", shown) as progress:
        return count_profile(model, args, kwargs, cluster.types, step, reached, progress.advance, degrees)


def _arguments(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
