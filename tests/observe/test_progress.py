"""Long work shows that it goes on, quick work shows nothing."""

from __future__ import annotations

import io

from smpar.observe.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _work(stream: io.StringIO, seconds_each: float, count: int, shown: bool = True) -> str:
    now = [100.0]
    with Progress("tracing", "calls", shown, stream, lambda: now[0]) as progress:
        for _ in range(count):
            now[0] += seconds_each
            progress.advance()
    return stream.getvalue()


def test_a_line_every_ten_seconds() -> None:
    assert _work(io.StringIO(), 1.0, 25) == "smpar: tracing: 10 calls, 10 s\nsmpar: tracing: 20 calls, 20 s\n"


def test_a_terminal_shows_what_lasts() -> None:
    assert "tracing: 3 calls" in _work(_Terminal(), 0.6, 3)


def test_quick_work_and_other_ranks_are_silent() -> None:
    assert _work(io.StringIO(), 0.1, 50) == ""
    assert _work(_Terminal(), 0.1, 9) == ""
    assert _work(_Terminal(), 5.0, 9, shown=False) == ""
