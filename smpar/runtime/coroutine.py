"""A microbatch's forward as a coroutine: suspended where its next segment is not due yet.

Only forwards suspend, never a backward. Grad mode, autocast and the stack of torch-function modes are
the thread's, and the default dtype and the choice of attention kernels the process's, so each side puts its own back
after a switch. So it does with what ranks of a tensor-parallel group draw for themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from greenlet import greenlet

from smpar.stage.tensor import activate
from smpar.trace.draws import set_shard, shard

_DEVICES = ("cpu", "cuda")
_OF_PROCESS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (  # get, set
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (shard, set_shard),
)


@dataclasses.dataclass(slots=True)
class _ThreadState:
    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    modes: list[Any]
    run: Any
    process: tuple[Any, ...]

    @classmethod
    def take(cls) -> _ThreadState:
        """Remember the thread's modes and take its torch-function modes off the stack."""
        modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
        return cls(
            torch.is_grad_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
            torch.is_autocast_cache_enabled(),
            modes,
            activate(None),
            tuple(get() for get, _ in _OF_PROCESS),
        )

    def put(self) -> None:
        torch._C._set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        for mode in reversed(self.modes):
            torch._C._push_on_torch_function_stack(mode)
        activate(self.run)
        for (get, give), value in zip(_OF_PROCESS, self.process, strict=True):
            if get() != value:
                give(value)


class Forward:
    """The forward of one microbatch on one rank, in as many slices as the rank has segments.

    Args:
        body: runs the step function; it calls ``enter`` at the start of each of this rank's segments.
        slices: number of this rank's segments. With one, nothing suspends and ``body`` is just called.
    """

    def __init__(self, body: Callable[[], Any], slices: int) -> None:
        self._body = body
        self._coroutine = greenlet(body) if slices > 1 else None
        self._entered: int | None = None
        self.result: Any = None
        self.done = False

    def enter(self, segment: int) -> None:
        """Called in glue where a segment of this rank begins: wait there until it is due."""
        if self._coroutine is not None and self._entered is not None:
            state = _ThreadState.take()
            try:
                self._coroutine.parent.switch()
            finally:
                state.put()
        self._entered = segment

    def advance(self) -> None:
        """Run on until the next segment of this rank begins, or to the end."""
        if self._coroutine is None:
            self.result = self._body()
            self.done = True
            return
        state = _ThreadState.take()
        for mode in reversed(state.modes):
            torch._C._push_on_torch_function_stack(mode)
        try:
            result = self._coroutine.switch()
        finally:
            for _ in range(torch._C._len_torch_function_stack()):
                torch._C._pop_torch_function_stack()
            state.put()
        if self._coroutine.dead:
            self.result, self.done = result, True

    def drop(self) -> None:
        """Unwind a forward that will not go on."""
        if self._coroutine is not None and not self._coroutine.dead and self._entered is not None:
            state = _ThreadState.take()
            try:
                self._coroutine.throw()
            finally:
                for _ in range(torch._C._len_torch_function_stack()):
                    torch._C._pop_torch_function_stack()
                state.put()
