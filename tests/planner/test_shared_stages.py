"""Stages that share ranks of different speeds: the dearest rank sets the pace, and limits hold for ranks."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from fractions import Fraction

import pytest

from smpar.errors import NothingFits, PlanError
from smpar.planner.stages import Layers, Place, StageCuts, Tensor, cut_stages, find_cuts
from tests.planner.problems import loop, vee

ROUNDING = Fraction(1, 10**12)
Problem = tuple[Layers, list[Place], int, tuple[int, ...], float]


def problem(rng: random.Random, size: int, ranks: tuple[int, ...], roominess: Sequence[float] = (math.inf,)) -> Problem:
    """Ranks of up to three speeds; skips; transfers dear and cheap."""
    speeds = [rng.choice((1.0, 1.0, 2.0, 0.25)) for _ in range(rng.randint(1, 3))]
    base = [rng.choice((0.0, 1.0, 1.0, 1.0)) * rng.uniform(0.1, 3.0) for _ in range(size)]
    times = [[t * speed * rng.uniform(0.9, 1.1) for t in base] for speed in speeds]
    tensors = [Tensor(i, (i + 1, rng.randint(i + 1, size - 1)), rng.uniform(0.0, 2.0)) for i in range(size - 1)]
    layers = Layers(times, [rng.uniform(0.1, 2.0) for _ in base], [rng.uniform(0.0, 0.3) for _ in base], tensors)
    count = 1 + max(ranks)
    on = [rng.randrange(len(times)) for _ in range(count)]
    room = rng.choice(roominess)
    limits = [
        rng.uniform(0.7, 1.3) * room * (sum(layers.state) + 2 * sum(layers.saved)) / count + 1.0 for _ in range(count)
    ]
    link = rng.choice((0.01, 0.1, 0.5))
    places = [
        Place(on[r], rng.uniform(0.5, 1.0) * link, 0.01, float(rng.randint(1, 3)), rng.uniform(0.0, 1.0), limits[r])
        for r in ranks
    ]
    return layers, places, rng.choice((1, 4, 16)), ranks, rng.choice((0.0, 0.4, 1.0))


def exact(p: Problem, cuts: Sequence[int]) -> tuple[Fraction, Fraction]:
    """Objective, and bytes beyond the limit on the worst rank, by the definition and in exact arithmetic."""
    layers, places, microbatches, ranks, evenness = p
    count = 1 + max(ranks)
    v = Fraction(len(ranks), count)
    rank_of = [ranks[max(k for k, cut in enumerate(cuts) if cut <= i)] for i in range(len(layers))]
    on_rank, memory, transient, costs = [Fraction(0)] * count, [Fraction(0)] * count, [Fraction(0)] * count, []
    for place, rank, a, b in zip(places, ranks, cuts, (*cuts[1:], len(layers)), strict=True):
        entering = [t for t in layers.tensors if rank_of[t.source] != rank and any(a <= x < b for x in t.targets)]
        seconds = sum(map(Fraction, layers.times[place.device_class][a:b]), Fraction(0))
        rate, latency = Fraction(place.seconds_per_byte), Fraction(place.latency)
        seconds += sum(Fraction(t.nbytes) * rate + latency for t in entering)
        costs.append(seconds)
        on_rank[rank] += seconds
        saved = sum(map(Fraction, layers.saved[a:b]), Fraction(0))
        memory[rank] += sum(map(Fraction, layers.state[a:b]), Fraction(0)) + Fraction(place.in_flight) * saved
        transient[rank] = max(transient[rank], Fraction(place.transient))
    limits = dict(zip(ranks, (p.limit for p in places), strict=True))
    over = [memory[r] + transient[r] - Fraction(limit) for r, limit in limits.items() if limit < math.inf]
    even = Fraction(evenness)
    pace = (1 - even) * max(on_rank) + even * v * max(costs)
    return sum(costs) / v + (microbatches - 1 / v) * pace, max(over, default=Fraction(0))


def test_equals_brute_force(seed: int) -> None:
    infeasible = 0
    for i in range(300):
        rng = random.Random(seed + i)
        ranks = rng.choice((loop(2, 2), loop(3, 2), loop(2, 3), vee(2), vee(3)))
        p = problem(rng, rng.randint(len(ranks), 9), ranks, (0.7, 1.0, 1.3, math.inf))
        size = len(p[0])
        tried = [exact(p, (0, *rest)) for rest in itertools.combinations(range(1, size), len(ranks) - 1)]
        fitting = [value for value, excess in tried if excess <= 0]
        if not fitting:
            infeasible += 1
            assert find_cuts(*p) is None, p
            with pytest.raises(NothingFits, match="bytes too many on rank"):
                cut_stages(*p)
            continue
        found = cut_stages(*p)
        value, excess = exact(p, found.cuts)
        assert excess <= 1e-11, p
        assert value <= min(fitting) * (1 + ROUNDING), p
        assert abs(Fraction(found.seconds) - value) <= ROUNDING * value, p
    assert 5 < infeasible < 200


def test_a_slow_rank_gets_less() -> None:
    """In a V of a fast and a slow rank, the fast one holds the outer stages.

    ::

        layers    0   1   2   3   4   5
        stage     ├─ 0 ──┤├1 ┤├2 ┤├─ 3 ──┤     seconds 2, 2, 2, 2 on ranks 0, 1, 1, 0
    """
    layers = Layers([[1.0] * 6, [2.0] * 6], [1.0] * 6, [1.0] * 6, [Tensor(i, (i + 1,), 8.0) for i in range(5)])
    fast, slow = Place(0, in_flight=2.0, transient=3.0), Place(1, in_flight=2.0, transient=1.0)
    found = cut_stages(layers, [fast, slow, slow, fast], 2, ranks=vee(2))
    assert found == StageCuts((0, 2, 3, 4), 8 / 2 + 1.5 * 4, (2.0,) * 4, (9.0, 4.0, 4.0, 9.0), (4.0, 4.0), (15.0, 7.0))


def test_identity_is_one_stage_per_rank(seed: int) -> None:
    p = problem(random.Random(seed), 12, (0, 1, 2, 3))
    assert cut_stages(*p) == cut_stages(*p[:3])


def test_better_than_cuts_that_ignore_ranks(seed: int) -> None:
    gains = []
    for i in range(30):
        rng = random.Random(seed + i)
        p = problem(rng, 40, rng.choice((loop(4, 2), vee(4))))
        p = (*p[:2], 16, p[3], 0.0)
        gains.append(float(exact(p, cut_stages(*p[:3]).cuts)[0] / exact(p, cut_stages(*p).cuts)[0]))
    print(f"a step is {statistics.median(gains):.3f} times as fast ({min(gains):.3f} to {max(gains):.3f})")
    assert min(gains) >= 1.0 - 1e-12
    assert statistics.median(gains) > 1.0


def test_a_hundred_layers_take_some_milliseconds(seed: int) -> None:
    """About 20; the limit here leaves room for a busy machine."""
    p = problem(random.Random(seed), 100, loop(8, 2))
    start = time.process_time()
    found = cut_stages(*p)
    assert time.process_time() - start < 0.15
    assert found == cut_stages(*p)


def test_what_does_not_fit_names_the_rank() -> None:
    layers = Layers([[1.0] * 4], [30.0, 20.0, 60.0, 10.0], [0.0] * 4)
    with pytest.raises(NothingFits, match=r"5 bytes too many on rank 0 \(layers 0 to 0, 2 to 2\)") as caught:
        cut_stages(layers, [Place(limit=85.0)] * 4, 4, ranks=loop(2, 2))
    assert (caught.value.at, caught.value.nbytes) == (0, 5.0)
    assert cut_stages(layers, [Place(limit=90.0)] * 4, 4, ranks=loop(2, 2)).rank_memory == (90.0, 30.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": (0, 2, 0, 2)}, "for 4 stages"),
        ({"ranks": (0, 1)}, "for 4 stages"),
        ({"ranks": loop(2, 2), "evenness": 1.5}, "evenness=1.5"),
        ({"ranks": vee(2)}, r"rank 0 has .* \[\(0, 9.0\), \(0, inf\)\]"),
    ],
)
def test_ranks_that_mean_nothing_are_named(change: dict[str, object], message: str) -> None:
    layers = Layers([[1.0] * 4], [1.0] * 4, [1.0] * 4)
    with pytest.raises(PlanError, match=message):
        cut_stages(layers, [Place(limit=9.0), Place(), Place(limit=9.0), Place()], 2, **change)
