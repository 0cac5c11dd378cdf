"""Splitting a step's arguments: who is cut, along which axis, and how the parts go together again."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch

from smpar.errors import BatchError
from smpar.stage.split import merge, split

Pair = namedtuple("Pair", "left right")


class Slices:
    """Splits itself."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def smp_slice(self, count: int, index: int, axis: int) -> list[int]:
        return self.items[index::count]


def parts(value: Any, count: int, **options: Any) -> list[Any]:
    return [args[0] for args, _ in split(["x"], (value,), {}, count, **options).calls]


def test_uneven_batches_put_the_larger_parts_first(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    size = count + rng.randint(0, 9)
    batch = split(["x"], (torch.arange(size),), {}, count)
    lengths = [len(args[0]) for args, _ in batch.calls]
    assert lengths == sorted(lengths, reverse=True) and max(lengths) - min(lengths) <= 1
    assert batch.weights == pytest.approx([n / size for n in lengths])
    assert torch.equal(torch.cat([args[0] for args, _ in batch.calls]), torch.arange(size))


@pytest.mark.parametrize(
    "wrap", [lambda t: [t, 5], lambda t: (t, "a"), lambda t: {"t": t, "n": None}, lambda t: OrderedDict(t=t),
             lambda t: UserDict(t=t), lambda t: Pair(t, 1), lambda t: {"deep": [{"t": (t,)}]}]
)  # fmt: skip
def test_containers_are_split_inside_and_keep_their_class(wrap: Any) -> None:
    tensor = torch.randn(6, 2)
    for got, piece in zip(parts(wrap(tensor), 3), tensor.split(2), strict=True):
        want = wrap(piece)
        assert type(got) is type(want)
        assert str(got) == str(want)


def test_sets_and_self_splitting_objects() -> None:
    tensor = torch.randn(4)
    assert [next(iter(s)).tolist() for s in parts({tensor}, 2)] == [tensor[:2].tolist(), tensor[2:].tolist()]
    assert parts(Slices([0, 1, 2, 3]), 2) == [[0, 2], [1, 3]]


def test_other_axes_and_whole_arguments() -> None:
    tensor = torch.randn(3, 4)
    assert [p.shape for p in parts(tensor, 2, axes={"x": 1})] == [(3, 2), (3, 2)]
    assert all(p is tensor for p in parts(tensor, 2, whole=["x"]))
    assert all(p is None for p in parts(None, 2))


def test_too_small_and_unequal_batches_are_refused() -> None:
    with pytest.raises(BatchError, match=r"shape \(3,\).*microbatches = 4"):
        parts(torch.randn(3), 4)
    with pytest.raises(BatchError, match="5 samples"):
        split(["x", "y"], (torch.randn(5), torch.randn(8)), {}, 2)


def test_means_count_samples() -> None:
    losses = [torch.tensor(v) for v in (1.0, 2.0, 6.0)]
    output = merge([{"loss": loss, "n": 3} for loss in losses], (0.5, 0.25, 0.25))
    assert float(output["loss"].reduce_mean()) == pytest.approx(0.5 + 0.5 + 1.5)
    assert float(output["loss"].reduce_sum()) == 9.0
    assert output["n"] == 3
