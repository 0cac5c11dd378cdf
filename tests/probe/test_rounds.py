"""Each pair is measured once, and no machine is busy twice at a time."""

from __future__ import annotations

import itertools
import random

from smpar.probe.rounds import rounds


def test_two_machines() -> None:
    assert rounds("aabb") == [[(0, 1), (2, 3)], [(0, 2)], [(0, 3)], [(1, 2)], [(1, 3)]]


def test_every_pair_once_and_no_machine_twice(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        host_of = [rng.randrange(7) for _ in range(rng.randint(1, 20))]
        found = rounds(host_of)
        assert sorted(tuple(sorted(p)) for pairs in found for p in pairs) == [
            *itertools.combinations(range(len(host_of)), 2)
        ]
        for pairs in found:
            busy = [host for a, b in pairs for host in {host_of[a], host_of[b]}]
            assert pairs and len(busy) == len(set(busy))


def test_machines_meet_at_the_same_time() -> None:
    assert len(rounds(range(16))) == 15, "one rank each: 8 pairs in each round"
