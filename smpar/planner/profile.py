"""What a model costs: a chain of layers, their times by device type, tensor-parallel degree and microbatch size.

    layer        0 ──▶ 1 ──▶ 2 ──▶ 3        tensors: 0→1, 1→2, 2→3, and 0→3 (a skip)
                 └─────────────────▲        tied: layers 0 and 3 share a parameter

As JSON, with seconds as rows of one number per layer, one row per microbatch size::

    {"layers": [{"name": "embed", "parameters": 54558720, "saved": 4194304}, ...],
     "tensors": [{"source": 0, "targets": [1], "elements": 1048576}, ...],
     "tied": [{"layers": [0, 28], "parameters": 53510144}],
     "times": [{"device": "T4", "tp": 1, "microbatches": [1, 4], "forward": [[...], [...]], "backward": [...]}]}

What a device keeps at a tensor-parallel degree is stated under "divided"; without that, everything but the whole_ parts
is taken to divide evenly, and times to include the collectives.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from smpar.errors import ProfileError

_T = TypeVar("_T")


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
    """Seconds on one device type at one tensor-parallel degree; with collectives, unless `Divided` has these.

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


@dataclass(frozen=True)
class Divided:
    """What layers keep and tell each other at one tensor-parallel degree, on the rank that has most of it.

    One number for each layer, unless said otherwise; bytes are per sample. A collective of tensor parallelism counts as
    so many bytes of an all-reduce: an all-gather or a reduce-scatter as half of the whole tensor's.

    Attributes:
        tp: the degree.
        parameters: elements on a rank.
        whole_parameters: those of them that each rank of the group has, too.
        saved, transient: as of `Layer`.
        tied: parameters on a rank, of each entry of the profile's `tied`.
        elements: of each of the profile's `tensors`, per sample.
        forward_bytes, backward_bytes: bytes of its collectives.
        forward_calls, backward_calls: number of its collectives in a microbatch.
    """

    tp: int
    parameters: tuple[float, ...]
    whole_parameters: tuple[float, ...]
    saved: tuple[float, ...]
    transient: tuple[float, ...]
    tied: tuple[float, ...]
    elements: tuple[float, ...]
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]
    forward_calls: tuple[float, ...]
    backward_calls: tuple[float, ...]

    @classmethod
    def evenly(cls, profile: Profile, tp: int) -> Divided:
        """All but what layers state as whole, divided by the degree; collectives are in the times."""
        layers, none = profile.layers, (0.0,) * profile.size
        return cls(
            tp,
            tuple(x.whole_parameters + (x.parameters - x.whole_parameters) / tp for x in layers),
            tuple(x.whole_parameters for x in layers),
            tuple(x.whole_saved + (x.saved - x.whole_saved) / tp for x in layers),
            tuple(x.transient / tp for x in layers),
            tuple(t.parameters / tp for t in profile.tied),
            tuple(t.elements for t in profile.tensors),
            none,
            none,
            none,
            none,
        )


class Seconds(NamedTuple):
    """By layer, for one microbatch; `weight` is part of `backward`."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """A model as the planner sees it.

    Attributes:
        divided: what is kept and told at tensor-parallel degrees, where it is known exactly.
        undivided: why there is no tensor-parallel degree above 1, in words; empty if there is, or nobody asked.

    Raises:
        ProfileError: the parts contradict each other, or a number means nothing.
    """

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    times: tuple[Times, ...]
    tied: tuple[Tied, ...] = ()
    divided: tuple[Divided, ...] = ()
    undivided: str = ""

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

    def at(self, tp: int) -> Divided:
        """What layers keep and tell at that tensor-parallel degree."""
        return next((d for d in self.divided if d.tp == tp), None) or Divided.evenly(self, tp)

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
            ProfileError: an unknown or missing key; and as the constructor.
        """
        parts = _record(Profile, given, "the profile")
        return cls(
            _records(Layer, parts["layers"], "layers"),
            _records(Tensor, parts["tensors"], "tensors"),
            _records(Times, parts["times"], "times"),
            _records(Tied, parts.get("tied", ()), "tied"),
            _records(Divided, parts.get("divided", ()), "divided"),
            parts.get("undivided", ""),
        )

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


def _record(cls: type, given: Any, where: str) -> dict[str, Any]:
    """The keys of a record, lists made tuples."""
    if not isinstance(given, Mapping):
        raise ProfileError(f"{where} is an object", f"a {type(given).__name__}", f"give {_keys(cls)}")
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ProfileError(f"{where} has the keys {_keys(cls)}", f"{unknown[0]!r}", f"remove {unknown[0]!r}")
    result = {key: _frozen(value) for key, value in given.items()}
    needed = [name for name in _NEEDED[cls] if name not in result]
    if needed:
        raise ProfileError(f"{where} has the keys {_keys(cls)}", f"no {needed[0]!r}", f"add {needed[0]!r}")
    return result


def _records(cls: type[_T], given: Any, name: str) -> tuple[_T, ...]:
    if not isinstance(given, tuple):
        raise ProfileError(f"{name} of the profile is a list", f"{given!r}"[:80], f"give {name} as a list of objects")
    return tuple(cls(**_record(cls, x, f"{name}[{i}]")) for i, x in enumerate(given))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


def _keys(cls: type) -> str:
    return ", ".join(f.name for f in fields(cls))


_NEEDED: dict[type, tuple[str, ...]] = {
    Profile: ("layers", "tensors", "times"),
    Layer: ("name", "parameters"),
    Tensor: ("source", "targets", "elements"),
    Times: ("device", "tp", "microbatches", "forward", "backward"),
    Tied: ("layers", "parameters"),
    Divided: tuple(f.name for f in fields(Divided)),
}


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
    for i, layer in enumerate(profile.layers):
        _text(layer.name, f"name of layer {i}")
        for name in ("parameters", "saved", "whole_parameters", "whole_saved", "output", "transient"):
            _number(getattr(layer, name), f"{name} of layer {layer.name!r}")
        for part, whole in (("whole_parameters", "parameters"), ("whole_saved", "saved")):
            _inside(getattr(layer, part), getattr(layer, whole), f"{part} of layer {layer.name!r}", whole)
    for i, tensor in enumerate(profile.tensors):
        _number(tensor.elements, f"elements of tensor {i}")
        _indices(tensor.source, tensor.targets, count, f"tensor {i}")
        if tensor.gradient not in (True, False):
            _wrong(tensor.gradient, f"gradient of tensor {i}", "true or false")
    for i, tied in enumerate(profile.tied):
        _number(tied.parameters, f"parameters of tied {i}")
        _indices(0, tied.layers, count, f"tied {i}")
        for at in tied.layers:
            _inside(tied.parameters, profile.layers[at].parameters, f"parameters of tied {i}", f"those of layer {at}")
    for times in profile.times:
        _check_times(times, count)
    for divided in profile.divided:
        _check_divided(divided, profile)
    _text(profile.undivided, "undivided")
    twice = [key for key, n in Counter((t.device, t.tp) for t in profile.times).items() if n > 1]
    if twice:
        raise ProfileError(
            "a profile has one table of times for each device type and tensor-parallel degree",
            f"several for {twice[0][0]!r} at tp {twice[0][1]}",
            "keep one of them; several microbatch sizes are rows of one table",
        )


def _check_times(times: Times, count: int) -> None:
    _text(times.device, "device of times")
    where = f"times of {times.device!r} at tp {times.tp}"
    _degree(times.tp, f"tp of times of {times.device!r}")
    sizes: Any = times.microbatches
    if not isinstance(sizes, tuple):
        _wrong(sizes, f"microbatches ({where})", "a list of sizes")
    for size in sizes:
        _number(size, f"a microbatch size ({where})")
    if not sizes or list(sizes) != sorted(set(sizes)) or not sizes[0] > 0:
        raise ProfileError(
            "times belong to ascending microbatch sizes", f"{where}: microbatches {sizes}", "give sizes like [1, 2, 4]"
        )
    rows: Any
    for name, rows in (("forward", times.forward), ("backward", times.backward), ("weight", times.weight)):
        if not isinstance(rows, tuple) or not all(isinstance(row, tuple) for row in rows):
            _wrong(rows, f"{name} ({where})", "a list of rows")
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
            _inside(part, all_, f"weight of layer {i} ({where})", "its backward")


def _check_divided(divided: Divided, profile: Profile) -> None:
    _degree(divided.tp, "tp of an entry of divided")
    lengths = {"tied": len(profile.tied), "elements": len(profile.tensors)}
    for name in (f.name for f in fields(Divided) if f.name != "tp"):
        row: Any = getattr(divided, name)
        length = lengths.get(name, profile.size)
        if not isinstance(row, tuple) or len(row) != length:
            _wrong(row, f"{name} of divided at tp {divided.tp}", f"a list of {length} numbers")
        for i, value in enumerate(row):
            _number(value, f"{name}[{i}] of divided at tp {divided.tp}")
    for i, (part, whole) in enumerate(zip(divided.whole_parameters, divided.parameters, strict=True)):
        _inside(part, whole, f"whole_parameters[{i}] of divided at tp {divided.tp}", "parameters")


def _degree(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _wrong(value, name, "a whole number, 1 or more")


def _number(value: Any, name: str) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good:
        raise ProfileError("costs are numbers, finite and not negative", f"{name} is {value!r}", "measure it again")


def _inside(part: float, whole: float, name: str, of: str) -> None:
    if part > whole:
        raise ProfileError(f"a part is not larger than its whole: {name}, {of}", f"{part} > {whole}", f"correct {name}")


def _text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        _wrong(value, name, "a name")


def _wrong(value: Any, name: str, must: str) -> None:
    raise ProfileError(f"{name} is {must}", f"{value!r}"[:80], f"correct {name}")


def _indices(first: Any, others: Any, count: int, name: str) -> None:
    if not isinstance(others, tuple):
        _wrong(others, f"the layers that {name} names", "a list of places")
    for i in (first, *others):
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < count:
            raise ProfileError(
                "layers are named by their place",
                f"{name} names {i!r}, but there are {count} layers",
                f"correct {name}",
            )
