"""Programs to order: hand-made shapes, and random ones made as a trace makes them."""

from __future__ import annotations

import random

from smpar.schedule import Flow, Program, Segment


def chain(stages: int, forward: float = 1.0, backward: float = 2.0, skip: bool = False) -> Program:
    """One segment per stage; with `skip`, the first also feeds the last."""
    segments = tuple(Segment(s, s, forward, backward) for s in range(stages))
    flows = [Flow(s, s, s, s + 1, 8) for s in range(stages - 1)]
    if skip and stages > 2:
        flows.append(Flow(0, 0, 0, stages - 1, 8))
    return Program(stages, segments, tuple(flows))


def loop(stages: int, times: int) -> Program:
    """The stages in order, several times over: module re-use."""
    count = stages * times
    segments = tuple(Segment(i, i % stages) for i in range(count))
    return Program(stages, segments, tuple(Flow(i, i, i, i + 1, 8) for i in range(count - 1)))


def encoder_decoder(stages: int) -> Program:
    """Every stage holds an encoder part and a decoder part; the encoder's result goes to each decoder part."""
    program = loop(stages, 2)
    memory = tuple(Flow(99, stages - 1, stages - 1, target, 8) for target in range(stages + 1, 2 * stages))
    return Program(stages, program.segments, program.flows + memory)


def u_net(stages: int) -> Program:
    """Down through the stages and up again, each level's tensor kept for the way up: a local cut."""
    homes = [*range(stages), *reversed(range(stages - 1))]
    flows = [Flow(i, i, i, i + 1, 8) for i in range(len(homes) - 1)]
    flows += [Flow(i, i, i, len(homes) - 1 - i, 8) for i in range(stages - 1)]
    return Program(stages, tuple(Segment(i, home) for i, home in enumerate(homes)), tuple(flows))


def random_program(rng: random.Random, backward: bool = True) -> Program:
    """Run random operations on random stages, and cut them into segments as they wait for each other.

    A stage that needs a tensor it has not got opens a new segment. A tensor is sent once to a stage.
    """
    stages = rng.randint(1, 4)
    segments: list[Segment] = []
    current: dict[int, int] = {}
    made: list[tuple[int, int, bool]] = []  # tensor -> home, producer, needs gradient
    here: set[tuple[int, int]] = set()
    flows: dict[tuple[int, int], Flow] = {}
    for tensor in range(rng.randint(1, 14)):
        home = rng.randrange(stages)
        operands = rng.sample(range(tensor), min(tensor, rng.randint(0, 3)))
        if home not in current or any(made[t][0] != home and (t, home) not in here for t in operands):
            forward = rng.choice([0.0, 1.0, rng.uniform(0.1, 3)])
            segments.append(Segment(len(segments), home, forward, forward * rng.choice([1, 2, rng.random() * 3])))
            current[home] = segments[-1].index
        target = current[home]
        for t in operands:
            source_home, producer, gradient = made[t]
            if producer != target and (t, target) not in flows:
                new = source_home != home and (t, home) not in here
                flows[t, target] = Flow(t, current[source_home], producer, target, rng.randint(1, 99), new, gradient)
                here.add((t, home))
        made.append((home, target, rng.random() < 0.8))
    ranks = tuple(rng.randrange(2) for _ in range(stages)) if rng.random() < 0.2 else ()
    return Program(stages, tuple(segments), tuple(flows.values()), backward, ranks)
