"""What a rank holds, at every time and at most."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from smpar.schedule import Kind, Schedule, Step, held, make_schedule, memory, times

from .programs import chain, random_program, split_chain


def test_by_hand() -> None:
    program = split_chain("zb", 1, 1, (1, 1, 1))
    schedule = Schedule.parse("schedule s\nrank 0 | 0F0 0F1 0I0 0W0 0B1")
    assert memory(schedule, program) == (2,)
    curve = [(0, 1), (1, 2), (4, 1), (6, 0)]
    assert held(times(schedule, program), program) == (tuple(Step(*step) for step in curve),)
    saved = replace(program, segments=(replace(program.segments[0], saved=10),))
    assert memory(schedule, saved) == (20,)


def test_known_peaks() -> None:
    """GPipe keeps all microbatches, 1F1B as many as there are ranks from here on."""
    assert memory(make_schedule("gpipe", chain(4), 8), chain(4)) == (8, 8, 8, 8)
    assert memory(make_schedule("1f1b", chain(4), 8), chain(4)) == (4, 3, 2, 1)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(["list", "fill_drain", "zb"]),
    microbatches=st.integers(1, 5),
    backward=st.booleans(),
)
def test_equals_a_sum_over_all_that_is_held(seed: int, name: str, microbatches: int, backward: bool) -> None:
    """At any time the sum over segments whose forward has begun and whose B or W has not ended."""
    rng = random.Random(seed)
    program = random_program(rng, backward)
    schedule = make_schedule(name, program, microbatches)
    timeline = times(schedule, program)
    counts = not any(segment.saved for segment in program.segments)
    spans: list[list[tuple[float, float, int]]] = [[] for _ in range(program.size)]
    for first in timeline:
        if first.action.kind is Kind.F:
            one = (first.action.segment, first.action.microbatch)
            same = [t for t in timeline if (t.action.segment, t.action.microbatch) == one]
            size = 1 if counts else program.segments[first.action.segment].saved
            spans[first.rank].append((first.start, max(t.end for t in same), size))
    curves = held(timeline, program)
    ends = sorted({time for t in timeline for time in (t.start, t.end)})
    for rank, mine in enumerate(spans):
        for time in [rng.uniform(0, ends[-1] + 1) for _ in range(20)]:
            expected = sum(size for start, end, size in mine if start <= time < end)
            now = [step.held for step in curves[rank] if step.time <= time]
            assert (now[-1] if now else 0) == expected
        assert max((step.held for step in curves[rank]), default=0) <= memory(schedule, program)[rank]
    if all(segment.forward > 0 and segment.backward > 0 for segment in program.segments):
        assert memory(schedule, program) == tuple(max((s.held for s in curve), default=0) for curve in curves)
