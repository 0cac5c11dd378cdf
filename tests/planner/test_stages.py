"""Cuts of a chain over stages that differ in speed, links and memory: exact, and as the Python twin, bit for bit."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest

from smpar.errors import NothingFits, PlanError, TooFewUnits
from smpar.planner.stages import (
    Layers,
    Place,
    StageCuts,
    Tensor,
    cut_stages,
    find_cuts,
    least_excess,
)
from smpar.planner.stages_reference import cut_stages_reference

Problem = tuple[Layers, list[Place], int]
ROUNDING = Fraction(1, 10**12)


def problem(rng: random.Random, most_layers: int = 10, most_stages: int = 5) -> Problem:
    """One to three classes of device, skips, links and limits of all kinds; about a third of the numbers are small
    integers, so that equal objectives occur."""
    size = rng.randint(1, most_layers)
    stages = rng.randint(1, min(size, most_stages))
    coarse = rng.random() < 0.35

    def number(scale: float) -> float:
        return float(rng.randint(0, 3)) if coarse else rng.choice((0.0, 1.0, 1.0, 1.0)) * rng.uniform(0.0, scale)

    speeds = [rng.choice((1.0, 1.0, 2.0, 0.25)) for _ in range(rng.randint(1, 3))]
    base = [number(3.0) for _ in range(size)]
    times = [[t * speed if coarse else t * speed * rng.uniform(0.9, 1.1) for t in base] for speed in speeds]
    tensors = (
        [
            Tensor(source, tuple(rng.choices(range(source + 1, size), k=rng.randint(1, 3))), number(2.0))
            for source in rng.choices(range(size - 1), k=rng.randint(0, 2 * size))
        ]
        if size > 1
        else []
    )
    layers = Layers(times, [number(2.0) for _ in range(size)], [number(0.5) for _ in range(size)], tensors)
    alike = rng.random() < 0.3
    roomy = rng.choice((0.7, 1.0, 1.5, 4.0, math.inf))
    places = []
    for k in range(stages):
        in_flight = float(rng.choice((1, stages - k)))
        share = (sum(layers.state) + in_flight * sum(layers.saved)) / stages + max(layers.state)
        limit = rng.uniform(0.8, 1.2) * roomy * share if share > 0.0 else 0.0
        place = Place(rng.randrange(len(times)), number(0.5), number(0.2), in_flight, number(0.3), limit)
        places.append(places[0] if alike and places else place)
    return layers, places, rng.choice((1, 2, 4, 64))


def exact(layers: Layers, places: Sequence[Place], microbatches: int, cuts: Sequence[int]) -> tuple[Fraction, Fraction]:
    """Objective, and bytes beyond the limit on the worst stage, by the definition and in exact arithmetic."""
    costs, excess = [], [Fraction(-(10**30))]
    for place, a, b in zip(places, cuts, (*cuts[1:], len(layers)), strict=True):
        entering = [t for t in layers.tensors if t.source < a and any(a <= target < b for target in t.targets)]
        seconds = sum(map(Fraction, layers.times[place.device_class][a:b]))
        seconds += sum(
            Fraction(t.nbytes) * Fraction(place.seconds_per_byte) + Fraction(place.latency) for t in entering
        )
        costs.append(seconds)
        memory = sum(map(Fraction, layers.state[a:b])) + Fraction(place.transient)
        memory += Fraction(place.in_flight) * sum(map(Fraction, layers.saved[a:b]))
        if place.limit < math.inf:
            excess.append(memory - Fraction(place.limit))
    return sum(costs) + (microbatches - 1) * max(costs), max(excess)


def all_cuts(size: int, stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *rest) for rest in itertools.combinations(range(1, size), stages - 1))


def decision(solve, p: Problem) -> StageCuts | str:
    try:
        return solve(*p)
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("solve", [cut_stages, cut_stages_reference])
def test_equals_brute_force(solve, seed: int) -> None:
    infeasible = mixed = 0
    for i in range(400):
        p = problem(random.Random(seed + i))
        layers, places, _ = p
        tried = [(*exact(*p, cuts), cuts) for cuts in all_cuts(len(layers), len(places))]
        fitting = [value for value, excess, _ in tried if excess <= 0]
        if not fitting:
            least = min(excess for _, excess, _ in tried)
            if least < 1e-9:
                continue  # whether this fits is a matter of rounding
            infeasible += 1
            with pytest.raises(NothingFits) as caught:
                solve(*p)
            assert caught.value.nbytes == pytest.approx(float(least), rel=1e-9), p
            continue
        found = solve(*p)
        value, excess = exact(*p, found.cuts)
        assert excess <= 1e-12, p
        assert value <= min(fitting) * (1 + ROUNDING), p
        assert abs(Fraction(found.seconds) - value) <= ROUNDING * value, p
        mixed += len({(at.device_class, at.limit) for at in places}) > 1
    assert 20 < infeasible < 300
    assert mixed > 50


def test_equals_the_twin_on_small_chains(seed: int) -> None:
    for i in range(1000):
        p = problem(random.Random(seed + i))
        assert decision(cut_stages, p) == decision(cut_stages_reference, p), p


def test_equals_the_twin_on_longer_chains(seed: int) -> None:
    for i in range(60):
        p = problem(random.Random(seed + i), most_layers=32, most_stages=12)
        assert decision(cut_stages, p) == decision(cut_stages_reference, p), p


def test_takes_the_lexicographically_smallest_of_equals(seed: int) -> None:
    """Powers of two add without rounding, so equal means equal."""
    for i in range(200):
        rng = random.Random(seed + i)
        size = rng.randint(2, 9)
        stages = rng.randint(2, min(size, 4))
        times = [[float(rng.choice((1, 2))) for _ in range(size)] for _ in range(2)]
        layers = Layers(times, [0.0] * size, [0.0] * size, [Tensor(k, (k + 1,), 0.5) for k in range(size - 1)])
        places = [Place(rng.randrange(2), rng.choice((0.0, 0.5))) for _ in range(stages)]
        p = (layers, places, rng.choice((1, 3)))
        assert cut_stages(*p).cuts == min(all_cuts(size, stages), key=lambda cuts: (exact(*p, cuts)[0], cuts)), p


def test_equals_the_twin_when_all_layers_are_equal() -> None:
    """Hundreds of equal optima: the tie rule decides, and rounding must not."""
    for size, stages in ((24, 5), (30, 7), (33, 8)):
        for value in (1.0, 0.1, 1e-3 / 3, 0.0):
            row = [value] * size
            layers = Layers([row, [3 * value] * size], row, row, [Tensor(i, (i + 1,), value) for i in range(size - 1)])
            places = [Place(k % 2, 0.1, 0.0, stages - k, 0.0, 9 * value * size / stages) for k in range(stages)]
            p = (layers, places, 8)
            assert decision(cut_stages, p) == decision(cut_stages_reference, p)


def test_a_drawn_example() -> None:
    """A fast device before two slow ones, of which the last has room for one layer.

    ::

        layers     0   1   2   3   4   5   6   7   8
        seconds    ├────────── 6 ─────────┤├─ 6 ─┤├3┤
        cuts       0                       6      8
    """
    layers = Layers([[1.0] * 9, [3.0] * 9], [10.0] * 9, [1.0] * 9)
    fast, slow, small = Place(0, in_flight=3), Place(1, in_flight=2), Place(1, in_flight=1, limit=11.0)
    found = cut_stages(layers, [fast, slow, small], 100)
    time, memory = (6.0, 6.0, 3.0), (78.0, 24.0, 11.0)
    assert found == StageCuts((0, 6, 8), 6.0 + 6.0 + 3.0 + 99 * 6.0, time, memory, time, memory)


def test_a_tensor_used_twice_on_a_stage_is_paid_once() -> None:
    layers = Layers([[1.0] * 3], [0.0] * 3, [0.0] * 3, [Tensor(0, (1, 2, 2), 4.0)])
    assert cut_stages(layers, [Place(), Place(0, 0.5, 0.25)], 1).stage_time in {(1.0, 4.25), (2.0, 3.25)}
    assert cut_stages(layers, [Place(), Place(0, 0.5, 0.25), Place(0, 0.25)], 1).stage_time == (1.0, 3.25, 2.0)


def test_what_does_not_fit_is_named_with_what_would_help() -> None:
    places = [Place(in_flight=2.0, limit=100.0), Place(in_flight=1.0, limit=100.0)]
    by_state = Layers([[1.0] * 3], [90.0, 90.0, 20.0], [1.0] * 3)
    with pytest.raises(NothingFits, match=r"12 bytes too many on stage 1 \(layers 1 to 2\).*\n.*sharded") as caught:
        cut_stages(by_state, places, 4)
    assert (caught.value.at, caught.value.nbytes) == (1, 12.0)
    by_saved = Layers([[1.0] * 2], [10.0, 10.0], [80.0, 80.0])
    with pytest.raises(NothingFits, match=r"70 bytes too many on stage 0 .*\n.*use recomputation"):
        cut_stages(by_saved, places, 4)
    assert find_cuts(by_saved, places, 4) is None
    assert least_excess(Layers([[1.0] * 2], [10.0, 10.0], [5.0, 5.0]), places).nbytes == -80.0


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_a_thousand_layers_take_a_tenth_of_a_second(seed: int, kinds: int, tight: bool, alike: bool) -> None:
    """The limit here leaves room for a busy machine, and still tells a lost bound (minutes)."""
    rng = random.Random(seed)
    size, stages = 1000, 64
    base = [1.0 if alike else rng.uniform(0.2, 2.0) for _ in range(size)]
    speeds = (1.0, 2.2, 4.1)[:kinds]
    tensors = [Tensor(i, (min(i + rng.randint(1, 3), size - 1),), rng.uniform(0.0, 2.0)) for i in range(size - 1)]
    layers = Layers(
        [[t * s for t in base] for s in speeds], [rng.uniform(0.1, 1.0) for _ in base], [0.05] * size, tensors
    )
    share = sum(1.0 / s for s in speeds) * stages / kinds
    places = []
    for k in range(stages):
        of_chain = 1.1 / speeds[k % kinds] / share
        limit = of_chain * (sum(layers.state) + (stages - k) * sum(layers.saved)) + 1.0 if tight else math.inf
        places.append(Place(k % kinds, 0.1, 0.001, float(stages - k), 0.0, limit))
    for microbatches in (1, 4, 64):
        start = time.process_time()
        cut_stages(layers, places, microbatches)
        assert time.process_time() - start < 0.3


ROW = [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layers([ROW, [1.0]], ROW, ROW), r"times\[0\] has 2, times\[1\] has 1"),
        (lambda: Layers([ROW], ROW, [1.0]), "state has 2, saved has 1"),
        (lambda: Layers([], ROW, ROW), "at least one row of times"),
        (lambda: Layers([[]], [], []), r"times\[0\] has 0"),
        (lambda: Layers([[1.0, -1.0]], ROW, ROW), r"times\[0\] of layer 1 is -1"),
        (lambda: Layers([ROW], [math.nan, 1.0], ROW), "state of layer 0 is nan"),
        (lambda: Layers([ROW], ROW, [1.0, math.inf]), "saved of layer 1 is inf"),
        (lambda: Layers([ROW], ROW, ROW, [Tensor(0, (2,), 1.0)]), r"tensor 0 flows from 0 to \(2,\)"),
        (lambda: Layers([ROW], ROW, ROW, [Tensor(1, (0,), 1.0)]), "tensor 0 flows from 1 to"),
        (lambda: Layers([ROW], ROW, ROW, [Tensor(0, (1,), -1.0)]), "nbytes of tensor 0 is -1"),
        (lambda: Place(latency=math.nan), "latency of a place is nan"),
        (lambda: Place(in_flight=-1.0), "in_flight of a place is -1"),
        (lambda: Place(limit=math.nan), "limit of a place is nan"),
        (lambda: cut_stages(Layers([ROW], ROW, ROW), [Place(), Place(1)], 1), "stage 1 has device_class 1"),
        (lambda: cut_stages(Layers([ROW], ROW, ROW), [], 1), "0 places"),
        (lambda: cut_stages(Layers([ROW], ROW, ROW), [Place()], 0), "microbatches=0"),
        (lambda: cut_stages(Layers([[1e308, 1e308]], ROW, ROW), [Place()], 1), "float64"),
        (lambda: least_excess(Layers([ROW], ROW, ROW), [Place()]), "no stage has a limit"),
    ],
)  # fmt: skip
def test_meaningless_numbers_are_named(make, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_too_few_layers_names_both_numbers() -> None:
    with pytest.raises(TooFewUnits, match="2 layers for 3 stages"):
        cut_stages(Layers([ROW], ROW, ROW), [Place()] * 3, 1)
