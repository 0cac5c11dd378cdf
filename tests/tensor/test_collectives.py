"""Collectives and their gradients equal a computation in one process that holds every rank's part."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from tests.harness import Pool

RANKS = [2, 4]
LARGE = 1 << 18  # elements: beyond what an all-reduce sends to each rank whole


@dataclass(frozen=True)
class Rule:
    """A collective, and the same on a list of all ranks' tensors.

    Attributes:
        call: on a rank's tensor, with two dims.
        truth: of what all ranks hold to what all of them get; one tensor where that is the same.
        alike: whether the ranks hold the same tensor, which is one tensor of the loss's.
        runs: the collectives of the forward and the backward.
    """

    call: Callable[[Tensor, TensorGroup, int, int], Tensor]
    truth: Callable[[list[Tensor], int, int, int], list[Tensor]]
    alike: bool
    runs: tuple[str, str]


def _sum(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


RULES: dict[str, Rule] = {
    "copy": Rule(lambda x, g, i, j: collectives.copy(x, g), lambda xs, n, i, j: xs * n, True, ("", "all_reduce")),
    "reduce": Rule(
        lambda x, g, i, j: collectives.reduce(x, g), lambda xs, n, i, j: [_sum(xs)], False, ("all_reduce", "")
    ),
    "gather": Rule(
        lambda x, g, i, j: collectives.gather(x, g, i),
        lambda xs, n, i, j: [torch.cat(xs, i)] * n,
        False,
        ("all_gather", "reduce_scatter"),
    ),
    "reduce_scatter": Rule(
        lambda x, g, i, j: collectives.reduce_scatter(x, g, i),
        lambda xs, n, i, j: list(_sum(xs).chunk(n, i)),
        False,
        ("reduce_scatter", "all_gather"),
    ),
    "take": Rule(
        lambda x, g, i, j: collectives.take(x, g, i),
        lambda xs, n, i, j: list(xs[0].chunk(n, i)),
        True,
        ("", "all_gather"),
    ),
    "whole": Rule(
        lambda x, g, i, j: collectives.whole(x, g, i), lambda xs, n, i, j: [torch.cat(xs, i)], False, ("all_gather", "")
    ),
    "all_to_all": Rule(
        lambda x, g, i, j: collectives.all_to_all(x, g, i, j),
        lambda xs, n, i, j: [torch.cat([x.chunk(n, i)[rank] for x in xs], j) for rank in range(n)],
        False,
        ("all_to_all", "all_to_all"),
    ),
}


@dataclass(frozen=True)
class Case:
    """What a collective is tried on: the shape of a rank's tensor before ``turned`` swaps its first and last dims."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, int]
    turned: bool
    seed: int

    def inputs(self, ranks: int) -> list[Tensor]:
        """All ranks' tensors; one if they are alike. Transposed ones are not contiguous."""
        generator = torch.Generator().manual_seed(self.seed)
        xs = [
            torch.randn(self.shape, generator=generator, dtype=torch.float64)
            for _ in range(1 if RULES[self.name].alike else ranks)
        ]
        return [x.transpose(0, -1) if self.turned else x for x in xs]

    def weights(self, outputs: list[Tensor]) -> list[Tensor]:
        """Gradients of the outputs."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]

    def truth(self, ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Outputs, their gradients, and those of the inputs."""
        xs = [x.requires_grad_() for x in self.inputs(ranks)]
        ys = RULES[self.name].truth(xs, ranks, *self.dims)
        ws = self.weights(ys)
        torch.autograd.backward(ys, ws)
        grads = [x.grad for x in xs]
        assert all(grad is not None for grad in grads)
        return [y.detach() for y in ys], ws, [grad for grad in grads if grad is not None]


def cases(seed: int, ranks: int) -> list[Case]:
    """All collectives along each dim, the others drawn; and sums of tensors beyond the short cut of small ones."""
    draw = random.Random(seed)
    found = [Case(name, (ranks, LARGE // ranks), (0, 1), False, draw.randrange(2**31)) for name in ("copy", "reduce")]
    for name in RULES:
        for dim in range(3):
            shape = tuple(ranks * draw.randint(1, 3) for _ in range(3))
            leading = tuple(1 if i < dim and draw.random() < 0.5 else size for i, size in enumerate(shape))
            other = draw.choice([i for i in range(3) if i != dim])
            turned = draw.random() < 0.5 and leading == shape
            found.append(Case(name, leading, (dim, other), turned, draw.randrange(2**31)))
    return found


def place(tensors: list[Tensor], rank: int) -> Tensor:
    """A rank's, of one for each or one for all."""
    return tensors[rank % len(tensors)]


def run_cases(ranks: int, seed: int) -> list[tuple[Tensor, Tensor, Counter[str], Counter[str]]]:
    """Output, gradient of the input, and the collectives of forward and backward, by case."""
    import smpar as smp

    smp.init({"tensor_parallel_degree": ranks})
    group = TensorGroup.current()
    done = []
    for case in cases(seed, ranks):
        x = place(case.inputs(ranks), group.rank).requires_grad_()
        with collectives.counting() as forward:
            y = RULES[case.name].call(x, group, *case.dims)
        with collectives.counting() as backward:
            y.backward(place(case.truth(ranks)[1], group.rank))
        assert x.grad is not None
        done.append((y.detach(), x.grad, forward, backward))
    return done


@pytest.mark.parametrize("ranks", RANKS)
def test_forward_and_backward_are_those_of_one_process_and_counted(pool: Pool, seed: int, ranks: int) -> None:
    runs = pool.run(ranks, run_cases, ranks, seed)
    for number, case in enumerate(cases(seed, ranks)):
        ys, _, grads = case.truth(ranks)
        for rank, run in enumerate(runs):
            y, grad, *counts = run[number]
            torch.testing.assert_close(y, place(ys, rank), rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")
            torch.testing.assert_close(
                grad, place(grads, rank), rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}, gradient: {m}"
            )
            whole = max(y.nbytes, grad.nbytes)  # of the larger of input and output: the other is a slice
            for name, count in zip(RULES[case.name].runs, counts, strict=True):
                sent = whole * (ranks - 1) // ranks
                if name == "all_reduce":
                    sent *= 2 if y.numel() == LARGE else ranks  # small ones are given to each rank whole
                assert count == ({name: 1, "bytes": sent} if name else {}), case


def run_scaled(ranks: int) -> list[Tensor]:
    import smpar as smp

    smp.init({"tensor_parallel_degree": ranks})
    group = TensorGroup.current()
    grads = []
    for function in (collectives.take, collectives.whole):
        x = torch.arange(4.0 * ranks).view(ranks, 4).requires_grad_()
        function(x, group, 0, 0.5).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    return grads


def test_a_scale_is_that_of_the_gradient(pool: Pool) -> None:
    for grads in pool.run(2, run_scaled, 2):
        for grad in grads:
            assert torch.equal(grad, torch.full((2, 4), 0.5))


def run_bits(ranks: int, seed: int) -> list[Tensor]:
    import smpar as smp

    smp.init({"tensor_parallel_degree": ranks})
    group = TensorGroup.current()
    torch.manual_seed(seed + group.rank)
    return [collectives.all_reduced(torch.randn(n, dtype=d), group) for n in (7, 100, 3 * LARGE + 1) for d in FLOATS]


FLOATS = (torch.float32, torch.bfloat16)


def test_a_sum_is_the_same_on_all_ranks_to_the_bit(pool: Pool, seed: int) -> None:
    first, *others = pool.run(4, run_bits, 4, seed)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def run_types(ranks: int) -> list[Tensor]:
    import smpar as smp

    smp.init({"tensor_parallel_degree": ranks})
    group = TensorGroup.current()
    values = [torch.tensor([group.rank, 1], dtype=dtype) for dtype in (torch.int64, torch.bool, torch.bfloat16)]
    return [collectives.whole(value, group, 0) for value in values]


def test_tokens_and_masks_are_gathered_like_numbers(pool: Pool) -> None:
    for gathered in pool.run(2, run_types, 2):
        assert [value.tolist() for value in gathered] == [[0, 1, 1, 1], [False, True, True, True], [0.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("ranks", RANKS)
def test_fake_tensors_get_the_shapes_without_a_word_to_others(seed: int, ranks: int) -> None:
    nobody = TensorGroup(None, ranks - 1, ranks, memory=True, joined=True)
    for case in cases(seed, ranks):
        ys, _, grads = case.truth(ranks)
        mode = FakeTensorMode()
        x = mode.from_tensor(case.inputs(ranks)[0]).detach().requires_grad_()
        with collectives.counting() as count, mode:
            y = RULES[case.name].call(x, nobody, *case.dims)
            y.sum().backward()
        assert (y.shape, y.dtype) == (ys[0].shape, ys[0].dtype), case
        assert x.grad is not None and x.grad.shape == grads[0].shape, case
        assert not count


def test_what_does_not_divide_is_not_sliced() -> None:
    nobody = TensorGroup(None, 0, 2, memory=True, joined=True)
    with pytest.raises(ValueError, match=r"dim 1 of .* does not divide by 2"):
        collectives.take(torch.zeros(2, 3), nobody, 1)
