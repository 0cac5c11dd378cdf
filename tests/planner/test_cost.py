"""What strategies cost, in cases worked by hand: links carry 1 GB/s between nodes and 10 GB/s inside.

Layers take 1 s per sample forward and 2 s backward, 0.5 s of it for weights, on "fast"; thrice as long on "slow".
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from smpar.errors import ProfileError
from smpar.planner.cluster import Cluster, DeviceType, Link, Node
from smpar.planner.cost import CostModel, Prediction
from smpar.planner.hardware import SMPAR, Runtime
from smpar.planner.pipeline import Pipeline
from smpar.planner.plans import Plan, parts
from smpar.planner.profile import Divided, Layer, Profile, Tensor, Tied, Times
from smpar.planner.strategy import Strategy
from smpar.schedule import Kind, make_schedule
from tests.planner.sample_plans import some_cluster, some_profile

PLAIN = replace(
    SMPAR,
    nic=1.0,
    intra=1.0,
    memory=1.0,
    message_seconds=0.0,
    fixed=0.0,
    action=0.0,
    unit=0.0,
    launches=0.0,
    reserve=0.0,
)
"""4 bytes of weights and gradients, 8 of the optimizer; messages and gradients of 4; a step moves 28 bytes."""
LATE = 0.25


def nodes(*counts: tuple[str, int], nics: int = 1) -> Cluster:
    """A node for each (device type, devices); memory bandwidth 7 GB/s and 3.5 GB/s: a step takes 4 and 8 ns each."""
    types = (DeviceType("fast", 64e9, 1e14, 7e9), DeviceType("slow", 32e9, 1e14, 3.5e9))
    near, far = Link(1e10, 0.0), Link(1e9, LATE)
    return Cluster(types, tuple(Node(f"n{i}", name, n, near, far, min(n, nics)) for i, (name, n) in enumerate(counts)))


def profile(layers: Sequence[Layer], elements: float = 0.0, tied: tuple[Tied, ...] = ()) -> Profile:
    """A chain that passes on so many elements per sample."""
    size = len(layers)
    times = tuple(
        Times(name, tp, (1.0,), *(((slower * x / tp,) * size,) for x in (1.0, 2.0, 0.5)))
        for name, slower in (("fast", 1.0), ("slow", 3.0))
        for tp in (1, 2)
    )
    return Profile(tuple(layers), tuple(Tensor(i, (i + 1,), elements) for i in range(size - 1)), times, tied)


def layers(*parameters: float, **of_each: float) -> list[Layer]:
    return [Layer(f"l{i}", n, **of_each) for i, n in enumerate(parameters)]


def strategy(devices: Sequence[int], cuts: Sequence[int], m: int, tp: int = 1, **more: Any) -> Strategy:
    virtual = more.pop("virtual_stages", 1)
    pp = len(cuts) // virtual
    name = more.pop("schedule", "1f1b")
    dp = len(devices) // (pp * tp)
    return Strategy(tp, pp, dp, more.pop("microbatch", 1), m, name, virtual, tuple(cuts), tuple(devices), **more)


def predict(p: Profile, c: Cluster, s: Strategy, runtime: Runtime = PLAIN) -> Prediction:
    return CostModel(p, c, runtime).predict(s)


def test_one_device() -> None:
    """Three layers and four microbatches of two samples: 4 * 2 * 3 * (1 + 2) s; then the step of 6e9 parameters."""
    p = profile(layers(1e9, 2e9, 3e9, saved=1e9, transient=5e8))
    found = predict(p, nodes(("fast", 1)), strategy([0], [0], 4, microbatch=2), replace(PLAIN, fixed=1.0))
    assert (found.pipeline, found.reduction, found.bubble) == (72.0, 0.0, 0.0)
    assert found.optimizer == pytest.approx(6e9 * 4e-9 + 1) and found.seconds == pytest.approx(72 + 24 + 1)
    assert found.memory == (16 * 6e9 + 2 * 3e9 + 2 * 5e8,) and found.limits == (64e9,)
    assert not found.fits and found.excess == 103e9 - 64e9


def test_collectives_ride_on_the_links_of_a_node() -> None:
    """Layers of 0.5 s and 1 s on each of two devices; 1 GB all-reduced forward, 2 GB backward, at 10 GB/s and 0.25 s.

    The second layer is whole on both ranks: its gradients, 4 GB, are summed over them, the first one's over nobody.
    """
    near = Link(1e10, 0.05)
    c = Cluster((DeviceType("fast", 64e9, 1e14, 7e9),), (Node("n", "fast", 2, near),))
    none = (0.0, 0.0)
    divided = Divided(
        2, (1e9, 1e9), (0.0, 1e9), (2e9, 3e9), none, (), (0.0,), (1e9, 0.0), (2e9, 0.0), (1.0, 0.0), (2.0, 0.0)
    )
    p = replace(profile(layers(2e9, 1e9, saved=4e9)), divided=(divided,))
    late = 0.05  # asking for it
    found = predict(p, c, strategy([0, 1], [0], 1, tp=2), replace(PLAIN, message_seconds=late))
    latency = 2 * (2 - 1) * 0.05 + late
    forward, backward = 0.5 + 0.5 + 1e9 / 1e10 + latency, 1.0 + 1.0 + 2e9 / 1e10 + 2 * latency
    (stage,) = found.stages
    assert (stage.forward, stage.backward) == pytest.approx((forward, backward))
    assert stage.reduction == pytest.approx(4e9 / 1e10)
    assert found.memory == (16 * 2e9 + 5e9,)


def test_messages_over_one_link() -> None:
    """0.5 s on the wire, then 0.25 s, there and back::

    rank 0   F F · · · · · ·B B · ·  B B      F0 0-1, F1 1-2, B0 5.5-7.5, B1 8.5-10.5
    rank 1      · F B B F B B                 F0 1.75-2.75, B0 -4.75, F1 -5.75, B1 -7.75
    """
    p = profile(layers(1e9, 3e9), elements=0.5e9 / 4)
    found = predict(p, nodes(("fast", 1), ("fast", 1)), strategy([0, 1], [0, 1], 2))
    assert found.pipeline == pytest.approx(10.5) and found.bubble == pytest.approx(1 - 12 / 21)
    # rank 0 steps 1e9 parameters from 10.5 on, rank 1 its 3e9 from 7.75 on but not before all are done
    assert found.seconds == pytest.approx(10.5 + 3 * 4)
    assert [s.receives for s in found.stages] == [0.0, 0.75]


def test_two_replicas_share_the_card() -> None:
    """A message takes 1 s now: F1 of rank 1 starts when B0 is done, B1 of rank 0 at 9.5 and ends at 11.5.

    Each rank's ring lies in its node: 2 (2 - 1) / 2 * 4 bytes / 10 GB/s = 0.4 ns per parameter.
    """
    p = profile(layers(1e9, 1e10), elements=0.5e9 / 4)
    four = nodes(("fast", 2), ("fast", 2))
    found = predict(p, four, strategy([0, 1, 2, 3], [0, 1], 2))
    assert found.pipeline == pytest.approx(11.5)
    assert [s.reduction for s in found.stages] == pytest.approx([0.4, 4.0])
    assert found.reduction == pytest.approx(max(11.5 + 0.4, 8.25 + 4.0) - 11.5), "rank 1 reduces while rank 0 computes"
    assert found.seconds == pytest.approx(8.25 + 4.0 + 40)
    own = predict(p, nodes(("fast", 2), ("fast", 2), nics=2), strategy([0, 1, 2, 3], [0, 1], 2))
    assert own.pipeline == pytest.approx(10.5), "with a card each as if alone"


def test_rings_over_one_card_take_turns() -> None:
    """Replicas in different nodes: the rings of both ranks pass both cards, 2 * 4 bytes / 1 GB/s per parameter."""
    p = profile(layers(1e9, 2e9))
    found = predict(p, nodes(("fast", 2), ("fast", 2)), strategy([0, 2, 1, 3], [0, 1], 1))
    assert [s.reduction for s in found.stages] == pytest.approx([8.0, 16.0])
    # rank 1 ends its backward at 4, rank 0 at 6
    assert found.pipeline == 6.0 and found.reduction == pytest.approx(max(6 + 8, 4 + 16) - 6)


def test_members_of_a_node_pass_its_card_once() -> None:
    """A ring of four in two nodes: 2 * 3 / 4 * 4 bytes / 1 GB/s, as if it had one member in each."""
    found = predict(profile(layers(1e9)), nodes(("fast", 2), ("fast", 2)), strategy([0, 1, 2, 3], [0], 1))
    assert found.reduction == pytest.approx(6.0)


def test_tied_parameters_are_summed_over_their_ranks_first() -> None:
    """1e9 of 2e9 parameters in both: from the last backward at 6 on, 2 (2 - 1) / 2 * 4 bytes / 1 GB/s."""
    tied = (Tied((0, 1), 1e9),)
    two = nodes(("fast", 1), ("fast", 1))
    found = predict(profile(layers(2e9, 2e9), tied=tied), two, strategy([0, 1], [0, 1], 1))
    late = 6 + 2 * LATE  # a message each way
    assert found.pipeline == late and found.reduction == pytest.approx(4.0)
    assert found.seconds == pytest.approx(late + 4 + 2 * 4), "each rank steps its own copy"
    assert found.memory == (32e9, 32e9)
    alone = predict(profile(layers(2e9, 2e9), tied=tied), two, strategy([0], [0], 1))
    assert alone.memory == (16 * 3e9,) and alone.reduction == 0.0, "on one rank there is one copy and no sum"
    four = nodes(("fast", 2), ("fast", 2))
    shared = predict(profile(layers(2e9, 2e9), tied=tied), four, strategy([0, 1, 2, 3], [0, 1], 1))
    # two sums share the card: 8 s; then the rings of two in each node: 0.4 ns each
    assert shared.reduction == pytest.approx(8 + 2 * 0.4)


def test_tensor_parallelism_divides_parameters_but_for_whole_ones() -> None:
    p = profile([Layer("l", 4e9, saved=6e9, whole_parameters=1e9, whole_saved=2e9, transient=1e9)])
    found = predict(p, nodes(("fast", 2)), strategy([0, 1], [0], 3, tp=2))
    assert found.pipeline == 3 * 3 / 2
    assert found.memory == (16 * (1e9 + 3e9 / 2) + (2e9 + 4e9 / 2) + 1e9 / 2,)
    assert found.optimizer == pytest.approx(2.5 * 4)


def test_what_is_kept_of_microbatches_in_flight() -> None:
    """1F1B of three stages and four microbatches keeps 3, 2 and 1 of them."""
    p = profile(layers(0, 0, 0, saved=1e9, transient=1e8), elements=1e6)
    c = nodes(("fast", 3))
    found = predict(p, c, strategy([0, 1, 2], [0, 1, 2], 4))
    assert found.memory == (3.1e9, 2.1e9, 1.1e9)
    assert predict(p, c, strategy([0, 1, 2], [0, 1, 2], 4, schedule="gpipe")).memory == (4.1e9,) * 3
    # recomputing, a stage keeps what it received, 4 bytes an element, and works on one microbatch
    again = predict(p, c, strategy([0, 1, 2], [0, 1, 2], 4, recompute=(True, False, True)))
    assert again.memory == (1e9 + 1e8, 2.1e9, 1 * 4e6 + 1e9 + 1e8)
    assert [s.backward for s in again.stages] == [3.0, 2.0, 3.0]


def test_a_sharded_optimizer() -> None:
    """Each of two replicas steps half of the parameters and sends it to the other: half of a ring's way, 4 bytes."""
    p, c = profile(layers(1e9)), nodes(("fast", 2))
    whole, sharded = (predict(p, c, strategy([0, 1], [0], 1, shard_optimizer=on)) for on in (False, True))
    assert whole.optimizer == pytest.approx(4.0) and sharded.optimizer == pytest.approx(2.0 + 0.2)
    assert whole.memory == (16e9,) and sharded.memory == (12e9,)


def test_the_slowest_device_decides() -> None:
    p = profile(layers(1e9, 1e9))
    c = nodes(("fast", 2), ("slow", 2))
    mixed = predict(p, c, strategy([0, 2], [0], 2))
    assert mixed.pipeline == 36.0 and mixed.limits == (32e9,), "replicas on a fast and a slow device: the slow one"
    assert mixed.optimizer == pytest.approx(2 * 8)
    staged = predict(p, c, strategy([0, 1, 2, 3], [0, 1], 1))
    assert staged.limits == (64e9, 32e9) and [s.forward for s in staged.stages] == [1.0, 3.0]
    assert staged.pipeline == pytest.approx(3 + 9 + 2 * LATE)
    # the fast rank reduces until 12.5 + 0.4, and steps 4 s; the slow one has reduced long before, and steps 8 s
    assert staged.seconds == pytest.approx(12.5 + 8) and staged.optimizer == pytest.approx(20.5 - 12.9)
    replicas = predict(p, c, strategy([0, 2, 1, 3], [0, 1], 1))
    assert replicas.pipeline == 18.0, "a fast replica waits for a slow one"


def test_stages_of_one_rank_are_neighbours_for_nothing() -> None:
    """zbv on two ranks: stages 1 and 2 share rank 1; only two boundaries are crossed."""
    p = profile(layers(0, 0, 0, 0), elements=0.5e9 / 4)
    found = predict(p, nodes(("fast", 1), ("fast", 1)), strategy([0, 1], range(4), 1, schedule="zbv", virtual_stages=2))
    assert [s.receives for s in found.stages] == [0.0, 0.75, 0.0, 0.75]
    # four forwards and four backwards of inputs on the way, four messages; then stage 0's own weights
    assert found.pipeline == pytest.approx(4 * 1 + 4 * 1.5 + 4 * 0.75 + 0.5)


def test_a_skip_is_received_by_each_stage_that_uses_it() -> None:
    p = replace(profile(layers(0, 0, 0)), tensors=(Tensor(0, (1, 2), 1e9 / 4), Tensor(1, (2,), 0.5e9 / 4, False)))
    found = predict(p, nodes(("fast", 1), ("fast", 1), ("fast", 1)), strategy([0, 1, 2], [0, 1, 2], 1))
    assert [s.receives for s in found.stages] == [0.0, 1.25, 1.75]
    # back come the skip's gradients only: 1 s to each
    assert found.pipeline == pytest.approx(9 + 1.25 + 1.75 + 2 * 1.25)


def blocking_seconds(s: Strategy, there: float, back: float) -> float:
    """End of a pipeline whose ranks wait for their own messages to go out: round robin until nothing is left."""
    chain = Pipeline(tuple(range(s.pp)), (1.0,) * s.pp, (2.0,) * s.pp, (0.0,) * s.pp, (0,) * s.pp)
    schedule = make_schedule(s.schedule, chain.program, s.microbatches)
    done: dict[tuple[Kind, int, int], float] = {}
    clock, todo = [0.0] * s.pp, [list(actions) for actions in schedule.ranks]
    while any(todo):
        for rank, actions in enumerate(todo):
            if not actions:
                continue
            a = actions[0]
            first, last = a.segment == 0, a.segment == s.pp - 1
            if a.kind is Kind.F:
                needs = [] if first else [(Kind.F, a.segment - 1, a.microbatch)]
                takes = 1.0 + (0.0 if last else there)
            else:
                needs = [(Kind.F, a.segment, a.microbatch)] if last else [(Kind.B, a.segment + 1, a.microbatch)]
                takes = 2.0 + (0.0 if first else back)
            if all(need in done for need in needs):
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + takes
                done[a.kind, a.segment, a.microbatch] = clock[rank]
                actions.pop(0)
    return max(clock)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_blocking_runtime_waits_for_its_messages(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        pp, m, wire = rng.randint(2, 4), rng.randint(1, 6), rng.uniform(0, 2)
        p = profile(layers(*(0,) * pp), elements=wire * 1e9 / 4)
        s = strategy(range(pp), range(pp), m, schedule=name)
        found = predict(p, nodes(*(("fast", 1),) * pp), s, replace(PLAIN, blocking=True))
        assert found.pipeline == pytest.approx(blocking_seconds(s, wire + LATE, wire + LATE))
        free = predict(p, nodes(*(("fast", 1),) * pp), s)
        assert free.pipeline <= found.pipeline * (1 + 1e-12)


def strategies(rng: random.Random, c: Cluster, size: int) -> Strategy:
    """Any strategy of so many layers."""
    pp = rng.randint(1, min(c.size, 3))
    dp = rng.randint(1, c.size // pp)
    name, virtual = rng.choice((("1f1b", 1), ("zb", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2)))
    cuts = (0, *sorted(rng.sample(range(1, size), pp * virtual - 1)))
    again = tuple(rng.random() < 0.5 for _ in cuts) if rng.random() < 0.3 else ()
    devices = rng.sample(range(c.size), pp * dp)
    more: dict[str, Any] = {"recompute": again, "shard_optimizer": rng.random() < 0.3}
    return strategy(devices, cuts, rng.randint(1, 6), schedule=name, virtual_stages=virtual, **more)


@pytest.mark.parametrize("trial", range(4))
def test_parts_of_a_step_add_up(trial: int, seed: int) -> None:
    rng = random.Random(f"{seed} {trial}")
    model = CostModel(some_profile(rng), some_cluster(rng))
    for _ in range(15):
        s = strategies(rng, model.cluster, 12)
        found = model.predict(s)
        assert found.seconds == pytest.approx(found.pipeline + found.reduction + found.optimizer)
        by_cause = parts(model, Plan(s, found, (), model.cluster))
        assert sum(by_cause.values()) == pytest.approx(found.seconds) and min(by_cause.values()) >= -1e-12
        kept = model.memory(s)
        assert [memory.total for memory in kept] == pytest.approx(found.memory)
        assert model.timeline(s).seconds == pytest.approx(found.pipeline)


@pytest.mark.parametrize("trial", range(4))
def test_the_least_time_is_never_above_the_predicted(trial: int, seed: int) -> None:
    rng = random.Random(f"{seed} {trial}")
    model = CostModel(some_profile(rng), some_cluster(rng))
    for _ in range(40):
        s = strategies(rng, model.cluster, 12)
        edges = (*s.cuts, 12)
        names = model.network(s.tp, s.pp, s.dp, s.devices).types
        stages = []
        for stage, (a, b) in enumerate(itertools.pairwise(edges)):
            name = model.slowest(names[s.ranks[stage]], 1)
            stages.append(sum(model.layer_seconds(name, 1, s.microbatch, s.recomputes(stage))[a:b]))
        ranks = [sum(t for t, r in zip(stages, s.ranks, strict=True) if r == rank) for rank in range(s.pp)]
        assert model.at_least(s, stages, ranks) <= model.predict(s).seconds * (1 + 1e-9)


def test_a_device_without_times() -> None:
    p = profile(layers(1.0))
    only = replace(p, times=tuple(t for t in p.times if t.device == "fast"))
    with pytest.raises(ProfileError, match="none for 'slow' at tp 1"):
        predict(only, nodes(("fast", 1), ("slow", 1)), strategy([1], [0], 1))


@pytest.mark.parametrize("device", ["cpu", "fast"])
def test_host_seconds_of_actions_layers_and_launches(device: str) -> None:
    """Each action takes the host its time, a forward that of all layers; the optimizer launches for its own layers.

    On a CPU that comes on top; a GPU works meanwhile, and waits only if the host takes longer.
    """
    p, c, s = profile(layers(1e9, 1e9, 1e9)), nodes(("fast", 2)), strategy([0, 1], [0, 2], 3)
    p = replace(p, times=tuple(replace(t, device=device if t.device == "fast" else t.device) for t in p.times))
    c = replace(
        c,
        types=tuple(replace(t, name=device if t.name == "fast" else t.name) for t in c.types),
        nodes=tuple(replace(n, device=device) for n in c.nodes),
    )
    before = predict(p, c, s)
    for action in (0.25, 8.0):
        after = predict(p, c, s, replace(PLAIN, action=action, unit=0.125, launches=0.5))
        beside = (lambda device, host: device + host) if device == "cpu" else max
        assert [x.forward for x in after.stages] == [beside(x.forward, action + 3 * 0.125) for x in before.stages]
        assert [x.backward for x in after.stages] == [beside(x.backward, action) for x in before.stages]
        assert after.optimizer == pytest.approx(beside(before.optimizer, 2 * 0.5)), "rank 0 has two layers"
