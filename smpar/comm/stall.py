"""Says so when this rank waits long for others that are alive: nothing failed, yet nothing goes on.

    rank 0: in a step, waits ── asks, by the store ──▶ ranks 1, 2: answer where their main thread is
            "rank 0 waits at run.py:12 in main, for other ranks, 32 s already. Rank 1 is outside of smpar, ..."

Such as when one rank skips a step, or computes for minutes. It may be meant, so it is a warning and no error.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import FrameType
from typing import Protocol

PATIENCE = 30.0  # s in one wait before this rank says so
ANSWER = 1.5  # s that the others get to say where they are
SHOWN = 8  # ranks named in a message

log = logging.getLogger("smpar")

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.sep + "torch" + os.sep
_WAITS = (
    os.path.join(_HERE, "comm", "channels.py"),
    os.path.join(_HERE, "runtime", "agreement.py"),
    os.sep + os.path.join("torch", "distributed", ""),
)


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


class StallWatch:
    """Looked at by the failure watch's thread; `look` costs some microseconds."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stack: object = None
        self._since = self._asked = 0.0
        self._told = self._answered = False

    def look(self, now: float) -> None:
        """Samples the main thread; asks the others once it was seen in one wait only for PATIENCE seconds."""
        if self._told:
            return
        stack = _waiting_stack()
        if stack is None or stack != self._stack:
            self._stack, self._since, self._asked = stack, now, 0.0
        elif self._asked:
            if now - self._asked > ANSWER:
                self._told = True
                log.warning(self._message(now))
        elif now - self._since > PATIENCE:
            self._asked = now
            self._store.set("ask", "1")

    def answer(self) -> None:
        """Says where this rank is, if another asks; one look at the store."""
        if not self._answered and self._store.check(["ask"]):
            self._answered = True
            self._store.set(f"where/{self._rank}", where())

    def _message(self, now: float) -> str:
        others = []
        for rank in (r for r in range(self._size) if r != self._rank):
            known = self._store.check([f"where/{rank}"])
            others.append(f"rank {rank} {self._store.get(f'where/{rank}').decode() if known else 'gives no answer'}")
        rest = f"; and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        return (
            f"smpar: rank {self._rank} {where()}, for other ranks, {now - self._since:.0f} s already. Meanwhile "
            f"{'; '.join(others[:SHOWN])}{rest}. All ranks must call the same steps, collectives and messages."
        )


def where() -> str:
    """The user's line that the main thread is at, and what it does there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = _waiting_stack() is not None
    inside = False
    while frame is not None:
        name = frame.f_code.co_filename
        inside = inside or name.startswith(_HERE)
        if not name.startswith(_HERE) and _TORCH not in name and not name.startswith("<"):
            doing = "waits" if waits else "works" if inside else "is outside of smpar,"
            return f"{doing} at {os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "is at a place unknown"


def _waiting_stack() -> tuple[tuple[int, int], ...] | None:
    """Identity of the main thread's stack while it waits for a transfer of smpar's; None when it does not."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not any(part in frame.f_code.co_filename for part in _WAITS):
        return None
    stack: list[tuple[int, int]] = []
    ours = False
    while frame is not None:
        ours = ours or frame.f_code.co_filename.startswith(_HERE)
        stack.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(stack) if ours else None
