"""Which pairs of ranks are measured at the same time: none that share a machine.

Two machines a, b of ranks 0 1 | 2 3:      round 1: 0-1 and 2-3     rounds 2 to 5: 0-2, 0-3, 1-2, 1-3
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence


def rounds(host_of: Sequence[Hashable]) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds in which no machine has two pairs: they would share its network card.

    Args:
        host_of: each rank's machine.
    """
    hosts: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(host_of):
        hosts.setdefault(host, []).append(rank)
    inside = [list(itertools.combinations(ranks, 2)) for ranks in hosts.values()]
    found = _side_by_side(inside)
    for meetings in _tournament(len(hosts)):
        groups = list(hosts.values())
        found += _side_by_side([list(itertools.product(groups[a], groups[b])) for a, b in meetings])
    return found


def _side_by_side(lists: Sequence[Sequence[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    return [[pair for pair in row if pair is not None] for row in itertools.zip_longest(*lists)]


def _tournament(count: int) -> list[list[tuple[int, int]]]:
    """Everybody meets everybody, in rounds in which nobody has two meetings: one stays, the others walk in a circle."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found
