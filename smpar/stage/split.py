"""Splitting a step's arguments into microbatches, and merging what the microbatches return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smpar.errors import BatchError
from smpar.trace import tree

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step's arguments by microbatch. ``weights`` are the microbatches' parts of the samples; they sum to 1.

    ``samples`` is the number of samples in the batch; None if no tensor was split.
    """

    calls: tuple[Call, ...]
    weights: tuple[float, ...]
    samples: int | None = None


def split(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    microbatches: int,
    whole: Sequence[str] = (),
    axes: Mapping[str, int] | None = None,
) -> Batch:
    """Split a step's arguments along their batch axis.

    A batch of n samples gives microbatches of n // m or n // m + 1 samples, the larger ones first.

    Args:
        names: parameter names of the step function, for the positional arguments.
        args, kwargs: the call's arguments; tensors in lists, tuples, dicts and sets are split too.
        microbatches: how many parts.
        whole: names of arguments that every microbatch gets as they are.
        axes: argument name -> batch axis (0 if not given).

    Raises:
        BatchError: a tensor has fewer samples than there are microbatches, or the tensors differ in samples.
    """
    splitter = _Splitter(microbatches, dict(axes or {}), set(whole))
    parts = [splitter.argument(names[i] if i < len(names) else f"argument {i}", a) for i, a in enumerate(args)]
    named = {name: splitter.argument(name, value) for name, value in kwargs.items()}
    calls = tuple(
        (tuple(part[i] for part in parts), {name: part[i] for name, part in named.items()}) for i in range(microbatches)
    )
    return Batch(calls, splitter.weights(), splitter.samples[1] if splitter.samples is not None else None)


class _Splitter:
    def __init__(self, microbatches: int, axes: dict[str, int], whole: set[str]) -> None:
        self.count = microbatches
        self.axes = axes
        self.whole = whole
        self.samples: tuple[str, int] | None = None

    def argument(self, name: str, value: Any) -> list[Any]:
        if name in self.whole:
            return [value] * self.count
        return self._value(name, value, self.axes.get(name, 0))

    def _value(self, name: str, value: Any, axis: int) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value, axis)
        if hasattr(value, "smp_slice"):
            return [value.smp_slice(self.count, i, axis) for i in range(self.count)]
        if isinstance(value, (set, frozenset)):
            parts = [self._value(name, item, axis) for item in value]
            return [type(value)(part[i] for part in parts) for i in range(self.count)]
        if isinstance(value, (list, tuple, Mapping)):
            return self._container(name, value, axis)
        return [value] * self.count

    def _container(self, name: str, value: Any, axis: int) -> list[Any]:
        if isinstance(value, Mapping):
            parts = {key: self._value(f"{name}[{key!r}]", item, axis) for key, item in value.items()}
            rows: list[Any] = [{key: part[i] for key, part in parts.items()} for i in range(self.count)]
            return rows if type(value) is dict else [_like(value, row) for row in rows]
        columns = [self._value(f"{name}[{i}]", item, axis) for i, item in enumerate(value)]
        made = [[column[i] for column in columns] for i in range(self.count)]
        if hasattr(value, "_fields"):
            return [type(value)(*row) for row in made]
        return [type(value)(row) for row in made]

    def _tensor(self, name: str, tensor: torch.Tensor, axis: int) -> list[Any]:
        if tensor.dim() == 0:
            return [tensor] * self.count
        if not -tensor.dim() <= axis < tensor.dim():
            raise BatchError(f"{name} has shape {tuple(tensor.shape)} and no axis {axis}")
        size = tensor.shape[axis]
        if size < self.count:
            raise BatchError(
                f"{name} has shape {tuple(tensor.shape)}: {size} along axis {axis}, but microbatches = {self.count}"
            )
        if self.samples is None:
            self.samples = (name, size)
        elif self.samples[1] != size and (size % self.count or self.samples[1] % self.count):
            raise BatchError(f"{self.samples[0]} has {self.samples[1]} samples and {name} has {size}")
        return list(torch.tensor_split(tensor, self.count, dim=axis))

    def weights(self) -> tuple[float, ...]:
        if self.samples is None:
            return (1.0 / self.count,) * self.count
        size = self.samples[1]
        small, larger = divmod(size, self.count)
        return tuple((small + (i < larger)) / size for i in range(self.count))


def _like(value: Any, row: dict[Any, Any]) -> Any:
    """A mapping of the same class (``BatchEncoding``, ``OrderedDict``) with other items."""
    try:
        return type(value)(row)
    except TypeError:
        return row


class StepOutput:
    """One returned value of a step, by microbatch.

    ``outputs`` is the list by microbatch. Uneven microbatches count by their samples in the means.
    """

    def __init__(self, outputs: list[Any], weights: Sequence[float]) -> None:
        self.outputs = outputs
        self._weights = tuple(weights)

    def reduce_mean(self) -> Any:
        """The mean over the batch: microbatches weighted by their number of samples."""
        if len(set(self._weights)) == 1:
            return self.reduce_sum() / len(self.outputs)
        return sum(output * weight for output, weight in zip(self.outputs, self._weights, strict=True))

    def reduce_sum(self) -> Any:
        """The sum over the microbatches."""
        total = self.outputs[0]
        for output in self.outputs[1:]:
            total = total + output
        return total

    def concat(self, axis: int = 0) -> torch.Tensor:
        """The microbatches' tensors joined along the batch axis."""
        return torch.cat(self.outputs, dim=axis)

    def stack(self, axis: int = 0) -> torch.Tensor:
        """The microbatches' tensors along a new axis."""
        return torch.stack(self.outputs, dim=axis)

    def detach(self) -> StepOutput:
        """The same without gradients."""
        return StepOutput([o.detach() if isinstance(o, torch.Tensor) else o for o in self.outputs], self._weights)

    def __iter__(self) -> Any:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> Any:
        return self.outputs[index]

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def merge(results: Sequence[Any], weights: Sequence[float]) -> Any:
    """Turn the microbatches' results, equal in structure, into one with a ``StepOutput`` for each tensor.

    Values that are no tensors are returned once if all microbatches agree on them, else as ``StepOutput``.

    Raises:
        BatchError: the microbatches returned different structures.
    """
    specs, columns = [], []
    for result in results:
        leaves: list[torch.Tensor] = []
        specs.append(tree.flatten(result, leaves))
        columns.append(leaves)
    if isinstance(specs[0], tree.Const):
        first = results[0]
        same = all(r is first or (type(r) is type(first) and _equal(r, first)) for r in results)
        return first if same else StepOutput(list(results), weights)
    if any(len(c) != len(columns[0]) for c in columns):
        raise BatchError(f"microbatches return {sorted({len(c) for c in columns})} tensors")
    merged = [StepOutput([c[i] for c in columns], weights) for i in range(len(columns[0]))]
    return tree.unflatten(specs[0], merged)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False
