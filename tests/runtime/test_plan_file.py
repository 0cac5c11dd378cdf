"""``smpar.init(plan)``: the plan's stages, placement and schedule are what runs, and nothing else is accepted."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smpar.config import Config, Planned
from smpar.errors import ConfigError, MeshError, NotBuiltYet, PlanFileError
from smpar.planner.cluster import Cluster
from smpar.planner.cost import Prediction, Stage
from smpar.planner.plans import Plan
from smpar.planner.strategy import Strategy
from smpar.runtime.plan_file import with_plan
from tests.cli.entries import Tower, step
from tests.harness import Pool, RanksFailed

WIDTH, LAYERS = 6, 9
NAMES = ("embed", *(f"blocks.{i}" for i in range(LAYERS - 2)), "head")


class Model(nn.Module):
    def __init__(self, blocks: int = LAYERS - 2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Model().double()


def cluster(*counts: int) -> Cluster:
    """Nodes with so many devices."""
    return Cluster.from_dict(
        {
            "devices": {"cpu": {"memory_gib": 4, "peak_tflops": 1, "memory_gbytes_per_s": 10}},
            "nodes": [
                {"name": f"n{i}", "device": "cpu", "count": n, "intra_gbit_per_s": 10, "inter_gbit_per_s": 10}
                for i, n in enumerate(counts)
            ],
        }
    )


def plan_of(strategy: Strategy, machines: Cluster, layers: tuple[str, ...] = NAMES) -> Plan:
    """A plan with that strategy, whatever it costs."""
    ends = (*strategy.cuts[1:], len(layers))
    stages = tuple(Stage((a, b), 1.0, 2.0, 0.0, 0.0, 8.0) for a, b in zip(strategy.cuts, ends, strict=True))
    each = (8.0,) * strategy.pp
    return Plan(strategy, Prediction(1.0, 1.0, 0.0, 0.0, 0.0, each, each, stages), layers, machines)


def some_cuts(seed: int, stages: int) -> tuple[int, ...]:
    return (0, *sorted(random.Random(seed).sample(range(1, LAYERS), stages - 1)))


def data(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def alone(seed: int, samples: int) -> tuple[float, dict[str, Tensor]]:
    model = make(seed)
    x, y = data(seed, samples)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def planned(given: Any, seed: int, samples: int) -> dict[str, Any]:
    import smpar as smp

    smp.init(given)
    model = smp.DistributedModel(make(seed))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    x, y = (t.chunk(smp.dp_size())[smp.dp_rank()] for t in data(seed, samples))
    loss = train(model, x, y).reduce_mean()
    layout = model.pipeline.layout if model.pipeline is not None else None
    return {
        "at": (smp.pp_rank(), smp.rdp_rank()),
        "loss": loss.item(),
        "held": copy.deepcopy({n: p.grad for n, p in model.local_named_parameters()}),
        "stages": {} if layout is None else {layout.names[u]: s for u, s in layout.units.items()},
        "schedule": model.pipeline.timetable.schedule.name if model.pipeline is not None else "",
    }


def assert_placed(stages: dict[str, int], plan: Plan) -> None:
    """Each layer of the plan is a unit, or in one, or has units inside; on its stage."""
    for layer, stage in zip(plan.layers, plan.stage_of_layer, strict=True):
        here = {s for unit, s in stages.items() if f"{layer}.".startswith(f"{unit}.") or unit.startswith(f"{layer}.")}
        assert here == {stage}, layer


CASES = [  # world, pp, dp, schedule, virtual stages, nodes, devices in the order of places
    (2, 2, 1, "1f1b", 1, (2,), (0, 1)),
    (2, 2, 1, "zbv", 2, (1, 1), (1, 0)),
    (2, 1, 2, "1f1b", 1, (2,), (1, 0)),
    (4, 4, 1, "zb", 1, (2, 2), (2, 3, 1, 0)),
    (4, 2, 2, "interleaved_1f1b", 2, (2, 3), (4, 0, 1, 3)),  # device 2 is not used
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]}x{c[2]}-{c[3]}")
def test_a_plan_is_followed(pool: Pool, seed: int, tmp_path: Path, case: Any) -> None:
    """Its boundaries, its placement, its schedule; and the gradients of one process over the whole batch."""
    world, pp, dp, schedule, virtual, nodes, devices = case
    microbatches, microbatch = 4, 2
    samples = microbatches * microbatch * dp
    cuts = some_cuts(seed, pp * virtual)
    strategy = Strategy(1, pp, dp, microbatch, microbatches, schedule, virtual, cuts, devices)
    plan = plan_of(strategy, cluster(*nodes))
    plan.save(tmp_path / "plan.json")
    loss, gradients = alone(seed, samples)
    ranks = pool.run(world, planned, str(tmp_path / "plan.json"), seed, samples)
    used = sorted(devices)
    for place, device in enumerate(devices):
        assert ranks[used.index(device)]["at"] == (place // dp, place % dp)
    seen: set[str] = set()
    for rank in ranks:
        if pp > 1:
            assert_placed(rank["stages"], plan)
            assert rank["schedule"] == schedule
        stages_here = {s for s, r in enumerate(strategy.ranks) if r == rank["at"][0]}
        units = {n for n, s in zip(NAMES, plan.stage_of_layer, strict=True) if s in stages_here}
        assert {n for n in gradients if any(n.startswith(u + ".") for u in units)} == set(rank["held"])
        for name, gradient in rank["held"].items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-9, atol=1e-11), name
        seen |= set(rank["held"])
    assert seen == set(gradients)
    assert sum(rank["loss"] for rank in ranks) / world == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("fix", [{"pp": 2, "schedule": "zbv"}, {"pp": 1, "dp": 2}], ids=["pipeline", "replicas"])
def test_what_is_planned_runs(pool: Pool, seed: int, fix: dict[str, Any]) -> None:
    """From a model to a plan to two processes: the planned stages, and the loss of one process."""
    import smpar as smp

    samples = 16
    plans = smp.plan(make(seed), data(seed, samples)[0], cluster(2), samples, fix=fix, shown=False)
    assert set(plans.best.layers) >= {"embed", "head"}
    loss, _ = alone(seed, samples)
    ranks = pool.run(2, planned, {"plan": plans.best}, seed, samples)
    assert sum(rank["loss"] for rank in ranks) / 2 == pytest.approx(loss, rel=1e-9)
    if fix["pp"] == 2:
        assert_placed(ranks[0]["stages"], plans.best)


def tower_planned(plan: Plan, seed: int) -> tuple[float, dict[str, Tensor]]:
    import smpar as smp

    smp.init({"plan": plan})
    model, ids = some_tower(seed)
    wrapped = smp.DistributedModel(model)

    @smp.step
    def train(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
        loss = step(model, ids, targets)
        model.backward(loss)
        return loss

    loss = train(wrapped, ids, ids.roll(-1)).reduce_mean().item()
    return loss, {n: p.grad for n, p in wrapped.local_named_parameters() if p.grad is not None}


def some_tower(seed: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return Tower().double(), torch.randint(50, (8, 16))


def test_a_tied_embedding_and_a_class_token_of_glue_run_as_planned(pool: Pool, seed: int) -> None:
    import smpar as smp

    model, ids = some_tower(seed)
    batch = ids, ids.roll(-1)
    plans = smp.plan(model, batch, cluster(2), 8, step=step, fix={"pp": 2, "microbatch": 2}, shown=False)
    loss = step(model, *batch)
    loss.backward()
    right = {n: p.grad for n, p in model.named_parameters()}
    for value, gradients in pool.run(2, tower_planned, plans.best, seed):
        assert value == pytest.approx(loss.item(), rel=1e-9)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, right[name], rtol=1e-8, atol=1e-11), name


def two_stages(**changes: Any) -> Plan:
    strategy = Strategy(1, 2, 1, 2, 4, "1f1b", 1, (0, 4), (0, 1))
    return plan_of(dataclasses.replace(strategy, **changes), cluster(2))


def test_the_keys_of_a_plan_are_those_of_the_configuration(seed: int) -> None:
    config = Config.from_dict(with_plan({"plan": two_stages(), "fp32_grad_accumulation": True}))
    assert (config.pipeline_parallel_degree, config.microbatches, config.pipeline) == (2, 4, "1f1b")
    assert config.fp32_grad_accumulation
    assert config.plan is not None and config.plan.samples == 8
    assert Planned.from_dict(json.loads(json.dumps(config.to_dict()["plan"]))) == config.plan
    assert with_plan({"plan": two_stages().to_dict()}) == with_plan({"plan": two_stages()})


@pytest.mark.parametrize(
    "key",
    [("microbatches", 8), ("partitions", 4), ("pipeline", "zb"), ("auto_partition", False), ("optimize", "speed"),
     ("placement_strategy", "spread")],
    ids=lambda key: key[0],
)  # fmt: skip
def test_a_key_that_contradicts_the_plan_is_named(key: tuple[str, Any]) -> None:
    with pytest.raises(ConfigError, match=key[0]):
        with_plan({"plan": two_stages(), key[0]: key[1]})


def test_a_key_that_says_the_same_is_welcome() -> None:
    same = {"partitions": 2, "microbatches": 4, "auto_partition": True}
    assert with_plan({"plan": two_stages(), **same}) == with_plan({"plan": two_stages()}) | {"auto_partition": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute": (True, False)}, "recompute"),
        ({"shard_optimizer": True, "pp": 1, "dp": 2, "cuts": (0,)}, "shard the optimizer"),
    ],
    ids=["recompute", "shard"],
)
def test_what_this_version_cannot_run_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NotBuiltYet, match=said):
        with_plan({"plan": two_stages(**changes)})


def test_a_broken_file_is_told_apart_from_a_missing_one(tmp_path: Path) -> None:
    for text, said in (
        (None, "No such file"),
        ("{", "JSON"),
        ("[]", "smpar_plan"),
        ('{"smpar_plan": 1}', "no 'strategy'"),
    ):
        path = tmp_path / "plan.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(PlanFileError, match=said):
            with_plan(path)


def test_another_world_is_told_how_to_start() -> None:
    strategy = Strategy(1, 2, 3, 2, 4, "1f1b", 1, (0, 4), (0, 1, 2, 3, 4, 5))
    config = Config.from_dict(with_plan({"plan": plan_of(strategy, cluster(4, 2))}))
    assert config.plan is not None
    config.plan.check_world(6)
    with pytest.raises(MeshError, match=r"4 ranks, and a plan for 6 .by machine: 4, 2"):
        config.plan.check_world(4)


def start(plan: Plan, pins: bool) -> None:
    import smpar as smp

    smp.init({"plan": plan})
    model = make(0)
    if pins:
        smp.set_partition(model.head, 1)
    smp.DistributedModel(model)


@pytest.mark.parametrize(
    ("layers", "pins", "said"),
    [
        ((*NAMES[:8], "blocks.7"), False, "layer 8 is 'blocks.7'.*no such module"),
        ((*NAMES[:8], "blocks.6.0"), False, "share a module"),
        (NAMES, True, "head was put on stage 1"),
    ],
    ids=["missing", "nested", "pinned"],
)
def test_another_model_is_refused_when_it_is_wrapped(
    pool: Pool, layers: tuple[str, ...], pins: bool, said: str
) -> None:
    with pytest.raises(RanksFailed, match=said):
        pool.run(2, start, plan_of(two_stages().strategy, cluster(2), layers), pins)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (NAMES[:-1], "the step calls 'head', where the plan has 'nothing'"),
        ((*NAMES[:2], NAMES[3], NAMES[2], *NAMES[4:]), "calls 'blocks.2' after 'blocks.1'"),
    ],
    ids=["fewer", "order"],
)
def test_other_units_than_the_plans_are_named_in_the_first_step(
    pool: Pool, seed: int, layers: tuple[str, ...], said: str
) -> None:
    with pytest.raises(RanksFailed, match=said):
        pool.run(2, planned, {"plan": plan_of(two_stages().strategy, cluster(2), layers)}, seed, 8)


def test_ranks_in_a_world_of_another_size_hear_of_it_at_once(pool: Pool, seed: int) -> None:
    with pytest.raises(RanksFailed, match=r"2 ranks, and a plan for 4"):
        strategy = Strategy(1, 4, 1, 2, 4, "1f1b", 1, (0, 2, 4, 6), (0, 1, 2, 3))
        pool.run(2, planned, {"plan": plan_of(strategy, cluster(4))}, seed, 8)
