"""``smpar plan`` and ``smpar.plan``: from a model or a profile to a search's plans, and files of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smpar as smp
from smpar.cli.main import WRONG, main
from smpar.cli.plan import fixed
from smpar.errors import CommandError
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.plans import Plan
from smpar.planner.search import search
from smpar.planner.space import Constraints
from tests.cli.entries import BLOCKS, Tower, step
from tests.planner.sample_plans import some_cluster, some_profile


@pytest.fixture
def files(seed: int, tmp_path: Path) -> tuple[str, str]:
    """A profile and a cluster that fit."""
    draw = random.Random(seed)
    some_profile(draw).save(tmp_path / "profile.json")
    some_cluster(draw).save(tmp_path / "cluster.yaml")
    return str(tmp_path / "profile.json"), str(tmp_path / "cluster.yaml")


def test_the_command_finds_what_the_search_finds(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, cluster = files
    output, page = tmp_path / "plan.json", tmp_path / "plan.html"
    given = [
        "plan",
        "--profile",
        profile,
        "--cluster",
        cluster,
        "--global-batch",
        "16",
        "--fix",
        "pp=2|4,schedule=1f1b",
    ]
    assert main([*given, "--keep", "3", "-o", str(output), "--html", str(page)]) == 0
    table = capsys.readouterr().out
    plans = smp.plan(profile, cluster=cluster, global_batch=16, fix={"pp": [2, 4], "schedule": "1f1b"}, keep=3)
    assert plans.model is not None
    fix = {"pp": [2, 4], "schedule": "1f1b", "tp": 1, "recompute": "none", "shard_optimizer": False}
    direct = search(plans.model, 16, Constraints.make(fix), 3)
    assert plans.plans == direct.plans
    assert Plan.from_file(output) == plans.best
    assert {plan.strategy.pp for plan in plans} <= {2, 4}
    for plan in plans:
        assert plan.why in table and plan.why in page.read_text()
    assert main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Plan.from_dict(told["plans"][0]).strategy == plans.best.strategy and told["complete"]


def test_an_entry_point_on_a_ready_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    entry = ["plan", "tests.cli.entries:tower", "--cluster", "8xh100", "--global-batch", "8", "--fix", "pp=2"]
    assert main([*entry, "-o", str(output)]) == 0
    plan = Plan.from_file(output)
    assert plan.layers == ("embed", *(f"blocks.{i}" for i in range(BLOCKS)), "head") and plan.strategy.pp == 2
    assert "blocks" in capsys.readouterr().out


def test_a_model_without_memory_plans_like_one_with(seed: int) -> None:
    ids = torch.randint(50, (2, 16))
    with torch.device("meta"):
        meta = Tower()
    found = [
        smp.plan(model, (ids, ids), Cluster.from_file("p3.8xlarge"), 8, step=step, fix={"pp": 2}, shown=False)
        for model in (meta, Tower())
    ]
    assert found[0].plans == found[1].plans
    assert str(found[0]).startswith(f"1. {found[0].best.strategy}: ")


def test_a_plan_of_a_profile_loads_no_torch(files: tuple[str, str]) -> None:
    code = (
        "import sys; from smpar.cli.main import main; "
        f"main(['plan', '--profile', {files[0]!r}, '--cluster', {files[1]!r}, '--global-batch', '8']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_an_interrupted_search_gives_the_best_so_far(seed: int) -> None:
    draw = random.Random(seed)
    model = CostModel(some_profile(draw), some_cluster(draw))

    def interrupt(done: int, whole: int, best: float) -> None:
        if best < float("inf"):
            raise KeyboardInterrupt

    plans = search(model, 16, None, 5, interrupt)
    assert not plans.complete and len(plans) >= 1
    assert "interrupted" in smp.plans_text(plans)


def test_what_cannot_run_yet_is_planned_on_demand_only(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["plan", "--profile", files[0], "--cluster", files[1], "--global-batch", "16", "-o", str(tmp_path / "p")]
    assert main(given) == 0 and "refuse" not in capsys.readouterr().err
    assert main([*given, "--fix", "shard_optimizer=true,dp=2,pp=1"]) == 0
    assert "smpar.init will refuse" in capsys.readouterr().err
    assert Plan.from_file(tmp_path / "p").strategy.shard_optimizer


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "PROFILE", "m:f"], "both"),
        ([], "neither"),
        (["--profile", "PROFILE", "--fix", "pp"], "each key once"),
        (["--profile", "PROFILE", "--fix", "px=2"], "'px'"),
        (["--profile", "PROFILE", "--fix", "pp=64"], "pp in [64]"),
        (["--profile", "nothing.json"], "nothing.json"),
        (["nothing:build"], "nothing"),
        (["--profile", "PROFILE", "--keep", "0"], "keep=0"),
        (["--profile", "PROFILE", "-o", "/nowhere/plan.json"], "no folder '/nowhere'"),
        (["--profile", "PROFILE", "--html", "/"], "'/' is a folder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    files: tuple[str, str], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [files[0] if x == "PROFILE" else x for x in arguments]
    assert main(["plan", *given, "--cluster", files[1], "--global-batch", "8"]) == WRONG
    assert said in capsys.readouterr().err


def test_constraints_are_read() -> None:
    assert fixed(["tp=1,pp=2|4", "shard_optimizer=false,schedule=zb"]) == {
        "tp": [1], "pp": [2, 4], "shard_optimizer": [False], "schedule": ["zb"],
    }  # fmt: skip
    with pytest.raises(CommandError):
        fixed(["pp=2", "pp=4"])
