"""Where a thread's time goes: its stack looked at every few hundred microseconds, from a signal's handler.

A tracing profiler adds to every call, which is most of what small functions take; this one adds some 1 % to all alike.
A handler runs between two bytecodes, so what a call into C takes is noticed at its end, in the function that made it:
a sample counts for the time since the one before, as the given clock tells it: that of the thread, for example, which
stands still while another process has the core.
"""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

Place = Callable[[Sequence[CodeType]], tuple[str, ...]]
_MODULE = str(Path(torch.__file__).parent / "nn" / "modules" / "module.py")


def hold_signals() -> None:
    """Call it before threads start: they inherit that the sampler's signal is none of their business."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})


class Sampler:
    """``with Sampler(place) as seen: ...``; then ``seen.seconds``: path -> seconds with exactly this path.

    Only in the main thread, after `hold_signals`.

    Args:
        place: from a stack's code objects, outermost first, to the path under which its time is counted.
        clock: of the seconds that are counted.
        interval: mean seconds between samples; they vary, so as not to keep time with what they look at.
    """

    def __init__(self, place: Place, clock: Callable[[], float] = time.thread_time, interval: float = 3e-4) -> None:
        self.seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.samples = 0
        self._place, self._clock, self._interval = place, clock, interval
        self._random = random.Random(0)
        self._before = 0.0

    def _look(self, _: int, frame: FrameType | None) -> None:
        now = self._clock()
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self.seconds[self._place(stack[::-1])] += now - self._before
        self.samples += 1
        self._before = self._clock()
        self._wind()

    def _wind(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._interval * self._random.uniform(0.5, 1.5))

    def __enter__(self) -> Sampler:
        self._handler = signal.signal(signal.SIGALRM, self._look)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        self._before = self._clock()
        self._wind()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        hold_signals()
        signal.signal(signal.SIGALRM, self._handler)


def smpar_path(folder: Path, computing: frozenset[str], waiting: frozenset[str]) -> Place:
    """Paths of smpar's own functions, with what they call outside counted as theirs; but apart from these:

    ``(modules)`` what a unit's own forward takes, ``(watched)`` the same where each of its operations goes through
    smpar's watch for random draws, ``(autograd)`` and ``(waiting)`` what the named functions take, and ``(script)`` the
    step function and forwards of split modules, between two calls of smpar.

    Args:
        folder: of smpar's sources.
        computing, waiting: names of functions that hand over to autograd, or wait for another rank.
    """
    inside = str(folder)
    names: dict[CodeType, str | None] = {}

    def name(code: CodeType) -> str | None:
        if code not in names:
            own = code.co_filename.startswith(inside)
            told = f"{Path(code.co_filename).stem}.{getattr(code, 'co_qualname', code.co_name)}"
            names[code] = told.replace(".<locals>", "") if own else None
        return names[code]

    def path(stack: Sequence[CodeType]) -> tuple[str, ...]:
        found: list[str] = []
        last = -1
        for depth, code in enumerate(stack):
            if (own := name(code)) is not None:
                found.append(own)
                last = depth
        if last < 0:
            return ("(script)",)
        below = stack[last + 1 :]
        called = stack[last].co_name
        in_unit = any(code.co_name == "call_unit" for code in stack)
        if in_unit and any(code.co_filename == _MODULE for code in below):
            found.append("(modules)")
        elif in_unit and found[-1] == "draws.SeedMode.__torch_function__":
            found[-1] = "(watched)"
        elif called in computing:
            found.append("(autograd)")
        elif called in waiting:
            found.append("(waiting)")
        elif called in ("__call__", "call") and below:
            found.append("(script)")
        return tuple(found)

    return path


@dataclass
class Node:
    """A function on a path: seconds in it and all below."""

    seconds: float = 0.0
    below: dict[str, Node] = field(default_factory=dict)


def tree_of(seconds: Mapping[tuple[str, ...], float]) -> Node:
    """Paths as a tree; recursion stays as it was."""
    root = Node()
    for path, taken in seconds.items():
        node = root
        node.seconds += taken
        for name in path:
            node = node.below.setdefault(name, Node())
            node.seconds += taken
    return root


def lines_of(node: Node, scale: float, least: float, indent: int = 0) -> list[str]:
    """The tree as text: ``seconds x scale`` of each function from ``least`` on, dearest first."""
    result = []
    for name, child in sorted(node.below.items(), key=lambda item: -item[1].seconds):
        if child.seconds * scale >= least:
            own = child.seconds - sum(deeper.seconds for deeper in child.below.values())
            result.append(f"{child.seconds * scale:8.1f} {own * scale:7.1f}  {'  ' * indent}{name}")
            result += lines_of(child, scale, least, indent + 1)
    return result
