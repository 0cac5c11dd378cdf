"""What this rank did when: spans of actions, waits and messages, kept only when asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One stretch of time on this rank; ``start`` and ``end`` in nanoseconds of the monotonic clock."""

    name: str
    category: str
    start: int
    end: int
    details: dict[str, Any]


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Spans:
    """A recorder that costs nothing while off.

    Args:
        on: whether to keep spans.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self.kept: list[Span] = []

    def action(self, action: Any) -> contextlib.AbstractContextManager[None]:
        """Around one action of the timetable."""
        return self._span(str(action), "action", microbatch=action.microbatch) if self.on else _NOTHING

    def wait(self, message: Any) -> contextlib.AbstractContextManager[None]:
        """Around waiting for a message."""
        if not self.on:
            return _NOTHING
        return self._span(f"wait {message.kind} of {message.microbatch}", "wait", flow=message.flow)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around a part of the step that is no action."""
        return self._span(name, "phase") if self.on else _NOTHING

    def point(self, name: str, **details: Any) -> None:
        """A moment: a message sent."""
        if self.on:
            now = time.monotonic_ns()
            self.kept.append(Span(name, "message", now, now, details))

    @contextlib.contextmanager
    def _span(self, name: str, category: str, **details: Any) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.kept.append(Span(name, category, start, time.monotonic_ns(), details))

    def take(self) -> list[Span]:
        """The spans so far, which are then forgotten."""
        kept, self.kept = self.kept, []
        return kept
