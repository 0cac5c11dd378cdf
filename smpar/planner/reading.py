"""Reading what people write by hand: keys that exist, numbers that are numbers, in units that the key names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from smpar.errors import ClusterError

MANY = 2**17
"""Devices, nodes or network cards that a cluster may have; each is an object here."""


def record(given: Any, where: str, known: Collection[str], needed: Collection[str] = ()) -> Mapping[str, Any]:
    """An object with known keys only, and all that are needed.

    Args:
        where: how errors call it.

    Raises:
        ClusterError: it is something else.
    """
    if not isinstance(given, Mapping):
        raise ClusterError(f"{where} is an object with keys", shown(given), f"give {', '.join(known)}")
    for key in given:
        if key not in known:
            raise ClusterError(f"{where} has only known keys", repr(key), nearest(str(key), known))
    for key in needed:
        if given.get(key) is None:
            raise ClusterError(f"{where} has the keys {', '.join(needed)}", f"no {key!r}", f"add {key!r}")
    return given


def items(given: Any, where: str) -> list[Any]:
    """A list with something in it.

    Raises:
        ClusterError: it is something else.
    """
    if not isinstance(given, (list, tuple)) or not given:
        raise ClusterError(f"{where} is a list of at least one", shown(given), f"give {where} as a list")
    return list(given)


def number(given: Any, where: str, scale: float = 1.0, above: bool = True) -> float:
    """A finite number times ``scale``: above 0, or else at least 0.

    Raises:
        ClusterError: it is something else.
    """
    value = given
    if isinstance(given, str):  # YAML takes 1e9, without a dot and a sign, for a word
        try:
            value = float(given)
        except ValueError:
            value = None
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above and value == 0):
        raise ClusterError(
            f"{where} is a finite number, {'above 0' if above else '0 or more'}", shown(given), f"correct {where}"
        )
    return float(value) * scale


def whole(given: Any, where: str) -> int:
    """A whole number of at least 1, at most `MANY`.

    Raises:
        ClusterError: it is something else.
    """
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MANY:
        raise ClusterError(f"{where} is a whole number of at least 1, at most {MANY}", shown(given), f"correct {where}")
    return given


def nearest(word: str, known: Collection[str]) -> str:
    """What to say about a word that is not known."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"


def written(value: float, scale: float) -> float:
    """The number of the fewest digits that `number` reads as ``value``."""
    for digits in (6, 9, 12, 15, 17):
        short = float(f"{value / scale:.{digits}g}")
        if short * scale == value:
            return short
    return value / scale


def shown(given: Any) -> str:
    """A value of a file and its type, not too long."""
    text = repr(given)
    return f"{text if len(text) < 80 else text[:77] + '...'} ({type(given).__name__})"
