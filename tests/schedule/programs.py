"""Programs to order: hand-made shapes, and random ones made as a trace makes them."""

from __future__ import annotations

import random
from dataclasses import replace

from smpar.schedule import Flow, Program, Segment, placement


def chain(stages: int, forward: float = 1.0, backward: float = 2.0, skip: bool = False) -> Program:
    """One segment per stage; with `skip`, the first also feeds the last."""
    segments = tuple(Segment(s, s, forward, backward) for s in range(stages))
    flows = [Flow(s, s, s, s + 1, 8) for s in range(stages - 1)]
    if skip and stages > 2:
        flows.append(Flow(0, 0, 0, stages - 1, 8))
    return Program(stages, segments, tuple(flows))


def split_chain(name: str, size: int, virtual: int = 0, each: tuple[float, float, float] = (1, 1, 1)) -> Program:
    """A chain placed as the schedule of that name needs it; `each` gives a segment's times of F, I and W."""
    ranks = placement(name, size, virtual)
    forward, inputs, weights = each
    segments = tuple(Segment(s, s, forward, inputs + weights, weights) for s in range(len(ranks)))
    flows = tuple(Flow(s, s, s, s + 1, 8) for s in range(len(ranks) - 1))
    return Program(len(ranks), segments, flows, ranks=ranks)


def as_on_cpus(program: Program, head: float = 1.4) -> Program:
    """A heavier last segment, and a first one that cannot be split: nobody waits for its gradients of inputs."""
    segments = list(program.segments)
    last = segments[-1]
    segments[-1] = replace(last, forward=last.forward * head, backward=last.backward * head, weight=last.weight * head)
    segments[0] = replace(segments[0], weight=0.0)
    return replace(program, segments=tuple(segments))


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


def timed(program: Program, forwards: list[float]) -> Program:
    """The program with these times of forwards; backwards take twice as long, half of it for weights."""
    segments = zip(program.segments, forwards, strict=True)
    return replace(program, segments=tuple(replace(s, forward=f, backward=2 * f, weight=f) for s, f in segments))


def random_program(rng: random.Random, backward: bool = True) -> Program:
    """Run random operations on random stages, and cut them into segments as they wait for each other.

    A rank holds one or several stages. An operation of another stage, or with a tensor that its rank has not got, opens
    a new segment. A tensor is sent once to a rank. Some segments can be split.
    """
    size, virtual = rng.randint(1, 4), rng.choice([1, 1, 2, 3])
    stages = size * virtual
    ranks = tuple(rng.choice([[*range(size)] * virtual, rng.sample([*range(size)] * virtual, stages)]))
    segments: list[Segment] = []
    current: dict[int, int] = {}  # rank -> its segment
    made: list[tuple[int, int, bool]] = []  # tensor -> rank, producer, needs gradient
    here: set[tuple[int, int]] = set()
    flows: dict[tuple[int, int], Flow] = {}
    saves = rng.random() < 0.5
    for tensor in range(rng.randint(1, 14)):
        stage = rng.randrange(stages)
        rank = ranks[stage]
        operands = rng.sample(range(tensor), min(tensor, rng.randint(0, 3)))
        far = any(made[t][0] != rank and (t, rank) not in here for t in operands)
        if rank not in current or segments[current[rank]].stage != stage or far:
            forward = rng.choice([0.0, 1.0, rng.uniform(0.1, 3)])
            back = forward * rng.choice([1, 2, rng.random() * 3])
            weight = back * rng.choice([0, 0.5, rng.random()])
            saved = rng.randint(1, 9) if saves else 0
            segments.append(Segment(len(segments), stage, forward, back, weight, saved))
            current[rank] = segments[-1].index
        target = current[rank]
        for t in operands:
            source_rank, producer, gradient = made[t]
            if producer != target and (t, target) not in flows:
                new = source_rank != rank and (t, rank) not in here
                flows[t, target] = Flow(t, current[source_rank], producer, target, rng.randint(1, 99), new, gradient)
                here.add((t, rank))
        made.append((rank, target, rng.random() < 0.8))
    placed = () if ranks == tuple(range(stages)) and rng.random() < 0.5 else ranks
    return Program(stages, tuple(segments), tuple(flows.values()), backward, placed)
