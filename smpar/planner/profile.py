"""What a model costs: a chain of layers, their times by device type, tensor-parallel degree and microbatch size.

    layer        0 ──▶ 1 ──▶ 2 ──▶ 3        tensors: 0→1, 1→2, 2→3, and 0→3 (a skip)
                 └─────────────────▲        tied: layers 0 and 3 share a parameter

As JSON, with seconds as rows of one number per layer, one row per microbatch size::

    {"layers": [{"name": "embed", "parameters": 54558720, "saved": 4194304}, ...],
     "tensors": [{"source": 0, "targets": [1], "elements": 1048576}, ...],
     "tied": [{"layers": [0, 28], "parameters": 53510144}],
     "times": [{"device": "T4", "tp": 1, "microbatches": [1, 4], "forward": [[...], [...]], "backward": [...]}]}
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from smpar.errors import ProfileError
from smpar.planner.records import read_as


@dataclass(frozen=True)
class Layer:
    """A unit of the model.

    Attributes:
        name: for people.
        parameters: elements; a tied one counts in each layer that has it.
        whole_parameters: those of them that tensor parallelism does not divide.
        saved: bytes kept from its forward to its backward, per sample.
        whole_saved: the part of them that tensor parallelism does not divide.
        output: bytes per sample of its output, which is what stays if its inside is recomputed.
        transient: bytes per sample that it needs only while it runs.
    """

    name: str
    parameters: float
    saved: float = 0.0
    whole_parameters: float = 0.0
    whole_saved: float = 0.0
    output: float = 0.0
    transient: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """A tensor that layer `source` makes and later (or earlier) layers `targets` use.

    Attributes:
        elements: per sample.
        gradient: whether a gradient comes back.
    """

    source: int
    targets: tuple[int, ...]
    elements: float
    gradient: bool = True


@dataclass(frozen=True)
class Tied:
    """Layers that share so many parameters."""

    layers: tuple[int, ...]
    parameters: float


@dataclass(frozen=True)
class Times:
    """Seconds on one device type at one tensor-parallel degree, collectives of tensor parallelism included.

    Attributes:
        device: name of the device type.
        tp: tensor-parallel degree.
        microbatches: sizes in samples, ascending.
        forward: ``forward[k][i]`` is layer i's seconds for a microbatch of ``microbatches[k]`` samples.
        backward: the same of the whole backward.
        weight: the part of `backward` that gives gradients of weights and may be run later; empty: unknown, not split.
    """

    device: str
    tp: int
    microbatches: tuple[float, ...]
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    weight: tuple[tuple[float, ...], ...] = ()


class Seconds(NamedTuple):
    """By layer, for one microbatch; `weight` is part of `backward`."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """A model as the planner sees it.

    Raises:
        ProfileError: the parts contradict each other, or a number means nothing.
    """

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    times: tuple[Times, ...]
    tied: tuple[Tied, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def size(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Device types with times, in their order."""
        return tuple(dict.fromkeys(t.device for t in self.times))

    def degrees(self, device: str) -> tuple[int, ...]:
        """Tensor-parallel degrees with times on that device type."""
        return tuple(sorted(t.tp for t in self.times if t.device == device))

    def times_of(self, device: str, tp: int) -> Times:
        """The times measured there.

        Raises:
            ProfileError: there are none.
        """
        for times in self.times:
            if (times.device, times.tp) == (device, tp):
                return times
        raise ProfileError(
            "a profile has times for each device type and tensor-parallel degree that a plan uses",
            f"none for {device!r} at tp {tp}; there are {sorted({(t.device, t.tp) for t in self.times})}",
            f"measure them on that device (`smpar profile`), or leave {device!r} at tp {tp} out of the search",
        )

    def seconds(self, device: str, tp: int, microbatch: float, fixed: float = 0.0) -> Seconds:
        """Times of a microbatch of so many samples: straight lines through the sizes measured, never below 0.

        Args:
            device, tp: as in `times_of`.
            microbatch: samples.
            fixed: where one size was measured only, the share of its time that does not grow with the size.
        """
        times = self.times_of(device, tp)
        backward = _at(times.microbatches, times.backward, microbatch, fixed)
        weight = _at(times.microbatches, times.weight, microbatch, fixed) if times.weight else (0.0,) * self.size
        return Seconds(
            _at(times.microbatches, times.forward, microbatch, fixed),
            backward,
            tuple(map(min, weight, backward)),  # lines through measured times may cross beyond them
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Profile:
        """Read what `to_dict` gave.

        Raises:
            ProfileError: an unknown or missing key, a value of another type; and as the constructor.
        """
        return read_as(cls, given, "a profile", ProfileError, "correct it, or measure it again with `smpar profile`")

    @classmethod
    def from_file(cls, path: str | Path) -> Profile:
        """Read a JSON file.

        Raises:
            ProfileError: no such file, or no JSON; and as `from_dict`.
        """
        try:
            given = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ProfileError(
                "a profile is a JSON file", f"{path}: {error}", "write one with `smpar profile`"
            ) from None
        return cls.from_dict(given)


def _at(sizes: Sequence[float], rows: Sequence[Sequence[float]], size: float, fixed: float) -> tuple[float, ...]:
    """Rows of times interpolated, or extrapolated along the nearest piece."""
    if len(sizes) == 1:
        factor = fixed + (1.0 - fixed) * size / sizes[0]
        return tuple(t * factor for t in rows[0])
    high = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
    share = (size - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
    return tuple(max(0.0, a + (b - a) * share) for a, b in zip(rows[high - 1], rows[high], strict=True))


def _check(profile: Profile) -> None:
    count = len(profile.layers)
    if not count or not profile.times:
        raise ProfileError(
            "a profile has at least one layer, and times on at least one device type",
            f"{count} layers, {len(profile.times)} tables of times",
            "measure the model with `smpar profile`",
        )
    for layer in profile.layers:
        for name in ("parameters", "saved", "whole_parameters", "whole_saved", "output", "transient"):
            _number(getattr(layer, name), f"{name} of layer {layer.name!r}")
        for part, whole in (("whole_parameters", "parameters"), ("whole_saved", "saved")):
            if getattr(layer, part) > getattr(layer, whole):
                raise ProfileError(
                    f"{part} are a part of {whole}",
                    f"{getattr(layer, part):g} of {getattr(layer, whole):g} in layer {layer.name!r}",
                    f"correct {part}",
                )
    for i, tensor in enumerate(profile.tensors):
        _number(tensor.elements, f"elements of tensor {i}")
        _indices((tensor.source, *tensor.targets), count, f"tensor {i}")
    for i, tied in enumerate(profile.tied):
        _number(tied.parameters, f"parameters of tied {i}")
        _indices(tied.layers, count, f"tied {i}")
        for index in tied.layers:
            if tied.parameters > profile.layers[index].parameters:
                raise ProfileError(
                    "tied parameters count in each layer that has them",
                    f"tied {i}: {tied.parameters:g} of {profile.layers[index].parameters:g} in layer {index}",
                    f"add them to layer {index}, or correct `tied`",
                )
    for times in profile.times:
        _check_times(times, count)
    tables = [(t.device, t.tp) for t in profile.times]
    if len(set(tables)) < len(tables):
        twice = next(table for table in tables if tables.count(table) > 1)
        raise ProfileError(
            "a profile has one table of times for each device type and tensor-parallel degree",
            f"two for {twice[0]!r} at tp {twice[1]}",
            "remove one, or put its rows into the other",
        )


def _check_times(times: Times, count: int) -> None:
    where = f"times of {times.device!r} at tp {times.tp}"
    sizes = times.microbatches
    if times.tp < 1 or not sizes or list(sizes) != sorted(set(sizes)) or not sizes[0] > 0:
        raise ProfileError(
            "times belong to a tensor-parallel degree of at least 1 and to ascending microbatch sizes",
            f"{where}: microbatches {sizes}",
            "give microbatches like [1, 2, 4]",
        )
    for name, rows in (("forward", times.forward), ("backward", times.backward), ("weight", times.weight)):
        if name == "weight" and not rows:
            continue
        if len(rows) != len(sizes) or any(len(row) != count for row in rows):
            raise ProfileError(
                "times have a row for each microbatch size, and a number for each layer in it",
                f"{where}, {name}: rows of {[len(row) for row in rows]} for {len(sizes)} sizes and {count} layers",
                "every layer needs a cost; give 0.0 for what takes no time",
            )
        for size, row in zip(sizes, rows, strict=True):
            for i, value in enumerate(row):
                _number(value, f"{name} of layer {i} at microbatch {size} ({where})")
    for row, whole in zip(times.weight, times.backward, strict=False):
        for i, (part, all_) in enumerate(zip(row, whole, strict=True)):
            if part > all_:
                raise ProfileError(
                    "the weights' part is inside the whole backward", f"layer {i}: {part} > {all_}", "correct `weight`"
                )


def _number(value: Any, name: str) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST
    if not good:
        raise ProfileError(
            f"costs are numbers, not negative and at most {_MOST:g}", f"{name} is {value!r}", "measure it again"
        )


_MOST = 1e15  # a petabyte per sample; sums of more overflow the simulation's whole numbers


def _indices(indices: Sequence[Any], count: int, name: str) -> None:
    for i in indices:
        if not isinstance(i, int) or not 0 <= i < count:
            raise ProfileError(
                "layers are named by their place",
                f"{name} names {i!r}, but there are {count} layers",
                f"correct {name}",
            )
