"""Microbatches in turn: no rank starts a forward before the one of the microbatch before has ended there."""

from __future__ import annotations

import random

from smpar.schedule import check, in_turn
from tests.schedule.programs import random_program


def test_in_turn_is_complete_and_never_mixes_microbatches(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        program, count = random_program(generator), generator.randint(1, 5)
        schedule = in_turn(program, count)
        check(schedule, [program] * count)
        for actions in schedule.ranks:
            forwards = [a.microbatch for a in actions if a.kind.name == "F"]
            assert forwards == sorted(forwards)
