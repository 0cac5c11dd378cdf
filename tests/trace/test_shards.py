"""Drawing calls under a shard: draws of its own, the chain of all; and recomputation that draws them again."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smpar.runtime.coroutine import Forward
from smpar.trace.draws import SeedMode, draw, mix, remember_in_states, seed_generators, shard, sharded, watching

SIZE = 64


def draws(seed: int, shards: list[int]) -> list[Tensor]:
    seed_generators(seed)
    found = []
    with SeedMode():
        for number in shards:
            with sharded(number):
                found.append(torch.rand(SIZE))
    return found


def test_a_shard_draws_for_itself_and_the_chain_goes_on(seed: int) -> None:
    plain = draws(seed, [0, 0, 0])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(plain, 2))
    first, second = draws(seed, [0, 1, 0]), draws(seed, [0, 2, 0])
    for found in (first, second):
        assert torch.equal(found[0], plain[0]) and torch.equal(found[2], plain[2])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations((plain[1], first[1], second[1]), 2))


def test_a_draw_leaves_the_generators_at_the_chain_s_value(seed: int) -> None:
    for number in (0, 3):
        with sharded(number):
            got = draw(seed, torch.rand, (SIZE,), {})
        assert torch.default_generator.initial_seed() == seed
        seed_generators(mix(seed, number) if number else seed)
        assert torch.equal(got, torch.rand(SIZE))


def test_shards_are_put_back() -> None:
    with pytest.raises(KeyError), sharded(1), sharded(2):
        assert shard() == 2
        raise KeyError
    assert shard() == 0


def dropping(x: Tensor) -> Tensor:
    x = F.dropout(x, 0.5)
    with sharded(7):
        x = x + F.dropout(x, 0.5)
    return x * F.dropout(torch.ones(SIZE), 0.5)


Way = Callable[[Tensor], Tensor]
WAYS: dict[str, Way] = {
    "once": dropping,
    "again": lambda x: checkpoint(dropping, x, use_reentrant=False),
    "again, by an inner backward": lambda x: checkpoint(dropping, x, use_reentrant=True),
    "nested": lambda x: checkpoint(WAYS["again"], x, use_reentrant=False),
}


def gradient(way: Way, seed: int, number: int, inside: bool) -> tuple[Tensor, Tensor]:
    """Result and gradient; the backward runs under the forward's mode and shard, or under none."""
    seed_generators(seed)
    x = torch.ones(SIZE, requires_grad=True)
    with SeedMode(), sharded(number):
        y = way(x)
        loss = (y * torch.rand(SIZE)).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert shard() == 0 and not watching()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("number", [0, 2])
def test_recomputation_draws_what_its_forward_drew(seed: int, number: int, inside: bool) -> None:
    remember_in_states()
    want = gradient(WAYS["once"], seed, number, True)
    for name, way in WAYS.items():
        assert all(map(torch.equal, gradient(way, seed, number, inside), want)), name
    assert not torch.equal(gradient(WAYS["once"], seed, 5, True)[0], want[0])


def test_states_of_the_generator_mean_nothing_else_outside_of_backward() -> None:
    with sharded(4):
        state = torch.get_rng_state()
    torch.set_rng_state(state)
    assert shard() == 0


def test_each_forward_has_its_shard() -> None:
    seen: list[tuple[str, int]] = []

    def body(name: str, number: int) -> None:
        forward = forwards[name]
        forward.enter(0)
        with sharded(number):
            forward.enter(1)
            seen.append((name, shard()))
        forward.enter(2)
        seen.append((name, shard()))

    forwards = {name: Forward(lambda n=name, k=k: body(n, k), 3) for name, k in (("a", 1), ("b", 2))}
    for _ in range(3):
        for forward in forwards.values():
            forward.advance()
            assert shard() == 0
    assert seen == [("a", 1), ("b", 2), ("a", 0), ("b", 0)]
