"""``scripts/gpu_check``: its code runs on a CPU, too; it says so where there is no device; and it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ONE = ["--device", "cpu", "--pairs", "3", "--precision", "float32"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault("VIRTUAL_ENV", sys.prefix)  # this interpreter, not the one of scripts/setup.sh
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def test_it_runs_on_a_cpu_and_ends_with_figures(tmp_path: Path) -> None:
    ended = run(str(ROOT / "scripts" / "gpu_check"), *ONE, "--json", str(tmp_path / "figures"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures == json.loads((tmp_path / "figures").read_text())
    assert figures["ok"] and not figures["failed"]
    for pipeline in ("gpipe", "1f1b", "interleaved_1f1b", "zb"):
        for stages in (2, 4):
            assert figures["parity"][f"float32, {pipeline}, {stages} stages"] <= 1e-4
    assert figures["parity"]["float32, zbv, 2 stages"] <= 1e-4
    assert all(ratio > 0 for ratio in figures["overhead"].values()) and len(figures["overhead"]) == 2
    assert "Not checked here" in ended.stdout and "NCCL between devices" in ended.stdout


def test_without_a_device_nothing_is_checked() -> None:
    ended = run(str(ROOT / "scripts" / "gpu_check"))
    assert ended.returncode == 2
    assert "no CUDA device" in ended.stdout and "nothing was checked" in ended.stdout


@pytest.mark.parametrize("wrong", ["loss * 1.001", "loss + 0 * model(ids).sum() * float('nan')"])
def test_what_is_wrong_ends_in_status_1(wrong: str) -> None:
    """The bare model trains on another loss: every parity check must see it."""
    code = f"""if True:
        import sys
        from checks import gpu
        right = gpu.loss_of
        def loss_of(model, ids):
            loss = right(model, ids)
            return {wrong} if isinstance(model, gpu.Gpt) else loss
        gpu.loss_of = loss_of
        gpu.PIPELINES = gpu.PIPELINES[:2]
        sys.exit(gpu.main({ONE!r}))"""
    ended = run("-c", code)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stdout.count("FAILED") == 2 and not json.loads(ended.stdout.splitlines()[-1])["ok"]
