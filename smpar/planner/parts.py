"""What a step is made of: enough to time it again without the profile, or to execute it with kernels that sleep."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from smpar.planner.pipeline import Pipeline


class Memory(NamedTuple):
    """Bytes on one device: state of the parameters, what is kept of microbatches, what a layer needs while it runs."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self)


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
        """For JSON; `smpar.planner.records` reads it back."""
        return asdict(self)
