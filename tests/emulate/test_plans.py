"""A plan on a mixed cluster: its file, its emulation, and what `smpar simulate` prints of it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from smpar.cli.main import main
from smpar.emulate import Emulation, predicted
from smpar.emulate.trials import SCHEDULES
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.plans import Plan
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times
from smpar.planner.search import search
from smpar.planner.strategy import Strategy
from smpar.schedule import virtual_stages_of

SIZE = 17


def model(rng: random.Random) -> Profile:
    """An embedding, 15 uneven blocks and a head that shares its parameters; the T4 takes thrice as long as the V100."""
    layers = tuple(Layer(f"layer {i}", 4e7 if i in (0, SIZE - 1) else 7e6, saved=3e7, output=4e6) for i in range(SIZE))
    tensors = tuple(Tensor(i, (i + 1,), 1e6) for i in range(SIZE - 1))
    forward = [rng.uniform(2e-3, 8e-3) for _ in layers]

    def times(device: str, slower: float) -> Times:
        def row(share: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(slower * share * microbatch * f for f in forward) for microbatch in (1, 2, 4))

        return Times(device, 1, (1, 2, 4), row(1), row(2), row(1))

    return Profile(layers, tensors, (times("V100", 1.0), times("T4", 3.0)), (Tied((0, SIZE - 1), 4e7),))


def mixed() -> Cluster:
    return Cluster.from_file("p3.8xlarge + g4dn.12xlarge")


def plan(seed: int, pp: int, dp: int) -> Plan:
    """Any strategy of these degrees: cuts, devices and schedule by chance."""
    rng = random.Random(seed)
    schedule = rng.choice(SCHEDULES)
    virtual = virtual_stages_of(schedule)
    costs, microbatch = CostModel(model(rng), mixed()), rng.choice((1, 2))
    strategy = Strategy(
        tp=1, pp=pp, dp=dp, microbatch=microbatch, microbatches=8, schedule=schedule, virtual_stages=virtual,
        cuts=(0, *sorted(rng.sample(range(1, SIZE), pp * virtual - 1))), devices=tuple(rng.sample(range(8), pp * dp)),
    )  # fmt: skip
    names = tuple(layer.name for layer in costs.profile.layers)
    return Plan(strategy, costs.predict(strategy), names, costs.cluster, parts=costs.parts(strategy))


def test_a_plans_parts_survive_its_file(seed: int, tmp_path: Path) -> None:
    best = plan(seed, pp=4, dp=2)
    best.save(tmp_path / "plan.json")
    assert Plan.from_file(tmp_path / "plan.json").parts == best.parts


@pytest.mark.parametrize(("pp", "dp"), [(4, 2), (2, 4), (8, 1), (1, 8), (3, 2)])
def test_an_emulation_takes_what_its_plan_is_predicted_to(seed: int, pp: int, dp: int) -> None:
    """But for ranks that are done early: the plan lets their optimizers wait for the last rank's backward."""
    best = plan(seed, pp, dp)
    assert best.parts is not None
    emulation = Emulation.of(best.strategy, best.parts)
    assert emulation.replicas == best.strategy.dp
    assert predicted(emulation).seconds == pytest.approx(best.prediction.seconds, rel=0.03)
    assert predicted(emulation).seconds <= best.prediction.seconds * (1 + 1e-9)


def test_plans_of_a_search_say_what_their_steps_are_made_of(seed: int) -> None:
    for found in search(CostModel(model(random.Random(seed)), mixed()), 32, keep=3):
        assert found.parts is not None
        emulation = Emulation.of(found.strategy, found.parts)
        assert predicted(emulation).seconds == pytest.approx(found.prediction.seconds, rel=0.03)


def test_simulate_prints_prediction_and_execution(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    best = plan(seed, pp=2, dp=2)
    best.save(file)
    assert main(["simulate", str(file)]) == 0
    assert "rank 1 |" in capsys.readouterr().out
    assert main(["simulate", str(file), "--run", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    rows = re.findall(r"^replica (\d) rank (\d) +(\S+) s +(\S+) s", shown, re.MULTILINE)
    assert [(int(replica), int(rank)) for replica, rank, _, _ in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for _, _, expected, executed in rows:
        assert float(executed) == pytest.approx(float(expected), rel=0.1)


def test_simulate_refuses_what_it_cannot_execute(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    best = plan(seed, pp=4, dp=2)
    best.save(file)
    for wrong in (["--replicas", "3"], ["--steps", "0"], ["--kernel", "-1"]):
        assert main(["simulate", str(file), *wrong]) == 2
        assert f"{wrong[0]} is" in capsys.readouterr().err
    given = json.loads(file.read_text())
    file.write_text(json.dumps(given | {"parts": None}))
    assert main(["simulate", str(file)]) == 2
    assert "what its step is made of" in capsys.readouterr().err
    given["parts"]["kinds"] = [0]
    file.write_text(json.dumps(given))
    assert main(["simulate", str(file)]) == 2
    assert "`parts.kinds` of a plan is a list of 2" in capsys.readouterr().err
