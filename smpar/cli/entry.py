"""``module:function`` on the command line: the function that builds the model and a batch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from smpar.errors import CommandError
from smpar.planner.reading import nearest

HELP = """The function takes no arguments and returns (model, batch) or (model, batch, step). A batch is a tensor, a
tuple of the model's arguments, or a dict of them by name; step(model, *batch) calls the model and
returns the loss. FILE.py:FUNCTION works, too."""


@dataclass(frozen=True)
class Entry:
    """What the function returned: ``step(model, *args, **kwargs)``, or the model itself if ``step`` is None."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: Callable[..., Any] | None = None


def load(name: str) -> Entry:
    """Import the function and call it; modules are looked for in the working directory, too.

    Raises:
        CommandError: there is no such module or function, or it returned something else.
    """
    where, colon, attribute = name.rpartition(":")
    if not (where and colon and attribute):
        raise CommandError("an entry point is module:function", repr(name), "write my_training:build")
    module = _module(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise CommandError("an entry point is a function of its module", repr(name), nearest(attribute, callables))
    return checked(function(), name)


def checked(result: Any, name: str) -> Entry:
    """What an entry point returned, taken apart.

    Raises:
        CommandError: it is no model and batch.
    """
    good = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)
    step = result[2] if good and len(result) == 3 else None
    if not good or not (step is None or callable(step)):
        types = [type(x).__name__ for x in result] if isinstance(result, tuple) else type(result).__name__
        raise CommandError(
            f"{name} returns (model, batch) or (model, batch, step)", f"{types}", "return model, (inputs, targets)"
        )
    model, batch = result[0], result[1]
    if isinstance(batch, Mapping):
        return Entry(model, (), dict(batch), step)
    return Entry(model, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}, step)


def _module(where: str) -> Any:
    if where.endswith(".py"):
        path = Path(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise CommandError("an entry point's file exists", repr(where), "give its path from here")
        sys.path.insert(0, str(path.resolve().parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
            raise  # a module that this one needs
        raise CommandError(
            "an entry point's module can be imported", str(error), "start from its folder, or set PYTHONPATH"
        ) from None
