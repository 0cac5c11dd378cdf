"""The checker accepts right schedules only, and says what is wrong where."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpar.errors import ScheduleError
from smpar.schedule import Action, Kind, Schedule, check, list_schedule, make_schedule

from .programs import chain, loop, random_program, split_chain
from .truth import is_right


@pytest.mark.parametrize(
    ("ranks", "rule", "marked"),
    [
        ("0F0 0B0 0F0 0F1 0B1 | 1F0 1B0 1F1 1B1", "occurs once", [">0F0< 0B0 >0F0<"]),
        ("0F0 0B0 0F1 | 1F0 1B0 1F1 1B1", "action of the program occurs", ["0F1 >end<"]),
        ("0F0 0B0 0F1 0B1 1F1 | 1F0 1B0 1B1", "on the rank that holds", [">1F1<"]),
        ("0F0 0B0 0F1 0B1 0F2 | 1F0 1B0 1F1 1B1", "that the program has", [">0F2<"]),
        ("0F0 0B0 0F1 0B1 | 1F0 1B0 1F1 1B1 2F0", "that the program has", [">2F0<"]),
        ("0F0 0B0 0F1 0B1 | 1B0 1F0 1F1 1B1", "after all its forwards", [">1B0< 1F0"]),
        ("0F0 0B0 0F1 0B1 | 1F1 1F0 1B0 1B1", "waits for one that waits", [">0B0<", ">1F1<"]),
        ("0F0 0B0 0F1 0B1", "one list of actions per rank", []),
        ("0F0 0SA0:0>1 0B0 0F1 0B1 | 1F0 1B0 1F1 1B1", "added by lowering", [">0SA0:0>1<"]),
        ("0F0 0B0 0F1 0B1 | 1F0 1I0 1W0 1F1 1B1", "split only where", [">1I0< 1W0"]),
        ("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1", "at most 1", ["0F0 >0F1<"]),
    ],
)
def test_each_mistake_is_named_and_marked(ranks: str, rule: str, marked: list[str]) -> None:
    lists = [tuple(map(Action.parse, rank.split())) for rank in ranks.split("|")]
    with pytest.raises(ScheduleError) as caught:
        check(Schedule("broken", tuple(lists)), [chain(2)] * 2, active=1 if "at most" in rule else None)
    assert rule in caught.value.rule
    text = " ".join(str(caught.value).split())
    for mark in marked:
        assert mark in text
    assert "schedule broken" in text


@pytest.mark.parametrize(
    ("ranks", "rule", "marked"),
    [
        ("0F0 0I0 0W0 | 1F0 1I0", "action of the program occurs", [">end<"]),
        ("0F0 0I0 0W0 | 1F0 1W0", "action of the program occurs", [">end<"]),
        ("0F0 0I0 0W0 | 1F0 1I0 1W0 1W0", "each action occurs once", [">1W0< >1W0<"]),
        ("0F0 0I0 0W0 | 1F0 1I0 1B0 1W0", "once, whole or split", [">1B0< >1W0<"]),
        ("0F0 0W0 0I0 | 1F0 1I0 1W0", "after that of the inputs", [">0W0< 0I0"]),
        ("0F0 0I0 0W0 1W0 | 1F0 1I0", "on the rank that holds", [">1W0<"]),
        ("0F0 0I0 0W0 | 1I0 1F0 1W0", "after all its forwards", [">1I0< 1F0"]),
        ("0I0 0F0 0W0 | 1F0 1I0 1W0", "after all its forwards", [">0I0< 0F0"]),
        ("0F0 0I0 0W0 0F1 0B1 | 1F1 1I1 1F0 1I0 1W0 1W1", "waits for one that waits", ["waits for 1I0", ">1F1<"]),
        ("0F0 0F1 0I0 0I1 0W0 0W1 | 1F0 1I0 1F1 1I1 1W0 1W1", "at most 1", [">0F1<"]),
    ],
)
def test_each_mistake_with_split_backwards(ranks: str, rule: str, marked: list[str]) -> None:
    lists = [tuple(map(Action.parse, rank.split())) for rank in ranks.split("|")]
    microbatches = 1 + max(action.microbatch for actions in lists for action in actions)
    programs = [split_chain("zb", 2)] * microbatches
    with pytest.raises(ScheduleError) as caught:
        check(Schedule("broken", tuple(lists)), programs, active=1 if "at most" in rule else None)
    assert rule in caught.value.rule
    text = " ".join(str(caught.value).split())
    for mark in marked:
        assert mark in text


def test_backwards_may_be_split_one_by_one() -> None:
    program = split_chain("zb", 2)
    text = "schedule s\nrank 0 | 0F0 0F1 0B0 0I1 0W1\nrank 1 | 1F0 1I0 1F1 1B1 1W0"
    check(Schedule.parse(text), [program] * 2)
    assert str(Schedule.parse(text)).split() == text.split()


def test_forwards_and_backwards_of_one_rank_keep_their_order() -> None:
    program = loop(1, 2)
    check(Schedule.parse("schedule s\nrank 0 | 0F0 1F0 1B0 0B0"), [program])
    with pytest.raises(ScheduleError, match="in program order"):
        check(Schedule.parse("schedule s\nrank 0 | 1F0 0F0 1B0 0B0"), [program])
    with pytest.raises(ScheduleError, match="segments that use its tensors"):
        check(Schedule.parse("schedule s\nrank 0 | 0F0 1F0 0B0 1B0"), [program])


def test_backward_without_one_in_the_program() -> None:
    with pytest.raises(ScheduleError, match="without backward"):
        check(Schedule.parse("schedule s\nrank 0 | 0F0 0B0"), [chain(1).forward_only()])


def test_microbatches_have_the_same_segments() -> None:
    with pytest.raises(ScheduleError, match="same segments"):
        check(list_schedule(chain(2), 2), [chain(2), chain(2, forward=3)])


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutations_are_judged_as_by_the_second_definition(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, backward=rng.random() < 0.8)
    microbatches = rng.randint(1, 4)
    # Microbatches may differ in which tensors carry gradients: fewer than those the schedule was made for.
    fewer = replace(program, flows=tuple(replace(f, backward=f.backward and rng.random() < 0.7) for f in program.flows))
    programs = [rng.choice([program, fewer]) for _ in range(microbatches)]
    schedule = make_schedule(rng.choice(["list", "zb"]), program, microbatches)
    check(schedule, programs)
    ranks = [list(actions) for actions in schedule.ranks]
    mine = rng.choice([actions for actions in ranks if actions])
    place, other = rng.randrange(len(mine)), rng.randrange(len(mine))
    action = mine[place]
    mutation = rng.choice(["swap", "shuffle", "double", "drop", "kind", "split", "join", "microbatch", "move"])
    if mutation == "swap":
        mine[place], mine[other] = mine[other], mine[place]
    elif mutation == "shuffle":
        rng.shuffle(mine)
    elif mutation == "double":
        mine.insert(other, action)
    elif mutation == "drop":
        del mine[place]
    elif mutation == "kind":
        mine[place] = replace(action, kind=rng.choice([Kind.F, Kind.B, Kind.I, Kind.W]))
    elif mutation == "split":
        mine[place] = replace(action, kind=Kind.I)
        mine.insert(rng.randint(max(0, place - 1), len(mine)), replace(action, kind=Kind.W))
    elif mutation == "join":
        weights = replace(action, kind=Kind.W)
        mine[:] = [replace(a, kind=Kind.B) if a == replace(action, kind=Kind.I) else a for a in mine if a != weights]
    elif mutation == "microbatch":
        mine[place] = replace(action, microbatch=rng.randrange(microbatches + 1))
    else:
        rng.choice(ranks).append(mine.pop(place))
    active = rng.choice([None, 1, 2, 3])
    mutant = Schedule("mutant", tuple(map(tuple, ranks)))
    try:
        check(mutant, programs, active)
        accepted = True
    except ScheduleError:
        accepted = False
    assert accepted == is_right(mutant, programs, active), f"{mutation}: {mutant}"
