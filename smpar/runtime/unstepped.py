"""Training without ``smpar.step`` (one stage): calls of the model and backwards do by themselves what a step does.

y = model(x)        buffers are the first replica's; draws follow a seed that tensor-parallel ranks share
loss.backward()     at its end: gradients are averaged
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable

from smpar.comm.world import World
from smpar.errors import JoinError
from smpar.runtime.agreement import Called, agree
from smpar.runtime.replicas import Replicas
from smpar.runtime.trained import Trained
from smpar.trace import tree
from smpar.trace.draws import SeedMode, mix, remember_in_states, seed_generators, sharded, watching


class Unstepped:
    """Calls of one model outside of steps.

    Args:
        replicas: averages the gradients.
        trained: knows the parameters.
        shard: of draws outside of distributed modules, see `smpar.trace.draws`.
    """

    def __init__(self, world: World, replicas: Replicas, trained: Trained, shard: int) -> None:
        self._world, self._replicas, self._trained, self._shard = world, replicas, trained, shard
        self._seed: int | None = None
        self._calls = 0
        self._splits = world.axis_size("tp") > 1
        if self._splits:
            remember_in_states()

    def call(self, module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module; the next backward averages gradients over the replicas, if gradients are enabled.

        Raises:
            JoinError: inside ``join``, which counts steps.
        """
        reducer = self._replicas.reducer
        if torch.is_grad_enabled():
            if reducer.joining is not None:
                raise JoinError("model(...) inside join and outside of a step")
            with self._world.guard():
                self._replicas.start_step()
            reducer.prepare(self._trained.parameters())
            reducer.listen(self._told)
        if not self._splits or watching():
            return module(*args, **kwargs)
        with self._world.guard(), self._drawing(type(module).__name__, {**dict(enumerate(args)), **kwargs}):
            return module(*args, **kwargs)

    @contextmanager
    def _drawing(self, name: str, given: dict[Any, Any]) -> Iterator[None]:
        """Draws come from a seed that the tensor-parallel group has in common, another one in each call.

        Its ranks are called with the same tensors, or with equal shapes if samples are joined: else they would wait for
        each other, or sum what does not belong together.
        """
        tensors: dict[str, list[torch.Tensor]] = {str(key): [] for key in given}
        for key, value in given.items():
            tree.flatten(value, tensors[str(key)])  # nothing but tensors: a cache, say, is another object on each rank
        drawn = int(torch.randint(0, 1 << 62, (1,), device="cpu")) if self._seed is None else self._seed
        called = Called(self._calls, name, tensors, dict, digest=0, known=True)
        self._seed, _ = agree(self._world, called, drawn, self._shard > 0)
        random = torch.get_rng_state()
        self._calls += 1
        seed_generators(mix(self._seed, self._world.axis_rank("rdp"), self._calls))
        try:
            with sharded(self._shard), SeedMode():
                yield
        finally:
            torch.set_rng_state(random)

    def _told(self, _: int) -> None:
        """The first gradient of a backward is there."""
        self._replicas.reducer.listen(None)
        Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        reducer = self._replicas.reducer
        with self._world.guard(), reducer.step(self._trained.parameters(), "outside of steps"):
            reducer.finish(True)
        self._replicas.end_step()
        reducer.listen(self._told)
