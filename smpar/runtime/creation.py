"""Noticing modules as they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def made_inside(note: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``note`` with each module made inside, as soon as it is a module; that of the innermost context last."""
    plain = nn.Module.__init__

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(module, *args, **kwargs)
        note(module)

    nn.Module.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]
