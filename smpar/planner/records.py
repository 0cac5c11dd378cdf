"""Records of a JSON file, read by the types of the dataclasses they become: nothing of another type gets any further.

{"name": "h.0", "parameters": 12}  ──▶  Layer("h.0", 12.0)
{"name": "h.0", "parameters": "12"} ──▶  layers[3].parameters is a finite number; found '12' (str)
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from smpar.errors import SmparError
from smpar.planner.reading import nearest, shown

LARGEST = 2**53
"""Whole numbers up to this are exact in any JSON reader."""

T = TypeVar("T")


class Refused(Protocol):
    """Makes the error of a file's kind."""

    def __call__(self, rule: str, values: str, fix: str) -> SmparError: ...


def read_as(cls: type[T], given: Any, where: str, error: Refused, fix: str) -> T:
    """The dataclass or named tuple that a record of a file stands for, and those inside it.

    Fields may be of type ``int``, ``float``, ``bool``, ``str``, tuples of these, such records, and ``X | None``.

    Args:
        where: how errors call the record.
        error: an error of the file's kind: a key that is missing or unknown, a value of another type, a number that is
            not finite.
        fix: what mends any of these.
    """
    return _Reader(error, fix).value(cls, given, where)


class _Reader:
    def __init__(self, error: Refused, fix: str) -> None:
        self._error, self._fix = error, fix

    def value(self, kind: Any, given: Any, where: str) -> Any:
        if kind in _PLAIN:
            good, must = _PLAIN[kind]
            if not good(given):
                raise self._error(f"{where} is {must}", shown(given), self._fix)
            return kind(given)
        if get_origin(kind) is tuple:
            return self._tuple(get_args(kind), given, where)
        if get_origin(kind) in (Union, types.UnionType):
            (one,) = (k for k in get_args(kind) if k is not type(None))
            return None if given is None else self.value(one, given, where)
        return self._record(kind, given, where)

    def _tuple(self, kinds: tuple[Any, ...], given: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(given, (list, tuple)):
            raise self._error(f"{where} is a list", shown(given), self._fix)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(given)
        if len(kinds) != len(given):
            raise self._error(f"{where} is a list of {len(kinds)}", shown(given), self._fix)
        return tuple(self.value(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, given, strict=True)))

    def _record(self, cls: Any, given: Any, where: str) -> Any:
        known, needed = _keys(cls)
        if not is_dataclass(cls) and isinstance(given, (list, tuple)):  # JSON has named tuples as lists
            return cls(*self._tuple(tuple(known.values()), given, where))
        listed = ", ".join(known)
        if not isinstance(given, Mapping):
            raise self._error(f"{where} is an object with the keys {listed}", shown(given), self._fix)
        for key in given:
            if key not in known:
                raise self._error(f"{where} has the keys {listed}", f"{key!r}: {nearest(str(key), known)}", self._fix)
        for key in needed:
            if key not in given:
                raise self._error(f"{where} has the keys {listed}", f"no {key!r}", self._fix)
        return cls(**{key: self.value(known[key], value, f"{where}.{key}") for key, value in given.items()})


@functools.cache
def _keys(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A record's keys with their types, and those that must be there."""
    hints = get_type_hints(cls)
    if not is_dataclass(cls):
        return {name: hints[name] for name in cls._fields}, tuple(
            n for n in cls._fields if n not in cls._field_defaults
        )
    own = [f for f in fields(cls) if f.init]
    needed = tuple(f.name for f in own if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in own}, needed


def _whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and abs(given) <= LARGEST


def _number(given: Any) -> bool:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return False
    return math.isfinite(given) if isinstance(given, float) else abs(given) <= 2**1000


_PLAIN: dict[Any, tuple[Any, str]] = {
    int: (_whole, "a whole number"),
    float: (_number, "a finite number"),
    bool: (lambda given: isinstance(given, bool), "true or false"),
    str: (lambda given: isinstance(given, str), "a text"),
}
