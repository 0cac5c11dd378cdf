"""Random numbers that do not depend on how a model is cut.

Every call of a drawing function (dropout, ``torch.rand``, ...) reseeds the generator with the next
number of a chain, ``seed + k * STRIDE``. A unit that another rank runs moves the chain on by the
number of its drawing calls, known from the trace, so all ranks agree on the k of every call:

    call      dropout  dropout | dropout  rand   | dropout
    home      stage 0            stage 1           stage 0
    k         0        1         2        3        4

The chain's position lives in the generator itself (its initial seed), so a recomputation that
restores the generator's state (activation checkpointing) draws the same numbers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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


_shard = 0


def shard() -> int:
    """Which part of a divided tensor draws are for: 0 = the whole, which all ranks of a tensor-parallel group draw."""
    return _shard


def set_shard(number: int) -> int:
    """Draws are for this part from now on; gives the one before."""
    global _shard
    before, _shard = _shard, number
    return before


@contextlib.contextmanager
def sharded(number: int) -> Iterator[None]:
    """Draws inside are for this part."""
    before = set_shard(number)
    try:
        yield
    finally:
        set_shard(before)


def seed_generators(seed: int) -> None:
    """Seed the default generators of the CPU and, where CUDA is in use, of the current device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def step_chain() -> None:
    """Move the chain in the generator on by one call and reseed from it."""
    seed_generators(advance(torch.default_generator.initial_seed(), 1))


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
            step_chain()
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
