"""The module graph: a model's units in call order, with costs, data flow and shared parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Unit:
    """One unit, as the trace saw it. Costs are of one microbatch, all its calls together.

    Attributes:
        name, kind: its name in the model and its class.
        calls: how often it was called.
        parameter_bytes: of its parameters; shared ones count in each unit that has them.
        flops, forward_seconds, backward_seconds: counted, or measured; with the glue that follows it.
        saved_bytes: kept from its forward for its backward.
        output_shapes: shapes of the tensors its first call gave.
    """

    name: str
    kind: str
    calls: int
    parameter_bytes: int
    flops: float
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    output_shapes: tuple[tuple[int, ...], ...]

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclasses.dataclass(frozen=True)
class Link:
    """A tensor that units hand on: made by ``source``, used by ``targets`` (indices of units).

    Attributes:
        nbytes, elements: of the tensor.
        gradient: whether a gradient comes back.
    """

    source: int
    targets: tuple[int, ...]
    nbytes: int
    elements: int
    gradient: bool


@dataclasses.dataclass(frozen=True)
class Shared:
    """A parameter that several units read."""

    name: str
    nbytes: int
    units: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ModuleGraph:
    """Units in the order of their first call, the tensors between them, and the parameters they share."""

    units: tuple[Unit, ...]
    links: tuple[Link, ...]
    shared: tuple[Shared, ...]
    measured: bool = False

    def __str__(self) -> str:
        rows = [("unit", "class", "calls", "parameters", "GFLOP", "saved", "output")]
        for u in self.units:
            shape = " ".join("x".join(map(str, s)) for s in u.output_shapes[:2])
            rows.append(
                (u.name or "(model)", u.kind, str(u.calls), size(u.parameter_bytes), f"{u.flops / 1e9:.3g}",
                 size(u.saved_bytes), shape)
            )  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"shared: {s.name} by " + ", ".join(self.units[u].name for u in s.units) for s in self.shared]
        return "\n".join(lines)


def size(nbytes: float) -> str:
    """Bytes for a person: ``12.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def parameter_bytes(module: nn.Module) -> int:
    return sum(nbytes(p) for p in module.parameters())


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def shared_parameters(units: Sequence[nn.Module], names: dict[int, str]) -> tuple[Shared, ...]:
    """Parameters that are in more than one of ``units``.

    Args:
        names: id of a parameter -> its name.
    """
    holders: dict[int, list[int]] = {}
    tensors: dict[int, Tensor] = {}
    for index, unit in enumerate(units):
        for p in unit.parameters():
            holders.setdefault(id(p), []).append(index)
            tensors[id(p)] = p
    return tuple(
        Shared(names.get(key, "?"), nbytes(tensors[key]), tuple(indices))
        for key, indices in holders.items()
        if len(indices) > 1
    )
