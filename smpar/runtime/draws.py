"""Without a pipeline: a step that draws no random numbers runs without watching for them.

Watching costs a few microseconds at each torch function. So the first step of a kind is watched, and later ones only if
it drew. One that draws all the same shows in the generators' state, and is watched from then on; what it drew came from
the microbatch's seed, as always, but not from the chain that makes draws independent of a pipeline's degree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from smpar.trace import tree
from smpar.trace.draws import DRAWS, SeedMode

_REMEMBERED = 128


class _Noting(SeedMode):
    """Notes whether any drawing function really drew; attention without dropout, for one, does not."""

    drew = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.drew or func not in DRAWS:
            return super().__torch_function__(func, types, args, kwargs)
        drew = True

        def noted(*args: Any, **kwargs: Any) -> Any:
            nonlocal drew
            before = _states()
            result = func(*args, **kwargs)
            drew = _differ(before, _states())
            return result

        DRAWS.add(noted)
        try:
            return super().__torch_function__(noted, types, args, kwargs)
        finally:
            DRAWS.discard(noted)
            self.drew = drew


def _states() -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.default_generators[torch.cuda.current_device()].get_state())
    return states


def _differ(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) != len(after) or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Draws:
    """Which kinds of steps draw."""

    def __init__(self) -> None:
        self._draws: OrderedDict[Hashable, bool] = OrderedDict()

    @staticmethod
    def kind(fn: Callable[..., Any], arguments: Mapping[str, Any], modes: Hashable) -> Hashable:
        """What decides whether a step draws, as far as it is cheap to tell.

        Args:
            arguments: of the step function; of tensors only their places count.
            modes: of the model.
        """
        return fn, tree.flatten(arguments, []), torch.is_grad_enabled(), modes

    @contextmanager
    def watching(self, kind: Hashable, share: Callable[[], float]) -> Iterator[None]:
        """Around one microbatch's forward and backward.

        Args:
            share: asked when the user calls ``loss.backward()``: the factor for its gradient.
        """
        draws = self._draws.get(kind)
        if draws is None:
            noting = _Noting(share)
            with noting:
                yield
            self._keep(kind, noting.drew)
        elif draws:
            with SeedMode(share):
                yield
        else:
            before = _states()
            with _scaled_backward(share):
                yield
            if _differ(before, _states()):
                self._keep(kind, True)

    def _keep(self, kind: Hashable, draws: bool) -> None:
        self._draws[kind] = draws
        if len(self._draws) > _REMEMBERED:
            self._draws.popitem(last=False)


@contextmanager
def _scaled_backward(share: Callable[[], float]) -> Iterator[None]:
    """``loss.backward()`` starts from the microbatch's share, as under `SeedMode`."""
    plain = torch.Tensor.backward

    def backward(
        self: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if inputs is None and self.requires_grad and (gradient is not None or self.numel() == 1):
            gradient = (torch.ones_like(self) if gradient is None else gradient) * share()
        plain(self, gradient, retain_graph, create_graph, inputs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = plain  # type: ignore[method-assign]
