"""What this rank did when: spans of actions, waits and messages, kept only when asked for.

::

    compute    |step 3                                        |
               | agree |0F0  |0F1  |0B0  |0B1  |reduce|share  |
    waits                        |wait |     |wait|
    messages            |send |send|
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

KEPT = 200_000  # spans of a rank; the oldest go first
_UNSETTLED = 4_096  # device events that a step may leave open before the device is waited for


class Span(NamedTuple):
    """One stretch of time on this rank.

    Attributes:
        name: what happened.
        category: ``action``, ``phase``, ``step``, ``wait`` or ``send``.
        start, end: nanoseconds of the machine's monotonic clock, which its processes share.
        details: more about it; for a message ``flow``, its number on its channel, equal at both ends.
    """

    name: str
    category: str
    start: int
    end: int
    details: dict[str, Any]


class Totals(NamedTuple):
    """Nanoseconds of a step: in actions, and of that waiting for messages."""

    actions: int
    waits: int

    @property
    def busy(self) -> int:
        return self.actions - self.waits


class HostClock:
    """Marks are times of the process itself."""

    def mark(self) -> Any:
        return time.monotonic_ns()

    def settle(self) -> Callable[[Any], int]:
        """How to read the marks made so far as nanoseconds."""
        return int

    def restart(self) -> None:
        """Marks from before will not be read."""


class DeviceClock:
    """Marks are events in the device's stream: the process runs ahead of it, and waits there are waits of the stream.

    Args:
        event: makes an event with ``record()`` and ``elapsed_time(later)`` in milliseconds.
        synchronize: waits for the device.
    """

    def __init__(self, event: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        self._event, self._synchronize = event, synchronize
        self._base: tuple[Any, int] | None = None

    def mark(self) -> Any:
        if self._base is None:
            self._synchronize()
            self._base = self._recorded(), time.monotonic_ns()
        return self._recorded()

    def settle(self) -> Callable[[Any], int]:
        """Wait for the device; see `HostClock.settle`."""
        self._synchronize()
        assert self._base is not None, "nothing was marked"
        event, start = self._base
        return lambda mark: start + round(1e6 * event.elapsed_time(mark))

    def restart(self) -> None:
        """See `HostClock.restart`. The device's clock drifts away from the host's, so each step begins anew."""
        self._base = None

    def _recorded(self) -> Any:
        event = self._event()
        event.record()
        return event


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock that sees when work on ``device`` is done."""
    if device.type == "cuda":
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.synchronize)
    return HostClock()


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Spans:
    """A recorder that costs nothing while off.

    Args:
        tracing: whether to keep spans for a trace file.
        clock: where times come from.

    Attributes:
        counting: whether to sum up the step that runs, for the metrics line.
        dropped: spans that were forgotten because too many came.
    """

    def __init__(self, tracing: bool, clock: HostClock | DeviceClock | None = None, kept: int = KEPT) -> None:
        self.tracing = tracing
        self.counting = False
        self.dropped = 0
        self._clock = clock or HostClock()
        self._kept: deque[Span] = deque(maxlen=kept)
        self._open: list[tuple[str, str, Any, Any, dict[str, Any]]] = []
        self._acting = False
        self._actions = self._waits = 0

    @property
    def on(self) -> bool:
        return self.tracing or self.counting

    def action(self, action: Any) -> contextlib.AbstractContextManager[None]:
        """Around one action of the timetable."""
        return self._action(str(action), microbatch=action.microbatch) if self.on else _NOTHING

    def microbatch(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Around a microbatch that runs without a pipeline, forward and backward in one."""
        return self._action(f"microbatch {index}", microbatch=index) if self.on else _NOTHING

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around a part of the step that is no action."""
        return self._span(name, "phase", {}) if self.on else _NOTHING

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Around a whole step."""
        return self._step(number) if self.on else _NOTHING

    def wait(self, name: str, **details: Any) -> contextlib.AbstractContextManager[None]:
        """Around waiting for a message."""
        return self._span(name, "wait", dict(details, acting=self._acting)) if self.on else _NOTHING

    def send(self, name: str, **details: Any) -> contextlib.AbstractContextManager[None]:
        """Around handing a message over."""
        return self._span(name, "send", details) if self.on else _NOTHING

    @contextlib.contextmanager
    def _action(self, name: str, **details: Any) -> Iterator[None]:
        before, self._acting = self._acting, True
        try:
            with self._span(name, "action", details):
                yield
        finally:
            self._acting = before

    @contextlib.contextmanager
    def _step(self, number: int) -> Iterator[None]:
        self.totals()  # what happened since the last step belongs to none
        self._clock.restart()
        try:
            with self._span(f"step {number}", "step", {}):
                yield
        finally:
            self._settle()

    @contextlib.contextmanager
    def _span(self, name: str, category: str, details: dict[str, Any]) -> Iterator[None]:
        start = self._clock.mark()
        try:
            yield
        finally:
            self._open.append((name, category, start, self._clock.mark(), details))
            if len(self._open) >= _UNSETTLED:
                self._settle()

    def _settle(self) -> None:
        if not self._open:
            return
        read = self._clock.settle()
        for name, category, start, end, details in self._open:
            span = Span(name, category, read(start), read(end), details)
            if category == "action":
                self._actions += span.end - span.start
            elif details.pop("acting", False):
                self._waits += span.end - span.start
            if self.tracing:
                self.dropped += len(self._kept) == self._kept.maxlen
                self._kept.append(span)
        self._open.clear()

    def totals(self) -> Totals:
        """Sums since the last call."""
        self._settle()
        result = Totals(self._actions, self._waits)
        self._actions = self._waits = 0
        return result

    def take(self) -> list[Span]:
        """The spans kept so far, which are then forgotten; in the order of their ends."""
        self._settle()
        kept = list(self._kept)
        self._kept.clear()
        return kept
