"""What a step is made of: enough to time it again without the profile, or to execute it with kernels that sleep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from smpar.planner.pipeline import Pipeline


@dataclass(frozen=True)
class Parts:
    """A strategy's step, in seconds.

    Attributes:
        pipelines: one for each kind of replica.
        kinds: replica -> its kind, an index of `pipelines`.
        reductions: by stage, the reduction of its gradients over the replicas.
        tied: tied parameters on several ranks: their stages, and the sum of their gradients over those.
        steps: by pipeline rank, from its last reduction to the end: the optimizer, and what each step costs besides.
    """

    pipelines: tuple[Pipeline, ...]
    kinds: tuple[int, ...]
    reductions: tuple[float, ...]
    tied: tuple[tuple[tuple[int, ...], float], ...]
    steps: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Parts:
        """Read what `to_dict` gave, perhaps by way of JSON.

        Raises:
            KeyError, TypeError, PlanError: it is something else.
        """
        pipelines = []
        for pipeline in given["pipelines"]:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in dict(pipeline).items()}
            pipelines.append(Pipeline(**fields))
        return cls(
            tuple(pipelines),
            tuple(given["kinds"]),
            tuple(given["reductions"]),
            tuple((tuple(stages), seconds) for stages, seconds in given["tied"]),
            tuple(given["steps"]),
        )
