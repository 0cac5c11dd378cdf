"""Simulated pipelines: the orders of the schedules, the times of an event-by-event world, the bubbles of the papers."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from smpar.errors import PlanError, ScheduleError, ScheduleNameError
from smpar.planner.pipeline import Pipeline, Timeline, named_order, simulate, simulate_named
from smpar.schedule import (
    Action,
    Flow,
    Kind,
    Program,
    Schedule,
    list_schedule,
    make_schedule,
    memory,
    placement,
    split_schedule,
    times,
)
from tests.planner.pipeline_truth import Truth, truth
from tests.schedule.programs import random_program

NAMES = ("simple", "gpipe", "1f1b", "interleaved", "interleaved_1f1b", "zb", "zbv")
ON_OWN_RANKS = ("simple", "gpipe", "1f1b", "interleaved", "zb")


def even(name: str, size: int, virtual: int = 0, each: tuple[float, float, float] = (1, 1, 1)) -> Pipeline:
    """Equal stages, placed for the schedule; `each` gives the times of F, I and W."""
    ranks = placement(name, size, virtual)
    forward, inputs, weights = ((seconds,) * len(ranks) for seconds in each)
    return Pipeline(ranks, forward, tuple(map(sum, zip(inputs, weights, strict=True))), weights, (1,) * len(ranks))


def random_pipeline(rng: random.Random, name: str, most_ranks: int = 8, most_virtual: int = 4) -> Pipeline:
    """Any times: of few values, so that much happens at once, or of many; some backwards whole, some bytes zero."""
    virtual = rng.randint(1, most_virtual) if name == "interleaved_1f1b" else 0
    ranks = placement(name, rng.randint(1, most_ranks), virtual)
    if name in ON_OWN_RANKS and rng.random() < 0.2:
        ranks = tuple(rng.sample(range(len(ranks)), len(ranks)))
    few = rng.choice([(1.0,), (1.0, 2.0), (0.0, 1.0, 3.0), ()])

    def draw(count: int) -> tuple[float, ...]:
        return tuple(rng.choice(few) if few else rng.uniform(0.1, 2) for _ in range(count))

    splits = rng.choice([0.0, 0.7, 1.0])
    weight = tuple(seconds if rng.random() < splits else 0.0 for seconds in draw(len(ranks)))
    backward = tuple(map(sum, zip(draw(len(ranks)), weight, strict=True)))
    saved = tuple(rng.choice([0, rng.randint(1, 99)]) for _ in ranks) if rng.random() < 0.8 else (0,) * len(ranks)
    wires = [draw(len(ranks) - 1) for _ in range(4)]
    training = rng.random() < 0.85
    return Pipeline(ranks, draw(len(ranks)), backward, weight, saved, *wires, rng.choice([0.0, 0.25]), training)


def true_times(pipeline: Pipeline, schedule: Schedule) -> Truth:
    """Of the chain's program; a tensor's bytes tell its boundary."""
    program, ranks = pipeline.program, pipeline.ranks
    program = replace(program, flows=tuple(replace(flow, nbytes=flow.source) for flow in program.flows))

    def wire(boundary: int, sender: int, receiver: int) -> float:
        activation = sender == ranks[boundary]
        return (pipeline.wire_forward if activation else pipeline.wire_backward)[boundary]

    def latency(boundary: int, sender: int, receiver: int) -> float:
        activation = sender == ranks[boundary]
        return (pipeline.latency_forward if activation else pipeline.latency_backward)[boundary]

    return truth(program, schedule, wire, latency, pipeline.host)


def same(found: Timeline, wanted: Truth) -> bool:
    """Equal in every bit, but for sums of many."""
    assert found.timetable is not None
    assert found.timetable.timed() == wanted.timed
    assert found.busy == pytest.approx(wanted.busy)
    assert found.waiting == pytest.approx(wanted.waiting, abs=1e-9)
    fields = ("seconds", "last_backward", "first_start", "peak_bytes", "in_flight")
    return all(getattr(found, field) == getattr(wanted, field) for field in fields)


def test_a_drawn_example() -> None:
    """Two ranks, three microbatches, forwards of 2, a channel busy for 3 per message, which arrives 1 after that.

    ::

        time       0 1 2 3 4 5 6 7 8 9 . . . . . .
        rank 0     F0··F1··F2··
        channel        ▂0▂▂▂▂▂1▂▂▂▂▂2▂▂▂▂
        rank 1                 F0··  F1··  F2··      starts at 2+3+1, then every 3
    """
    pipeline = Pipeline((0, 1), (2.0, 2.0), (0.0,) * 2, (0.0,) * 2, (5, 7), (3.0,), (), (1.0,), (), training=False)
    found = simulate_named(pipeline, "gpipe", 3, timetable=True)
    assert found.timetable is not None
    assert [t.start for t in found.timetable.timed() if t.rank == 1] == [6, 9, 12]
    assert (found.seconds, found.first_start, found.busy) == (14, (0, 6), (6, 6))
    assert found.waiting == (0, 4 + 1 + 1)
    assert (found.peak_bytes, found.in_flight, found.last_backward) == ((5, 7), (1, 1), (0, 0))


def test_a_drawn_example_of_host_time() -> None:
    """Both ends of a message are busy with it for 1, here shown as h; nothing else takes time.

    ::

        time       0 1 2 3 4 5 6 7 8 9
        rank 0     F0hF1h · · · hB0hB1
        rank 1         hF0B0hhF1B1h

    Its first message is made at 1 and ready at 2; the second at 4, but rank 1 takes it when it has sent a gradient.
    """
    pipeline = Pipeline((0, 1), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1, 1), host=1.0)
    found = simulate_named(pipeline, "1f1b", 2, timetable=True)
    assert found.timetable is not None
    starts = {(t.rank, str(t.action)): t.start for t in found.timetable}
    assert starts == {
        (0, "0F0"): 0,
        (0, "0F1"): 2,
        (1, "1F0"): 3,
        (1, "1B0"): 4,
        (1, "1F1"): 7,
        (1, "1B1"): 8,
        (0, "0B0"): 7,
        (0, "0B1"): 11,
    }


@pytest.mark.parametrize("name", NAMES)
def test_orders_are_those_of_the_runtime(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        pipeline = random_pipeline(rng, name)
        microbatches = rng.choice([rng.randint(1, 8), rng.randint(1, 40)])
        assert named_order(pipeline, name, microbatches) == make_schedule(name, pipeline.program, microbatches)


@pytest.mark.parametrize("name", NAMES)
def test_named_pipelines_take_as_long_as_event_by_event(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        pipeline = random_pipeline(rng, name, 5, 3)
        schedule = named_order(pipeline, name, rng.randint(1, 12))
        microbatches = max(action.microbatch for _, _, action in schedule) + 1
        found = simulate_named(pipeline, name, microbatches, timetable=True)
        assert same(found, true_times(pipeline, schedule))
        assert replace(found, timetable=None) == simulate_named(pipeline, name, microbatches)
        if any(pipeline.saved):
            assert found.peak_bytes == memory(schedule, pipeline.program)


def random_schedule(rng: random.Random, program: Program) -> Schedule:
    """One that runs, made for other times than those of the program."""
    other = replace(
        program, segments=tuple(replace(s, forward=rng.random(), backward=2.0, weight=1.0) for s in program.segments)
    )
    order = rng.choice([list_schedule, split_schedule])
    return order(other, rng.randint(1, 7), rng.randint(1, 5))


def test_any_program_takes_as_long_as_event_by_event(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        program = random_program(rng, backward=rng.random() < 0.8)
        schedule = random_schedule(rng, program)
        times_of = [{(a, b): rng.choice([0.0, 1.0, rng.random()]) for a in range(5) for b in range(5)} for _ in "wl"]

        def wire(nbytes: int, sender: int, receiver: int, of: dict[tuple[int, int], float] = times_of[0]) -> float:
            return nbytes * of[sender, receiver] / 50

        def latency(nbytes: int, sender: int, receiver: int, of: dict[tuple[int, int], float] = times_of[1]) -> float:
            return of[sender, receiver]

        host = rng.choice([0.0, 0.125, rng.random()])
        assert same(simulate(program, schedule, wire, latency, host), truth(program, schedule, wire, latency, host))


def test_without_contention_as_the_timetables_that_are_drawn(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        program = random_program(rng, backward=rng.random() < 0.8)
        schedule = random_schedule(rng, program)
        latency = rng.choice([0.0, rng.random()])
        found = simulate(program, schedule, latency=latency)
        assert found.timetable is not None
        assert found.timetable.timed() == times(schedule, program, latency)


SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 2 * p + 3, 5 * p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_of_whole_backwards(p: int, m: int) -> None:
    """(p-1)/(m+p-1) for GPipe (arXiv 1811.06965) and 1F1B; (p-1)/(vm+p-1) interleaved (arXiv 2104.04473, 2.2)."""
    for name in ("gpipe", "1f1b"):
        assert simulate_named(even(name, p), name, m).bubble == pytest.approx((p - 1) / (m + p - 1))
    for v in (1, 2, 3, 4):
        if m % p == 0:
            found = simulate_named(even("interleaved_1f1b", p, v), "interleaved_1f1b", m)
            assert found.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_times_of_split_backwards(p: int, m: int, seed: int) -> None:
    """ZB-H1: (p-1)(F+I-W) where W is no longer than F and I, and no order idles less than the ramp, (p-1) F.

    ZB-V with F = I = W: (p-1) F, however many microbatches (arXiv 2401.10241, sections 2.3 and 6).
    """
    rng = random.Random(seed)
    forward, inputs = rng.uniform(1, 2), rng.uniform(1, 2)
    weights = rng.uniform(0.3, 1) * min(forward, inputs)
    for each in ((1.0, 1.0, 1.0), (forward, inputs, weights)):
        idle = simulate_named(even("zb", p, 1, each), "zb", m).seconds - m * sum(each)
        assert (p - 1) * each[0] - 1e-9 <= idle <= (p - 1) * (each[0] + each[1] - each[2]) + 1e-6
    if m >= 2 * p - 1:
        assert simulate_named(even("zbv", p), "zbv", m).seconds == pytest.approx(6 * m + p - 1)


def test_memory_of_named_schedules() -> None:
    """GPipe keeps all, 1F1B p - s in stage s, the V p of both its stages together at most."""
    assert simulate_named(even("gpipe", 4), "gpipe", 9).in_flight == (9, 9, 9, 9)
    assert simulate_named(even("1f1b", 4), "1f1b", 9).in_flight == (4, 3, 2, 1)
    assert max(simulate_named(even("zbv", 4), "zbv", 9).peak_bytes) <= 2 * 4


def test_last_gradients_of_each_stage() -> None:
    """Of a drain in 1F1B the last stage is ready first: each earlier one a backward later."""
    found = simulate_named(even("1f1b", 4), "1f1b", 8)
    assert found.last_backward == (33, 31, 29, 27)


def test_a_million_actions_per_second() -> None:
    """Order and times together, the best of a few tries, as the machine may be busy."""
    for name in NAMES:
        rng = random.Random(7)
        whole = even(name, 16)
        uneven = tuple(seconds * rng.uniform(0.8, 1.2) for seconds in whole.forward)
        pipeline = replace(whole, forward=uneven)
        actions = sum(map(len, named_order(pipeline, name, 128).ranks))
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            simulate_named(pipeline, name, 128)
            best = min(best, time.process_time() - start)
        assert actions / best > 1e6, name


GOOD = even("1f1b", 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ranks": ()}, "each stage has a rank"),
        ({"ranks": (0, -1)}, "each stage has a rank"),
        ({"ranks": (0, 99)}, "rank 99 for 2 stages"),
        ({"forward": (1.0,)}, "forward has one number per stage\n  found: 1 numbers, 2 needed"),
        ({"forward": (1.0, float("nan"))}, "forward is finite and not negative\n  found: stage 1: nan"),
        ({"backward": (2.0, float("inf"))}, "found: stage 1: inf"),
        ({"saved": (-5, 7)}, "saved is finite and not negative\n  found: stage 0: -5"),
        ({"saved": (5, 0.5)}, "whole numbers"),
        ({"weight": (1.0, 2.5)}, "found: stage 1: weight=2.5, backward=2"),
        ({"wire_forward": (1.0, 1.0)}, "wire_forward has one number per boundary\n  found: 2 numbers, 1 needed"),
        ({"latency_backward": (-1.0,)}, "found: boundary 0: -1.0"),
        ({"host": float("nan")}, "host is finite"),
    ],
)
def test_numbers_that_mean_nothing_are_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as error:
        replace(GOOD, **change)  # type: ignore[arg-type]
    assert says in str(error.value)


def test_schedules_that_do_not_go_with_the_stages() -> None:
    with pytest.raises(ScheduleNameError, match="1f1b"):
        simulate_named(GOOD, "1f1", 4)
    with pytest.raises(ScheduleError, match="at least one microbatch"):
        simulate_named(GOOD, "1f1b", 0)
    with pytest.raises(ScheduleError, match="stages in a V"):
        simulate_named(even("interleaved_1f1b", 2), "zbv", 4)
    with pytest.raises(ScheduleError, match="in a loop"):
        simulate_named(even("zbv", 2), "interleaved_1f1b", 4)
    with pytest.raises(ScheduleError, match="one stage per rank"):
        named_order(even("zbv", 2), "zb", 4)
    with pytest.raises(ScheduleError, match="no chain in particular") as error:
        simulate_named(GOOD, "list", 4)
    assert "simulate(pipeline.program, make_schedule('list'" in error.value.fix


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank 0 | 0F0 0B0 0F1 0B1\nrank 1 | 1F1 1F0 1B0 1B1", "no action waits for one that waits for it"),
        ("rank 0 | 0F0 0B0\nrank 1 | 1B0 1F0", "1B0"),
        ("rank 0 | 0F0 0F0 0B0\nrank 1 | 1F0 1B0", "each action occurs once"),
        ("rank 0 | 0F0 0B0 1F0\nrank 1 | 1B0", "an action is on the rank that holds its segment"),
        ("rank 0 | 0F0 0SA0:0>1 0B0\nrank 1 | 1F0 1B0", "messages are added by lowering"),
        ("rank 0 | 0F0 0F7\nrank 1 | 1F0", "each action of the program occurs"),
        ("rank 0 | 0F0 2F0 0B0\nrank 1 | 1F0 1B0", "each action is a forward or backward that the program has"),
        ("rank 0 | 0F0 0B0", "one list of actions per rank"),
    ],
)
def test_schedules_that_cannot_run(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        simulate(GOOD.program, Schedule.parse(f"schedule s\n{text}"))
    assert says in str(error.value)


@pytest.mark.parametrize("action", [Action(Kind.F, -1, 0), Action(Kind.F, 0, -1)])
def test_actions_that_do_not_exist(action: Action) -> None:
    with pytest.raises(ScheduleError, match="each action is a forward or backward that the program has"):
        simulate(GOOD.program, Schedule("s", ((action,), (action,))))


def test_messages_without_a_time() -> None:
    schedule = make_schedule("1f1b", GOOD.program, 2)
    with pytest.raises(PlanError, match="wire and latency is finite"):
        simulate(GOOD.program, schedule, lambda nbytes, sender, receiver: -1.0)
    with pytest.raises(PlanError, match="host is finite"):
        simulate(GOOD.program, schedule, host=float("inf"))


def test_a_rank_may_have_nothing_to_do() -> None:
    """Stage 1 has no segment: the tensor goes from rank 0 to rank 2."""
    program = GOOD.program
    far = replace(program, stages=3, ranks=(), segments=(program.segments[0], replace(program.segments[1], stage=2)))
    schedule = Schedule("s", ((Action(Kind.F, 0, 0),), (), (Action(Kind.F, 1, 0),)))
    found = simulate(replace(far, backward=False, flows=(Flow(0, 0, 0, 1, 8),)), schedule, wire=3.0)
    assert (found.seconds, found.first_start, found.busy) == (5, (0, 0, 4), (1, 0, 1))
