"""What a model consists of, looked up anew in each step at little cost, and in words that ranks can compare."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from smpar.trace.outcomes import autocast_state, flags

_REMEMBERED = 128


class Structure:
    """The modules and parameters of a model, which the user may replace, add and remove between steps.

    Attributes:
        modules, parameters: as of the last look.
        changes: how often they were found to have changed since the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parts: list[Any] | None = None
        self._gone: list[Any] = []  # what was there before; no other object shall get its id
        self.changes = 0
        self.modules: list[nn.Module] = list(model.modules())
        self.parameters: list[nn.Parameter] = list(model.parameters())

    def look(self) -> bool:
        """Whether they have changed since the last look."""
        parts, before = self._list(), self._parts
        if before is not None and len(parts) == len(before) and all(map(operator.is_, parts, before)):
            return False
        self._gone += before or ()
        self.modules, self.parameters = list(self._model.modules()), list(self._model.parameters())
        self._parts = self._list()
        self.changes += before is not None
        return before is not None

    def _list(self) -> list[Any]:
        return [part for m in self.modules for group in (m._modules, m._parameters) for part in group.values()]

    def modes(self) -> tuple[Any, ...]:
        """What training loops switch between steps."""
        return self.changes, flags(self.modules), tuple(p.requires_grad for p in self.parameters)

    def described(self) -> dict[str, str]:
        """Modules, parameters and modes in words."""
        modules = list(self._model.named_modules())
        return {
            "modules": _few([f"{n} {type(m).__name__}" for n, m in modules if n]),
            "shared parameters": _few(_shared(self._model)),
            "modules in evaluation mode": _few([n or "(model)" for n, m in modules if not m.training]),
            "frozen parameters": _few([n for n, p in self._model.named_parameters() if not p.requires_grad]),
        }


def thread_modes() -> tuple[Any, ...]:
    """Of the modes that the running thread is in, those that decide what a step does."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()


class Circumstances:
    """What besides its arguments decides what a step of a model does."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._digests: dict[Hashable, int] = {}

    def described(self) -> dict[str, Any]:
        """In words; equal on all ranks that run the same."""
        names = ("grad mode", "inference mode", "autocast")
        return {**dict(zip(names, map(str, thread_modes()), strict=True)), **self._structure.described()}

    def state(self) -> Hashable:
        """Where this is equal, so are the words."""
        self._structure.look()
        return *self._structure.modes(), *thread_modes()

    def digest(self, state: Hashable) -> int:
        """A checksum of the words, which is remembered for a state."""
        if state not in self._digests:
            if len(self._digests) >= _REMEMBERED:
                self._digests.clear()
            self._digests[state] = zlib.crc32(repr(list(self.described().values())).encode())
        return self._digests[state]


def _shared(model: nn.Module) -> list[str]:
    """Further names of parameters that have several."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return [f"{name} = {first[id(p)]}" for name, p in every if first.setdefault(id(p), name) != name]


def _few(names: list[str]) -> str:
    """All names count for equality; a reader sees the first few."""
    if len(names) <= 4:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:4])} and {len(names) - 4} more (checksum {zlib.crc32(' '.join(names).encode()):08x})"
