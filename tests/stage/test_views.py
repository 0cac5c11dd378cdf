"""Tensors that share memory, copied into memory of their own: writes then do to them what they would have done."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from smpar.errors import NotInGlue
from smpar.stage.views import Together

SIZE = 24
Family = tuple[list[Tensor], tuple[int, ...]]  # tensors of one storage; equal numbers: views of one tensor


def family(generator: torch.Generator, origin: Tensor) -> Family:
    """A tensor, an alias without its gradient, and random views of both, in random order."""

    def some(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    base = origin * 1.0
    roots = [base, base.detach()]
    members, groups = [*roots], [0, 1]
    for _ in range(5):
        group = some(2)
        rows, columns, step = 1 + some(3), 1 + some(3), 1 + some(3)
        start = some(SIZE - (rows - 1) * 8 - (columns - 1) * step)
        members.append(roots[group].as_strided((rows, columns), (8, step), start))
        groups.append(group)
    members.append(base[some(SIZE)].expand(3))
    groups.append(0)
    order = torch.randperm(len(members), generator=generator).tolist()
    numbers: dict[int, int] = {}
    return [members[i] for i in order], tuple(numbers.setdefault(groups[i], len(numbers)) for i in order)


def arrived(tensor: Tensor) -> Tensor:
    """What another rank gets of it: values without gaps, a leaf."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def rewrite(members: list[Tensor], generator: torch.Generator, brought: list[Tensor]) -> Tensor:
    """Write into some of them, what has a gradient, too; a sum in which all have a part."""
    single = [m for m in members if 0 not in m.stride()]  # torch refuses to write into repeated elements
    for fresh in brought:
        target = single[int(torch.randint(len(single), (1,), generator=generator))]
        _ = [m.grad_fn for m in members]  # until it is asked for it, torch lets nobody write into a view
        target.mul_(0.7).add_(fresh[: target.numel()].view(target.shape))
    weights = [torch.randn(m.shape, generator=generator, dtype=m.dtype) for m in members]
    return torch.stack([(m * w).sum() for m, w in zip(members, weights, strict=True)]).sum()


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("trial", range(10))
def test_copies_are_written_as_their_originals(seed: int, gradient: bool, trial: int) -> None:
    generator = torch.Generator().manual_seed(seed + trial)
    origin = torch.randn(SIZE, generator=generator, dtype=torch.float64).requires_grad_(gradient)
    brought = [torch.randn(SIZE, generator=generator, dtype=torch.float64).requires_grad_(i != 1) for i in range(3)]
    state = generator.get_state()

    members, groups = family(generator, origin)
    want = rewrite(members, generator, brought)
    inputs = [t for t in (origin, *brought) if t.requires_grad]
    truth = torch.autograd.grad(want, inputs, allow_unused=True, materialize_grads=True)

    generator.set_state(state)
    members, groups = family(generator, origin)
    leaves = [arrived(m) for m in members]
    start = min(m.storage_offset() for m in members)
    layouts = tuple((m.stride(), m.storage_offset() - start) for m in members)
    copies = Together(0, groups, (False,) * len(members), layouts)(leaves)
    assert len({c.untyped_storage().data_ptr() for c in copies}) == 1
    for copy, member in zip(copies, members, strict=True):
        assert torch.equal(copy, member) and copy.stride() == member.stride()
        assert copy.requires_grad == member.requires_grad
    got = rewrite(copies, generator, brought)
    cut = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    asked = [leaves[i] for i in cut] + brought[:1] + brought[2:]
    found = list(torch.autograd.grad(got, asked, allow_unused=True, materialize_grads=True))
    if gradient:
        back = torch.autograd.grad([members[i] for i in cut], [origin], found[: len(cut)])
        found[: len(cut)] = back

    torch.testing.assert_close(got, want)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b)


def test_a_view_made_without_gradient_gets_none() -> None:
    base = torch.ones(4, requires_grad=True)
    layouts = (((1,), 0), ((1,), 1))
    whole, view = Together(0, (0, 0), (False, True), layouts)([base, torch.ones(3)])
    assert whole.grad_fn is not None and view.grad_fn is None
    whole.mul_(2)
    with torch.no_grad():
        assert torch.equal(view, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="no_grad mode"):
        _ = view * 1


def test_memory_seen_as_two_types_is_refused() -> None:
    with pytest.raises(NotInGlue, match="clone the tensor first"):
        Together(0, (0, 0), (False, False), (((1,), 0), ((1,), 0)))([torch.ones(2), torch.ones(2).view(torch.int32)])
