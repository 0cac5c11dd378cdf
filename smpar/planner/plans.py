"""Plans: the best strategies found, what each costs, why the others lost; and the file that a run reads.

A plan file is JSON: the strategy, the model's layers by name, the cluster, and the prediction::

    {"smpar_plan": 1, "strategy": {...}, "layers": ["wte", "h.0", ...], "cluster": {...}, "prediction": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smpar.errors import PlanFileError
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel, Prediction
from smpar.planner.parts import Parts
from smpar.planner.plan_parts import FIX, read_layers, read_parts, read_prediction, read_strategy
from smpar.planner.strategy import Strategy

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """A strategy for a model on a cluster, and what it is predicted to cost.

    Attributes:
        layers: names of the model's units, in order; stage k holds those from ``strategy.cuts[k]`` on.
        parts: what a step is made of, by which `smpar simulate` times or executes it; None: not kept.
        why: what it loses against the best plan, in words; empty for the best.
    """

    strategy: Strategy
    prediction: Prediction
    layers: tuple[str, ...]
    cluster: Cluster
    why: str = ""
    parts: Parts | None = None

    @property
    def samples_per_second(self) -> float:
        return self.strategy.global_batch / self.prediction.seconds

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """Layer -> stage."""
        return tuple(sum(i >= cut for cut in self.strategy.cuts) - 1 for i in range(len(self.layers)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return {
            "smpar_plan": VERSION,
            "strategy": asdict(self.strategy),
            "layers": list(self.layers),
            "cluster": self.cluster.to_dict(),
            "prediction": asdict(self.prediction),
            "why": self.why,
            "parts": self.parts.to_dict() if self.parts is not None else None,
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for ``smpar.init(path)``."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_dict(cls, given: Any) -> Plan:
        """Read what `to_dict` gave.

        Raises:
            PlanFileError: it is no plan, of another version, or its parts do not fit together.
            PlanError: its cluster or its timetable is none.
        """
        if not isinstance(given, Mapping) or given.get("smpar_plan") != VERSION:
            found = (
                given.get("smpar_plan", "no key `smpar_plan`") if isinstance(given, Mapping) else type(given).__name__
            )
            raise PlanFileError(f"a plan is a JSON object with `smpar_plan`: {VERSION}", f"{found}", FIX)
        missing = [name for name in ("strategy", "layers", "cluster", "prediction") if name not in given]
        if missing:
            raise PlanFileError("a plan file has all its parts", f"no {missing[0]!r}", FIX)
        try:
            layers = read_layers(given["layers"])
            cluster = Cluster.from_dict(given["cluster"])
            strategy = read_strategy(given["strategy"], len(layers), cluster.size)
            return cls(
                strategy,
                read_prediction(given["prediction"], strategy),
                layers,
                cluster,
                str(given.get("why", "")),
                read_parts(given.get("parts"), strategy),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanFileError(
                "a plan file has the parts that smpar wrote", f"{type(error).__name__}: {error}", FIX
            ) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            PlanFileError: no such file, no JSON, or no plan.
        """
        try:
            given = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanFileError("a plan is a JSON file", f"{path}: {error}", FIX) from None
        return cls.from_dict(given)


@dataclass(frozen=True)
class Plans(Sequence[Plan]):
    """The best plans of a search, the best one first.

    Attributes:
        plans: by predicted seconds.
        counts: how many candidates came to which end: "simulated", "bounded" (cannot be faster than those found),
            "too large" (fit no memory).
        frontier: for each number of devices, the best seconds found with so many.
        seconds: that the search took.
        complete: False if it was interrupted.
        degrees: the best seconds found for each (tp, pp, dp) of which a strategy was simulated.
        model: by which they were predicted; None if that is not known any more.
    """

    plans: tuple[Plan, ...]
    counts: Mapping[str, int]
    frontier: Mapping[int, float]
    seconds: float
    complete: bool = True
    degrees: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    model: CostModel | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, index: Any) -> Any:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __str__(self) -> str:
        return "\n".join(
            f"{number}. {plan.strategy}: {plan.prediction.seconds:.4g} s per step, "
            f"{plan.samples_per_second:.4g} samples/s" + (f" ({plan.why})" if plan.why else "")
            for number, plan in enumerate(self.plans, 1)
        )

    @property
    def best(self) -> Plan:
        return self.plans[0]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plans": [plan.to_dict() for plan in self.plans],
            "counts": dict(self.counts),
            "frontier": {str(devices): seconds for devices, seconds in self.frontier.items()},
            "degrees": [[*degrees, seconds] for degrees, seconds in self.degrees.items()],
            "search_seconds": self.seconds,
            "complete": self.complete,
        }


def explain(model: CostModel, best: Plan, other: Plan) -> str:
    """Why `other` is slower than `best`: the part of its step that costs most of the difference.

    The parts of a step: balanced computing (the same work spread evenly), imbalance (what the busiest rank does more
    than that), waiting (bubble and transfers), reduction, optimizer.
    """
    mine, theirs = parts(model, best), parts(model, other)
    excess = other.prediction.seconds - best.prediction.seconds
    if excess <= 0.0:
        return ""
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    return (
        f"+{100 * excess / best.prediction.seconds:.1f} %: {_WORDS[name]} "
        f"{_told(theirs[name])} against {_told(mine[name])}"
    )


def parts(model: CostModel, plan: Plan) -> dict[str, float]:
    """Seconds of a plan's step by cause; they add up to the whole."""
    prediction = plan.prediction
    busy = model.busy(plan.strategy)
    even, most = sum(busy) / len(busy), max(busy)
    return {
        "computing": even,
        "balance": most - even,
        "waiting": prediction.pipeline - most,
        "reduction": prediction.reduction,
        "optimizer": prediction.seconds - prediction.pipeline - prediction.reduction,
    }


_WORDS = {
    "computing": "computing takes",
    "balance": "uneven stages cost",
    "waiting": "bubble and transfers cost",
    "reduction": "reducing gradients costs",
    "optimizer": "the optimizer's step takes",
}


def _told(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"
