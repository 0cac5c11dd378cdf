"""Plans: the best strategies found, what each costs, why the others lost; and the file that a run reads.

A plan file is JSON: the strategy, the model's layers by name, the cluster, and the prediction::

    {"smpar_plan": 1, "strategy": {...}, "layers": ["wte", "h.0", ...], "cluster": {...}, "prediction": {...}}
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smpar.errors import PlanFileError, SmparError
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel, Prediction
from smpar.planner.parts import Parts
from smpar.planner.reading import MANY
from smpar.planner.records import read_as
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
            PlanFileError: it is no plan, of another version, or its parts contradict each other.
            ClusterError: its cluster does.
        """
        if not isinstance(given, Mapping) or given.get("smpar_plan") != VERSION:
            found = (
                given.get("smpar_plan", "no key `smpar_plan`") if isinstance(given, Mapping) else type(given).__name__
            )
            raise PlanFileError(f"a plan is a JSON object with `smpar_plan`: {VERSION}", f"{found}", _FIX)
        for key in _NEEDED:
            if key not in given:
                raise PlanFileError(f"a plan has the keys {', '.join(_NEEDED)}", f"no {key!r}", _FIX)
        read = functools.partial(read_as, error=PlanFileError, fix=_FIX)
        plan = cls(
            read(Strategy, given["strategy"], "strategy"),
            read(Prediction, given["prediction"], "prediction"),
            read(tuple[str, ...], given["layers"], "layers"),
            Cluster.from_dict(given["cluster"]),
            read(str, given.get("why", ""), "why"),
            read(Parts, given["parts"], "parts") if given.get("parts") is not None else None,
        )
        _check(plan)
        return plan

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            PlanFileError: no such file, no JSON, or no plan.
        """
        try:
            given = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanFileError("a plan is a JSON file", f"{path}: {error}", _FIX) from None
        return cls.from_dict(given)


_FIX = "write one with `smpar plan ... -o plan.json`"
_NEEDED = ("strategy", "layers", "cluster", "prediction")


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
        f"{_milli(theirs[name])} against {_milli(mine[name])}"
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


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _check(plan: Plan) -> None:
    """Whether the parts of a file fit together.

    Raises:
        PlanFileError: they do not.
    """
    s = plan.strategy
    numbers = {"tp": s.tp, "pp": s.pp, "dp": s.dp, "microbatch": s.microbatch, "microbatches": s.microbatches,
               "virtual_stages": s.virtual_stages}  # fmt: skip
    for name, value in numbers.items():
        _require(1 <= value <= MANY, f"strategy.{name} is a whole number from 1 to {MANY}", f"{value}")
    places, devices, count = s.tp * s.pp * s.dp, set(s.devices), plan.cluster.size
    _require(
        len(s.devices) == len(devices) == places and devices <= set(range(count)),
        "a plan has one device of its cluster for each place of its degrees",
        f"{len(s.devices)} devices, {len(devices)} different ones from {min(devices, default=0)} to "
        f"{max(devices, default=0)}, for {s.tp} x {s.pp} x {s.dp} places on a cluster of {count}",
    )
    _require(
        len(set(plan.layers)) == len(plan.layers) and all(plan.layers),
        "a plan names each of its layers once",
        f"{next((x for x in plan.layers if not x or plan.layers.count(x) > 1), '')!r} of {len(plan.layers)}",
    )
    try:
        ranks = s.ranks
    except SmparError as error:
        raise PlanFileError(error.rule, error.values, error.fix) from None
    ascending = s.cuts[:1] == (0,) and list(s.cuts) == sorted(set(s.cuts)) and s.cuts[-1] < len(plan.layers)
    _require(
        len(s.cuts) == len(ranks) and ascending,
        "a plan cuts its layers into as many stages as its degrees say, from 0 on, ascending",
        f"cuts {s.cuts} of {len(plan.layers)} layers for {s.stages} stages",
    )
    found = plan.prediction
    lengths = (len(s.recompute) or s.stages, len(found.stages), len(found.memory), len(found.limits))
    _require(
        lengths == (s.stages, s.stages, s.pp, s.pp),
        "a plan says of each stage whether it is recomputed and what it takes, and of each rank its memory",
        f"{lengths[0]} and {lengths[1]} of {s.stages} stages, {lengths[2]} and {lengths[3]} of {s.pp} ranks",
    )
    _require(found.seconds > 0, "a plan's step takes some time", f"prediction.seconds {found.seconds}")


def _require(holds: bool, rule: str, values: str) -> None:
    if not holds:
        raise PlanFileError(rule, values, _FIX)
