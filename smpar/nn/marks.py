"""What is asked to be divided."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smpar.errors import MarkedTooLate
from smpar.runtime.core import is_initialized, runtime
from smpar.runtime.creation import made_inside


@dataclass(frozen=True, eq=False)
class Mark:
    """What was said last about a module.

    Attributes:
        enabled: whether it is to be divided.
        options: for the twin of a registered class, besides the arguments that its hook gives.
    """

    enabled: bool
    options: Mapping[str, Any]


_marks: weakref.WeakKeyDictionary[nn.Module, Mark] = weakref.WeakKeyDictionary()
_NONE = Mark(False, {})


def mark_of(module: nn.Module) -> Mark:
    """What was said last about a module; of one that nobody spoke of, that it is not to be divided."""
    return _marks.get(module, _NONE)


def mark_as(copy: nn.Module, original: nn.Module) -> None:
    """Ask the same for a copy's modules as for those that they are copies of."""
    for here, there in zip(copy.modules(), original.modules(), strict=True):
        if there in _marks:
            _marks[here] = _marks[there]


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Ask for the modules made inside to be divided, or not to be; the innermost context wins.

    ``smpar.DistributedModel`` divides them: the outermost supported modules all of whose parts were asked for. What is
    made in a disabled context stays as it is, and so do the supported modules around it, of which it is a part: then
    their other parts are divided, one by one.

    Args:
        options: arguments for the twins of registered classes (see `tp_register`), which have precedence; a twin gets
            those that it has. ``distribute_embedding=False`` keeps vocabularies whole.
    """
    mark = Mark(enabled, options)
    with made_inside(lambda module: _marks.__setitem__(module, mark)):
        yield


_context = tensor_parallelism  # under a name that no argument below has


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Ask for a module, and all that is in it, to be divided, or not to be; the last call wins.

    Args:
        options: see `tensor_parallelism`.

    Raises:
        MarkedTooLate: the module is in a ``smpar.DistributedModel`` already.
    """
    model = runtime().maybe_model if is_initialized() else None
    if model is not None and any(part is module for part in model.modules()):
        raise MarkedTooLate(f"set_tensor_parallelism of a {type(module).__name__} in a DistributedModel")
    mark = Mark(enabled, options)
    for part in module.modules():
        _marks[part] = mark


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **options: Any
) -> Iterator[None]:
    """Around the creation of a model: whether to divide it, and of which dtype its parameters are.

    Args:
        dtype: the default dtype inside; None: as outside.
        options: see `tensor_parallelism`.
    """
    with _context(tensor_parallelism, **options), default_dtype(dtype):
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """torch's default dtype inside; None: as outside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
