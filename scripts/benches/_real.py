"""Real kernels on two processes: what is predicted from `smpar probe` and `smpar profile`, and what a step takes.

probe, profile (both processes at once, as in training) ──▶ plans ──▶ each is trained with: predicted / measured
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from smpar.advisor import BUILT
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.hardware import SMPAR
from smpar.planner.plans import Plan
from smpar.planner.profile import Profile
from smpar.planner.search import search
from smpar.planner.space import Constraints

ROOT = Path(__file__).resolve().parents[2]
ENTRY = f"{ROOT / 'examples' / 'train_gpt.py'}:build"
BATCH = 16  # of the quickstart
WARM, STEPS = 10, 60
FIXED = {
    "quickstart": {"pp": 2, "schedule": "1f1b", "microbatch": 4},
    "zb": {"pp": 2, "schedule": "zb"},
    "replicas": {"dp": 2, "pp": 1},
}


def real_errors() -> dict[str, float]:
    """Relative errors of predicted steps of the quickstart's model; the first plan is what the quickstart runs."""
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        cluster, profile = Path(folder, "cluster.yaml"), Path(folder, "profile.json")
        _launch("-m", "smpar", "probe", "-o", str(cluster))
        _launch("-m", "smpar", "profile", ENTRY, "-o", str(profile), "--microbatch-sizes", "1,2,4,8")
        model = CostModel(Profile.from_file(profile), Cluster.from_file(cluster), SMPAR)
        for name, fix in FIXED.items():
            plan = search(model, BATCH, Constraints.make({**BUILT, **fix})).best
            predicted, measured = plan.prediction.seconds, _measured(plan, Path(folder, "plan.json"))
            errors[name] = abs(predicted / measured - 1)
            print(
                f"  {name}: {plan.strategy}: predicted {1e3 * predicted:.1f} ms, measured {1e3 * measured:.1f} ms, "
                f"{predicted / measured - 1:+.1%}",
                flush=True,
            )
    return errors


def _measured(plan: Plan, path: Path) -> float:
    plan.save(path)
    return float(_launch("-m", "benches._real", str(path)).strip().splitlines()[-1])


def _launch(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def worker(path: str) -> None:
    """One process: trains as the plan says; the first prints the median seconds of a step."""
    import smpar as smp

    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt

    smp.init(path)
    model, (ids, targets), _ = train_gpt.build()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    own = BATCH // smp.dp_size()
    seconds = []
    for _ in range(WARM + STEPS):
        smp.barrier()
        start = time.perf_counter()
        train_gpt.train_step(model, ids[:own], targets[:own])
        optimizer.step()
        optimizer.zero_grad()
        smp.barrier()
        seconds.append(time.perf_counter() - start)
    if smp.rank() == 0:
        print(statistics.median(seconds[WARM:]))
    smp.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    worker(parser.parse_args().plan)
