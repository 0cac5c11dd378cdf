"""Long work shows that it goes on: a moving line on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.status import Status

_PATIENCE = 1.0  # seconds before a terminal shows anything
_INTERVAL = 10.0  # seconds between lines elsewhere


class Progress:
    """``with Progress("partitioning the model", "calls traced", shown=rank == 0) as p: ... p.advance()``

    Quick work shows nothing. Writes to standard error, and only when ``advance`` is called.

    Args:
        what: is being done.
        counted: what ``advance`` counts.
        shown: whether this rank shows it.
        stream: instead of standard error.
        clock: seconds.
    """

    def __init__(
        self,
        what: str,
        counted: str,
        shown: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._counted, self._shown = what, counted, shown
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._count = 0
        self._note = ""
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        self._start = self._last = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def advance(self, note: str = "") -> None:
        """One more is done; ``note`` is what to say besides."""
        self._count += 1
        self._note = note
        if not self._shown:
            return
        now = self._clock()
        if self._stream.isatty():
            if self._status is not None:
                self._status.update(self._line(now))
            elif now - self._start >= _PATIENCE:
                self._status = Status(self._line(now), console=Console(file=self._stream))
                self._status.start()
        elif now - self._last >= _INTERVAL:
            self._last = now
            print(f"smpar: {self._line(now)}", file=self._stream, flush=True)

    def _line(self, now: float) -> str:
        note = f" {self._note}" if self._note else ""
        return f"{self._what}: {self._count} {self._counted}{note}, {now - self._start:.0f} s"
