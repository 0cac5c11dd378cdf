"""Glue's mode: how a microbatch sees the torch calls of its Python, and how it looks away while a unit runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smpar.stage.tensor import StageTensor, activate

if TYPE_CHECKING:
    from smpar.stage.run import Run


class GlueMode(TorchFunctionMode):
    """Sees every torch call in glue, also those whose arguments are all plain."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for arg in args:
            kind = type(arg)
            if kind is StageTensor or (kind is nn.Parameter and id(arg) in self.run.layout.holders):
                break
            if (kind is list or kind is tuple) and any(isinstance(a, (StageTensor, nn.Parameter)) for a in arg):
                break
        else:
            if (
                not any(isinstance(v, (StageTensor, nn.Parameter)) for v in kwargs.values())
                and StageTensor not in types
            ):
                return self.run.replicated(func, args, kwargs)
        return self.run.operation(func, args, kwargs)


class Plain:
    """Takes a microbatch's mode off the stack of torch-function modes, and lets no microbatch be the running one."""

    __slots__ = ("_before", "_in_glue", "_mode")

    def __init__(self, mode: GlueMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = activate(None)
        depth = torch._C._len_torch_function_stack()
        self._in_glue = depth > 0 and torch._C._get_function_stack_at(depth - 1) is self._mode
        if self._in_glue:
            torch._C._pop_torch_function_stack()

    def __exit__(self, *error: object) -> None:
        if self._in_glue:
            torch._C._push_on_torch_function_stack(self._mode)
        activate(self._before)
