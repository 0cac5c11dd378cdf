"""What the reducer does when, seen from one replica: the others are played by a group that notes what it is asked."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpar.comm.buckets import plan_buckets
from smpar.comm.peers import Peers
from smpar.errors import LateGradient
from smpar.runtime.reducer import Reducer
from smpar.runtime.ties import tied_groups

SIZE = 4


class Twins:
    """A group of two replicas with equal gradients. ``log`` has the number of elements of each reduction."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def allreduce(self, tensors: list[Tensor]) -> Twins:
        self.log.append(tensors[0].numel())
        tensors[0].mul_(2)
        return self

    def broadcast(self, tensor: Tensor, root: int) -> Twins:
        assert root == 0
        return self

    def wait(self) -> None:
        self.log.append("wait")


class Chain(nn.Module):
    """Weights of 4 x 1, 4 x 2, 4 x 3, ... elements, whose gradients come last to first; ``used`` says which."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIZE, i + 1, dtype=torch.float64) for i in range(count))
        self.used = list(range(count))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.used:
            x = x * torch.tanh(self.weights[i]).sum()
        return x


def step(reducer: Reducer, model: Chain, parameters: list[nn.Parameter], microbatches: int = 2) -> None:
    """As without a pipeline: the last microbatch is the window."""
    with reducer.step(parameters, "key"):
        for i in range(microbatches):
            if i + 1 == microbatches:
                reducer.before(0)
            model(torch.ones(2, dtype=torch.float64)).sum().div(microbatches).backward()
        reducer.after(0)
        reducer.peers.group.log.append("window ends")  # type: ignore[union-attr]
        reducer.finish(True)


def made(count: int, cap: int, **options: Any) -> tuple[Twins, Reducer, Chain, list[nn.Parameter]]:
    group, model = Twins(), Chain(count)
    reducer = Reducer(Peers(group, ((0,), (1,))), cap=cap, **options)  # type: ignore[arg-type]
    return group, reducer, model, list(model.parameters())


def alone(model: Chain) -> list[Tensor | None]:
    used = [model.weights[i] for i in model.used]
    found = dict(zip(used, torch.autograd.grad(model(torch.ones(2, dtype=torch.float64)).sum(), used), strict=True))
    return [found.get(p) for p in model.weights]


def expect(model: Chain, times: float = 1.0) -> None:
    for p, want in zip(model.parameters(), alone(model), strict=True):
        assert (p.grad is None) == (want is None)
        assert want is None or torch.allclose(p.grad, times * want, rtol=1e-12, atol=0)  # type: ignore[arg-type]


def test_buckets_follow_the_order_of_gradients() -> None:
    """Drawing of smpar.comm.buckets: sizes of six parameters, the last ready first, closed at 6 bytes, the first at 1.

    ready     p5   p4   p3   p2   p1   p0
    buckets  [p5] [p4   p3] [p2   p1] [p0]
    """
    assert plan_buckets([3] * 6, [0] * 6, range(5, -1, -1), 1, 6) == ((5,), (4, 3), (2, 1), (0,))
    # one larger than a bucket fills it alone; what is left over makes the last one
    assert plan_buckets([3, 3, 9, 1], [0] * 4, (0, 1, 2, 3), 6, 6) == ((0, 1), (2,), (3,))
    # kinds are kept apart; a bucket's turn is when its last parameter is ready
    assert plan_buckets([3] * 5, "abbab", range(5), 6, 6) == ((1, 2), (0, 3), (4,))
    assert plan_buckets([], [], (), 1, 6) == ()


def test_ranks_that_share_parameters() -> None:
    holders = {7: {0}, 8: {0, 2}, 9: {1, 2}, 4: {2, 0}, 5: (0, 1, 2)}
    assert tied_groups(holders, {7: 0, 8: 0, 9: 2, 4: 0, 5: 1}) == {
        (0, 2): (8, 4),
        (1, 0, 2): (5,),
        (2, 1): (9,),
    }


def test_buckets_are_reduced_inside_the_window_once_it_is_known(seed: int) -> None:
    """Weights of 4, 8, 12, 16 elements, each a bucket with one flag: 17, 13, 9 and 5 elements, last to first."""
    torch.manual_seed(seed)
    group, reducer, model, parameters = made(4, cap=1)
    step(reducer, model, parameters)
    expect(model)
    assert group.log == ["window ends", 17, 13, 9, 5, *["wait"] * 5]  # learning; the order is settled at the end
    for _ in range(2):
        group.log.clear()
        model.zero_grad()
        step(reducer, model, parameters)
        expect(model)
        assert group.log == [17, 13, 9, 5, "window ends", *["wait"] * 4]


def test_another_list_of_the_same_parameters_changes_nothing(seed: int) -> None:
    """Else a replica that alone evaluates in between would order its buckets anew, and meet the others in disorder."""
    torch.manual_seed(seed)
    group, reducer, model, parameters = made(4, cap=1)
    step(reducer, model, parameters)
    group.log.clear()
    model.zero_grad()
    step(reducer, model, list(parameters))
    assert group.log == [17, 13, 9, 5, "window ends", *["wait"] * 4]
    group.log.clear()
    model.zero_grad()
    step(reducer, model, parameters[:3])  # fewer: laid out and learnt again
    assert group.log == ["window ends", 13, 9, 5, *["wait"] * 4]


def test_a_bucket_never_overtakes_another(seed: int) -> None:
    """A step leaves out the third weight: its bucket and those after it wait for the end."""
    torch.manual_seed(seed)
    group, reducer, model, parameters = made(4, cap=1)
    step(reducer, model, parameters)
    model.used = [0, 1, 3]
    model.zero_grad()
    group.log.clear()
    step(reducer, model, parameters)
    expect(model)
    assert group.log == [17, "window ends", 13, 9, 5, *["wait"] * 4]
    model.used = [0, 1, 2, 3]
    model.zero_grad()
    group.log.clear()
    step(reducer, model, parameters)
    expect(model)
    assert group.log == [17, 13, 9, 5, "window ends", *["wait"] * 4]


@pytest.mark.parametrize("early_views", [False, True])
def test_memory_is_used_again_unless_somebody_looks_at_it(seed: int, early_views: bool) -> None:
    torch.manual_seed(seed)
    _, reducer, model, parameters = made(3, cap=1 << 20, early_views=early_views)

    def addresses() -> list[int]:
        return [p.grad.data_ptr() for p in parameters if p.grad is not None]

    step(reducer, model, parameters)
    step(reducer, model, parameters)  # the order is settled now
    model.zero_grad()
    step(reducer, model, parameters)
    first = addresses()
    model.zero_grad()
    step(reducer, model, parameters)
    assert addresses() == first

    held = parameters[1].grad
    assert held is not None
    copy = held.clone()
    model.zero_grad()
    with torch.no_grad():
        parameters[1].mul_(0.5)
    step(reducer, model, parameters)
    expect(model)
    assert torch.equal(held, copy) and not set(addresses()) & set(first)
    second = addresses()
    model.zero_grad()
    step(reducer, model, parameters)
    assert addresses() == second and torch.equal(held, copy)

    part = parameters[0].grad[0]  # type: ignore[index]
    copy = part.clone()
    del held
    gc.collect()
    model.zero_grad()
    with torch.no_grad():
        parameters[0].mul_(0.5)
    step(reducer, model, parameters)
    expect(model)
    assert torch.equal(part, copy) and addresses() == first  # which nobody looks at any more


@pytest.mark.parametrize("early_views", [False, True])
def test_gradients_zeroed_in_place_stay_where_they_are(seed: int, early_views: bool) -> None:
    torch.manual_seed(seed)
    _, reducer, model, parameters = made(3, cap=1 << 20, early_views=early_views)
    step(reducer, model, parameters)
    step(reducer, model, parameters)
    expect(model, 2.0)
    grads = [p.grad for p in parameters]
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        step(reducer, model, parameters)
        expect(model)
        assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))


def test_a_backward_more_than_was_learnt_is_refused(seed: int) -> None:
    torch.manual_seed(seed)
    _, reducer, model, parameters = made(3, cap=1)
    step(reducer, model, parameters)
    with pytest.raises(LateGradient, match="overlapping_allreduce=False"), reducer.step(parameters, "key"):
        reducer.before(0)
        for _ in range(2):
            model(torch.ones(2, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    step(reducer, model, parameters)
    expect(model)


def test_several_backwards_in_a_window(seed: int) -> None:
    """Each gradient comes three times, as it does where parts of a model are recomputed or losses are many."""
    torch.manual_seed(seed)
    group, reducer, model, parameters = made(3, cap=1)
    for known in (False, True):
        group.log.clear()
        model.zero_grad()
        with reducer.step(parameters, "key"):
            reducer.before(0)
            for _ in range(3):
                assert not group.log
                model(torch.ones(2, dtype=torch.float64)).sum().div(3).backward()
            assert group.log == ([13, 9, 5] if known else [])
            reducer.after(0)
            reducer.finish(True)
        expect(model)


def test_what_is_told_of_after_its_window_is_reduced_at_the_end(seed: int) -> None:
    torch.manual_seed(seed)
    group, reducer, model, parameters = made(3, cap=1)
    for _ in range(2):
        group.log.clear()
        model.zero_grad()
        with reducer.step(parameters, "key"):
            reducer.before(0)
            model(torch.ones(2, dtype=torch.float64)).sum().div(2).backward()
            reducer.after(0)
            model(torch.ones(2, dtype=torch.float64)).sum().div(2).backward()
            assert not group.log
            reducer.finish(True)
        expect(model)


def test_a_failed_step_leaves_the_reducer_usable(seed: int) -> None:
    torch.manual_seed(seed)
    group, reducer, model, parameters = made(3, cap=1)
    step(reducer, model, parameters)
    with pytest.raises(ZeroDivisionError), reducer.step(parameters, "key"):
        raise ZeroDivisionError
    model.zero_grad()
    model(torch.ones(2, dtype=torch.float64)).sum().backward()  # outside of steps hooks do nothing
    model.zero_grad()
    group.log.clear()
    step(reducer, model, parameters)
    expect(model)
    assert group.log[-1] == "wait"


def test_hooks_do_not_keep_a_reducer_alive() -> None:
    import weakref

    _, reducer, model, parameters = made(2, cap=1)
    step(reducer, model, parameters)
    gone = weakref.ref(reducer)
    del reducer
    assert gone() is None
    model(torch.ones(2, dtype=torch.float64)).sum().backward()
