"""Random numbers that do not depend on how a model is cut.

Every call of a drawing function (dropout, ``torch.rand``, ...) reseeds the generator with the next
number of a chain, ``seed + k * STRIDE``. A unit that another rank runs moves the chain on by the
number of its drawing calls, known from the trace, so all ranks agree on the k of every call:

    call      dropout  dropout | dropout  rand   | dropout
    home      stage 0            stage 1           stage 0
    k         0        1         2        3        4

The chain's position lives in the generator itself (its initial seed), so a recomputation that
restores the generator's state (activation checkpointing) draws the same numbers again.

Ranks of a tensor-parallel group go along one chain. Where each works on values of its own, its *shard*
is mixed into the seed of the call; the chain goes on as it does on the others:

    chain     k           k + 1             k + 2
    shard 0   draw(k)     draw(k + 1)       draw(k + 2)      what all draw
    shard 2   draw(k)     draw(k + 1, 2)    draw(k + 2)      what the second rank draws for itself
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

STRIDE = 0x9E3779B97F4A7C15
MASK = (1 << 63) - 1

DRAWS: set[Any] = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
    F.gumbel_softmax, F.scaled_dot_product_attention, F.multi_head_attention_forward, F.fractional_max_pool2d,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.native_dropout, torch.rrelu,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson,
    torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_, torch.Tensor.bernoulli,
    torch.Tensor.exponential_, torch.Tensor.random_, torch.Tensor.multinomial, torch.Tensor.log_normal_,
    torch.Tensor.geometric_, torch.Tensor.cauchy_, torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh,
    torch._VF.rnn_relu,
}  # fmt: skip


def advance(seed: int, draws: int) -> int:
    """The chain's value ``draws`` calls later."""
    return (seed + draws * STRIDE) & MASK


def mix(*numbers: int) -> int:
    """A 63-bit seed from several integers (splitmix64 finalizer over a running sum)."""
    state = 0x243F6A8885A308D3
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & MASK


def seed_generators(seed: int) -> None:
    """Seed the default generators of the CPU and, where CUDA is in use, of the current device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


_shard = 0
_PLAIN = 0, False  # shard, and whether drawing calls are reseeded


def shard() -> int:
    """What is mixed into the seed of each drawing call; 0: nothing, all ranks of a tensor-parallel group draw alike."""
    return _shard


def set_shard(number: int) -> int:
    """Set `shard`, 0 or more; returns the one before."""
    global _shard
    if number:
        remember_in_states()
    before, _shard = _shard, number
    return before


@contextmanager
def sharded(number: int) -> Iterator[None]:
    """Around code in which `shard` is ``number``."""
    before = set_shard(number)
    try:
        yield
    finally:
        set_shard(before)


def draw(value: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a drawing function at the chain's ``value``, where the generators are left."""
    if not _shard:
        seed_generators(value)
        return func(*args, **kwargs)
    seed_generators(mix(value, _shard))
    try:
        return func(*args, **kwargs)
    finally:
        seed_generators(value)


def watching() -> bool:
    """Whether a `SeedMode` sees the drawing calls."""
    return any(isinstance(mode, SeedMode) for mode in _modes())


def _modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


@functools.cache
def remember_in_states() -> None:
    """From now on a state of ``torch.get_rng_state`` tells, too, how draws were seeded when it was taken.

    Checkpointing takes a state before what it will run again in backward, sets it there, and sets what it found there
    afterwards. Nothing else that goes through every checkpoint, the user's as well as ours, could take the shard along.
    """
    get, put = torch.get_rng_state, torch.set_rng_state

    @functools.wraps(get)
    def get_rng_state() -> torch.Tensor:
        state, seeding = get(), (_shard, watching())
        if seeding != _PLAIN:
            state.smp_seeding = seeding  # type: ignore[attr-defined]
        return state

    @functools.wraps(put)
    def set_rng_state(new_state: torch.Tensor) -> None:
        put(new_state)
        if torch._C._current_graph_task_id() == -1:  # not in backward
            return
        number, watched = getattr(new_state, "smp_seeding", _PLAIN)
        set_shard(number)
        if watched and not watching():
            torch._C._push_on_torch_function_stack(_SeedAgain())
        elif not watched and any(isinstance(mode, _SeedAgain) for mode in _modes()):
            torch._C._pop_torch_function_stack()

    torch.get_rng_state, torch.set_rng_state = get_rng_state, set_rng_state


class SeedMode(TorchFunctionMode):
    """Reseeds before each drawing call. Also entered around backward, for recomputations in there.

    Args:
        share: asked when the user calls ``loss.backward()``: the factor for its gradient.
    """

    def __init__(self, share: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.calls = 0
        self._share = share

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in DRAWS:
            self.calls += 1
            return draw(advance(torch.default_generator.initial_seed(), 1), func, args, kwargs or {})
        elif func is torch.autograd.backward or func is torch.Tensor.backward:
            return self._backward(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _backward(self, func: Callable[..., Any], tensors: Any, grads: Any = None, *args: Any, **kwargs: Any) -> None:
        """Backward with this mode on, for what activation checkpointing runs in it again.

        A mode is off inside a function that went through it, and backward of tensors does. Backward of edges does not.
        """
        for name in ("gradient", "grad_tensors"):
            grads = kwargs.pop(name, grads)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        starts = [grads] if isinstance(grads, torch.Tensor) else list(grads or [None] * len(roots))
        starts = [
            torch.ones_like(root) if start is None and isinstance(root, torch.Tensor) and root.numel() == 1 else start
            for root, start in zip(roots, starts, strict=False)
        ]
        plain = kwargs.get("inputs") is not None or len(starts) != len(roots) or any(start is None for start in starts)
        if plain or not all(isinstance(root, torch.Tensor) and root.requires_grad for root in roots):
            func(tensors, grads, *args, **kwargs)
            return
        if func is torch.Tensor.backward and self._share is not None:
            factor = self._share()
            starts = [start * factor for start in starts]
        edges = [get_gradient_edge(root) for root in roots]
        with self:
            torch.autograd.backward(edges, starts, *args, **kwargs)


class _SeedAgain(SeedMode):
    """On while a checkpoint runs again, in a backward without a `SeedMode`, what ran under one."""


class CountMode(TorchFunctionMode):
    """Counts drawing calls in a trace, and learns drawing functions that the list above lacks.

    Args:
        drawn: says how many random operators the trace has seen so far.
    """

    def __init__(self, drawn: Callable[[], int]) -> None:
        super().__init__()
        self.calls = 0
        self._drawn = drawn

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__format__ and not args[0].dim():  # a number in a name, not what it looks like
            return format(args[0].item(), *args[1:])
        known = func in DRAWS
        before = self._drawn()
        result = func(*args, **(kwargs or {}))
        if not known and self._drawn() > before:
            DRAWS.add(func)
            known = True
        self.calls += known
        return result
