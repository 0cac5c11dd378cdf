"""What a trial run under fake tensors finds out, and that it leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpar.trace import tree
from smpar.trace.fake import FakeRunner
from smpar.trace.outcome import Out, Outcome


def trial(fn: Any, *args: Any) -> Outcome:
    module = fn if isinstance(fn, nn.Module) else None
    return FakeRunner(torch.device("cpu")).evaluate(fn, args, {}, module)


def shapes(outcome: Outcome) -> list[tuple[int, ...]]:
    return [place.meta.shape for place in outcome.places if isinstance(place, Out)]


# ---- what is saved for a backward ------------------------------------------------------------------------------


class Unhooked(nn.Module):
    """Allows no hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return torch.tanh(self.layer(x))


class Slopes(nn.Module):
    """Uses torch.func, which allows none either."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.layer(row)).sum()))(x) + self.layer(x)


def test_saved_tensors_are_counted_where_hooks_on_them_are_not_allowed() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    saved = trial(plain, x).cost.saved
    assert saved == 2 * 3 * 4 * 4  # bytes of the layer's input, and of tanh's result; the weight is not saved for it
    assert trial(Unhooked(), x).cost.saved == saved
    assert trial(Slopes(), x).cost.saved > 0
    with torch.autograd.graph.disable_saved_tensors_hooks("nowhere"):
        assert trial(plain, x).cost.saved == trial(Unhooked(), x).cost.saved == saved
        with pytest.raises(RuntimeError, match="nowhere"), torch.autograd.graph.save_on_cpu():
            pass
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="not here"):
        Unhooked()(x)  # allowed again, and refused again


# ---- values that depend on shapes only -------------------------------------------------------------------------


def _divided(x: Tensor) -> Tensor:
    return x.view(x.size(0), torch.div(x.size(1), 2, rounding_mode="trunc"), 2)  # type: ignore[call-overload]


def _root(x: Tensor) -> Tensor:
    return x[:, : int(torch.tensor(x.size(1)).float().sqrt().floor())]


def _sliced(x: Tensor) -> Tensor:
    positions = torch.arange(x.size(1))
    return x[:, positions % 3 == 0] + x[:, (positions % 3 == 0).nonzero()[:, 0]]


def _written(x: Tensor) -> Tensor:
    sizes = torch.zeros(3, dtype=torch.long)
    sizes[1:].fill_(2)
    return x[:, : sum(sizes.tolist())]


@pytest.mark.parametrize("fn", [_divided, _root, _sliced, _written])
def test_values_that_follow_from_shapes_are_known(fn: Any, seed: int) -> None:
    x = torch.randn(2, 2 * random.Random(seed).randrange(4, 40))
    outcome = trial(fn, x)
    assert not outcome.guessed
    assert shapes(outcome) == [tuple(fn(x).shape)]


def test_a_number_in_a_name_is_a_number() -> None:
    named = {"part_0": 3, "part_1": 4}

    def fn(x: Tensor) -> Tensor:
        return x[: named[f"part_{x.argmax()}"]]

    assert trial(fn, torch.randn(5)).varies


def test_values_that_data_were_written_into_are_unknown() -> None:
    def fn(x: Tensor) -> int:
        sizes = torch.zeros(3)
        tail = sizes[1:]
        sizes.copy_(x)
        return int(tail.sum())

    assert trial(fn, torch.ones(3)).guessed


# ---- the layout of arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_a_view_with_gaps_is_copied_by_contiguous(grad: bool) -> None:
    x = torch.randn(4, 5, 2, requires_grad=grad)[..., 0]
    (place,) = trial(torch.Tensor.contiguous, x).places
    assert isinstance(place, Out)
    assert place.reaches == (frozenset({0}) if grad else frozenset())


# ---- who shares memory ------------------------------------------------------------------------------------------


class Relatives(nn.Module):
    """Of its argument: a view, an alias, a view of that, a new tensor. Of a tensor that stays inside: two views."""

    def forward(self, x: Tensor) -> list[Tensor]:
        alias, inside = x.detach(), x * 2
        return [x[:, 1:], alias, alias[1:], x + 1, inside[:, 1:], inside[1:]]


@pytest.mark.parametrize("grad", [False, True])
def test_who_shares_memory_and_whom_autograd_takes_for_views(grad: bool) -> None:
    x = torch.ones(3, 4, requires_grad=grad)
    view, alias, of_alias, new, first, second = trial(Relatives(), x).places
    assert (view.shares, view.views, view.offset) == ({0}, {0}, 1)
    assert (alias.shares, alias.views, alias.offset) == ({0, -1}, set(), 0)
    assert (of_alias.shares, of_alias.views, of_alias.offset) == ({0, -1, -2}, {-2}, 4)
    assert (new.shares, first.shares) == (set(), set())
    assert (second.shares, second.views, second.offset - first.offset) == ({-5}, {-5}, 3)


# ---- nothing is left behind ------------------------------------------------------------------------------------


@functools.lru_cache
def _table(size: int) -> Tensor:
    return torch.arange(size).float()


class Caching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + _table(x.size(-1)).softmax(-1)


def test_function_caches_keep_no_fake_tensors() -> None:
    module, x = Caching(), torch.randn(2, 6)
    _table.cache_clear()
    trial(module, x)
    assert torch.equal(module(x), x + torch.arange(6).float().softmax(-1))


class Telling(nn.Module):
    """Puts a tensor into somebody else's list."""

    def __init__(self, told: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.told = nn.Linear(6, 6), told

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.told.append(x.mean())
        return x


def test_a_list_that_gets_tensors_is_noticed_and_put_back() -> None:
    told: list[Tensor] = []
    assert trial(Telling(told), torch.randn(2, 6)).leaks
    assert told == []
    assert not trial(nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1)), torch.randn(2, 6)).leaks


class Casting(nn.Module):
    """Mixtures of experts keep their router in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(x.dtype)
        return self.router(x).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_may_convert_its_parts(dtype: torch.dtype) -> None:
    module = Casting()
    before = module.router.weight
    (place,) = trial(module, torch.randn(2, 6, dtype=dtype)).places
    assert isinstance(place, Out)
    assert place.meta.dtype is dtype
    assert module.router.weight is before
    assert type(before.data) is Tensor


class Store:
    """Like a cache of keys: made ready by its first user."""

    ready, kept = False, None


class Keeping(nn.Module):
    def forward(self, x: Tensor, store: Store) -> Tensor:
        store.kept = torch.cat([store.kept, x]) if store.ready else x  # type: ignore[list-item, assignment]
        store.ready = True
        return x + 1


def test_objects_among_arguments_are_put_back_with_their_flags() -> None:
    store = Store()
    store.ready, store.kept = False, None
    trial(Keeping(), torch.randn(2, 6), store)
    assert not store.ready
    assert store.kept is None


def test_specs_keep_no_tensors() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.randn(3))
    spec = tree.flatten(output, [])
    gc.collect()
    made = tree.unflatten(spec, [torch.ones(3)])
    assert torch.equal(made.last_hidden_state, torch.ones(3))
    assert type(made) is type(output)
    assert not any(isinstance(value, Tensor) for value in vars(spec.template or nn.Module()).values())


# ---- operators that need data for their shapes -----------------------------------------------------------------


def test_ctc_loss_gives_one_number_per_sample() -> None:
    def fn(scores: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        return nn.functional.ctc_loss(scores, targets, torch.full((3,), 9), lengths, reduction="none")

    scores = torch.randn(9, 3, 5, requires_grad=True).log_softmax(-1)
    outcome = trial(fn, scores, torch.ones(3, 2, dtype=torch.long), torch.tensor([1, 2, 2]))
    assert shapes(outcome) == [(3,)]
    assert not outcome.varies


def test_packed_sequences_vary() -> None:
    def fn(x: Tensor, lengths: Tensor) -> Any:
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)

    outcome = trial(fn, torch.randn(3, 5, 4), torch.tensor([5, 1, 3]))
    assert outcome.varies
    assert shapes(outcome)[:2] == [(15, 4), (5,)]


# ---- random draws ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_draws_only_for_its_dropout(dropout: float, seed: int) -> None:
    shape = (1, 2, random.Random(seed).randrange(2, 9), 4)
    q = torch.randn(shape, requires_grad=True)
    attend = functools.partial(nn.functional.scaled_dot_product_attention, dropout_p=dropout)
    before = torch.random.get_rng_state()
    attend(q, q, q)
    drew = not torch.equal(before, torch.random.get_rng_state())
    assert trial(lambda x: attend(x, x, x), q).random == drew == (dropout > 0)
