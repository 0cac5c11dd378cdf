"""Random models and clusters with their plans, for tests of what shows and runs them."""

from __future__ import annotations

import random

from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.plans import Plans
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times
from smpar.planner.search import search
from smpar.planner.space import Constraints


def some_cluster(draw: random.Random) -> Cluster:
    """Two nodes of different devices."""
    return Cluster.from_dict(
        {
            "devices": {
                "fast": {"memory_gib": 16, "peak_tflops": 100, "memory_gbytes_per_s": 900},
                "slow": {"memory_gib": 8, "peak_tflops": 40, "memory_gbytes_per_s": 300},
            },
            "nodes": [
                {"name": f"{device} <node>", "device": device, "count": draw.choice([2, 4]), "intra_gbit_per_s": 200,
                 "inter_gbit_per_s": 25, "inter_latency_us": 20}
                for device in ("fast", "slow")
            ],
        }
    )  # fmt: skip


def some_profile(draw: random.Random, layers: int = 12) -> Profile:
    """Layers in a chain with skips, the first and last one tied; times on both devices of `some_cluster`."""
    names = ["embed & <b>", *(f"h.{i}" for i in range(layers - 2)), "head"]
    made = tuple(Layer(name, draw.uniform(1e6, 2e7), draw.uniform(1e6, 1e8), transient=1e7) for name in names)
    tensors = tuple(Tensor(i, (i + 1, min(i + 3, layers - 1)), draw.uniform(1e4, 1e6)) for i in range(layers - 1))
    forward = [draw.uniform(1e-3, 2e-2) for _ in names]

    def table(slower: float, size: float) -> tuple[float, ...]:
        return tuple(slower * (1e-4 + size * x) for x in forward)

    times = tuple(
        Times(device, 1, (1.0, 2.0), (table(s, 1), table(s, 2)), (table(2 * s, 1), table(2 * s, 2)),
              (table(s, 1), table(s, 2)))
        for device, s in (("fast", 1.0), ("slow", 2.5))
    )  # fmt: skip
    return Profile(made, tensors, times, (Tied((0, layers - 1), 1e6),))


def some_plans(seed: int, batch: int = 16, keep: int = 5, **fix: object) -> Plans:
    """What a search finds for them."""
    draw = random.Random(seed)
    return search(CostModel(some_profile(draw), some_cluster(draw)), batch, Constraints.make(fix), keep)
