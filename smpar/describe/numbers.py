"""Numbers for a person: three digits and a unit."""

from __future__ import annotations


def count(number: float) -> str:
    """``1.23 M``, ``456``."""
    if 1e3 <= number < 1e4:
        return f"{number:.0f}"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """``1.23 s``, ``45.6 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def memory(nbytes: float) -> str:
    """``1.23 GiB``: powers of two, as the memory of devices is told."""
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.3g} B"


def percent(part: float, whole: float) -> str:
    """``45 %``; ``-`` of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def ranges(numbers: list[int]) -> str:
    """Whole numbers in few words: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
