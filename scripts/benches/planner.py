"""The planner: against measured trials, other planners and execution; exactness and speed of its parts.

    fit         AMP's published trials: predicted against measured
    leave_out   constants fitted on a part of the trials, scored on the others
    exact       CPU milliseconds of cuts of 1000 layers into 64 stages
    simulator   simulated actions per CPU second, by schedule
    search      CPU seconds of searches: AMP's space on its clusters, the whole space there, 1024 devices of three types
    plans       our plan against each baseline's on even and uneven clusters, simulated
    executed    emulated on local processes that sleep: predicted against executed; our plan against Megatron's rule's

Where figures depend on chance (``exact``, ``executed``), ``--seed`` repeats them.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches._amp import DATA, Experiment, experiments
from benches._common import Figures, finish, parser
from benches._fit import Constants, amp_scored, leave_out, scored, table
from benches._mixed import cases, thousand
from benches._plans import Compared, compare, compared_trials, for_eight, mixed_experiment
from smpar.planner.hardware import DEEPSPEED, SMPAR
from smpar.planner.pipeline import Pipeline, simulate_named
from smpar.planner.search import search
from smpar.planner.space import Constraints
from smpar.planner.stages import Layers, Place, Tensor, cut_stages
from smpar.schedule import placement

REPEATS = 5


@dataclass(frozen=True)
class Context:
    """What all parts get."""

    experiments: Sequence[Experiment]
    rng: random.Random
    verbose: bool


def fit(context: Context) -> dict[str, Figures]:
    found: dict[str, dict[str, Figures]] = {name: {} for name in ("spearman", "mare", "regret", "oom_in_top10")}
    for e in context.experiments:
        if not e.trials:
            continue
        mine = scored(e, Constants())
        theirs, agree = amp_scored(e)
        print(f"{e.name}: {len(e.trials)} trials, {sum(t.measured is not None for t in e.trials)} ran")
        print(f"  smpar             {mine}")
        print(f"  AMP's closed form {theirs}; it gives {agree} of AMP's {len(e.trials)} printed predictions")
        if context.verbose:
            print("\n".join(table(e, e.model())))
        for name, value in zip(found, (mine.spearman, mine.mare, mine.regret, mine.oom), strict=True):
            found[name][e.name] = value
    return dict(found)


def leave_out_(context: Context) -> dict[str, Figures]:
    for line in leave_out([e for e in context.experiments if e.trials]):
        print(line, flush=True)
    return {}


def exact(context: Context) -> dict[str, Figures]:
    rng, size, count = context.rng, 1000, 64
    layers = Layers(
        [[rng.uniform(0.5, 1.5) * slower for _ in range(size)] for slower in (1.0, 1.7, 2.6)],
        [rng.uniform(0.5, 1.5) for _ in range(size)],
        [rng.uniform(0.5, 1.5) for _ in range(size)],
        [
            Tensor(i, tuple(j for j in (i + 1, i + rng.randint(2, 9)) if j < size), rng.random())
            for i in range(size - 1)
        ],
    )
    places = [
        Place(rng.randrange(3), 0.1, 0.01, in_flight=count - k, limit=2 * size / count * (count - k + 1))
        for k in range(count)
    ]
    seconds = _fastest(lambda: cut_stages(layers, places, 256))
    print(f"{size} layers into {count} stages of three device types with memory limits: {1e3 * seconds:.1f} ms")
    return {"partition_ms": 1e3 * seconds}


def simulator(_: Context) -> dict[str, Figures]:
    size, microbatches = 16, 256
    actions_all, seconds_all = 0, 0.0
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb", "zbv"):
        ranks = placement(name, size)
        stages = len(ranks)
        times = tuple(1.0 + 0.01 * (i % 7) for i in range(stages))
        between = (0.05,) * (stages - 1)
        pipeline = Pipeline(
            ranks, times, tuple(2 * t for t in times), times, (1,) * stages, between, between, between, between
        )
        actions = stages * microbatches * (3 if name.startswith("zb") else 2)
        seconds = _fastest(lambda p=pipeline, n=name: simulate_named(p, n, microbatches))  # type: ignore[misc]
        print(f"  {name:17} {actions / seconds / 1e6:6.2f} million actions per second")
        actions_all, seconds_all = actions_all + actions, seconds_all + seconds
    return {"sim_actions_per_s": actions_all / seconds_all}


def search_(context: Context) -> dict[str, Figures]:
    amp_space, whole = 0.0, 0.0
    for e in context.experiments:
        space = Constraints(
            devices=(e.cluster.size,), schedule=("1f1b",), recompute=("none",), shard_optimizer=(False,)
        )
        for runtime, constraints in ((DEEPSPEED, space), (SMPAR, Constraints())):
            model = e.model(runtime)
            started = time.process_time()
            plans = search(model, e.global_batch, constraints)
            taken = time.process_time() - started
            counts = ", ".join(f"{n} {name}" for name, n in plans.counts.items())
            print(f"  {e.name:12} {'AMP' if constraints is space else 'whole':6} {taken:7.3f} s  {counts}")
            amp_space, whole = (amp_space + taken, whole) if constraints is space else (amp_space, whole + taken)
    case = thousand()
    started = time.process_time()
    plans = search(case.model(SMPAR), case.global_batch, progress=_progress)
    taken = time.process_time() - started
    print(f"  {case.name}: {taken:.1f} s, best {plans.best.prediction.seconds:.3f} s: {plans.best.strategy}")
    return {"search_s": {"amp": amp_space, "full": whole, "1024": taken}}


def plans(context: Context) -> dict[str, Figures]:
    found: list[Compared] = []
    third = mixed_experiment(context.experiments)
    for runtime, name in ((DEEPSPEED, "1F1B in half precision (the trials' runtime)"), (SMPAR, "smpar")):
        print(name)
        here = [compared_trials(e, runtime) for e in (*context.experiments, *([third] if third is not None else []))]
        here += [compare(case.name, case.model(runtime), case.global_batch) for case in cases()]
        for one in here:
            print("\n".join(one.lines()), flush=True)
        found += here
    worst = min(found, key=lambda one: one.worst)
    uneven = min((one for one in found if one.uneven), key=lambda one: one.megatron)
    print(f"least gain over any baseline: {worst.worst:.3f} x, on {worst.name}")
    print(f"least gain over Megatron's rule on an uneven cluster: {uneven.megatron:.2f} x, on {uneven.name}")
    return {"vs_baselines": worst.worst, "vs_megatron": {"simulated": uneven.megatron}}


def executed(context: Context) -> dict[str, Figures]:
    from smpar.emulate.emulation import Emulation
    from smpar.emulate.processes import Emulator
    from smpar.emulate.trials import FORWARD, executed_error, in_order, tried

    errors: dict[str, Figures] = {}
    for processes in (2, 4, 8):
        results = tried(processes, context.rng)
        errors[str(processes)] = max(result.error for result in results)
        print(
            f"  {processes} processes: {len(results)} emulations, off by {errors[str(processes)]:.1%} at most, "
            f"{sum(result.error for result in results) / len(results):.1%} on average; "
            f"{'all' if in_order(results) else 'not all'} in the predicted order",
            flush=True,
        )
    compared = for_eight()
    print("\n".join(compared.lines()))
    model = compared.model
    seconds = {}
    with Emulator() as emulator:
        for who in ("smpar", min(("megatron", "megatron_least"), key=lambda name: compared.seconds[name])):
            strategy = compared.strategies[who]
            emulation = Emulation.of(strategy, model.parts(strategy))
            factor = FORWARD / emulation.kernel
            error = executed_error(emulator, emulation.scaled(factor))
            seconds[who] = model.predict(strategy).seconds * (1 + error)
            print(
                f"  {who}: executed by {emulation.processes} processes {seconds[who]:.4f} s ({error:+.1%})", flush=True
            )
    ours, theirs = seconds.values()
    return {"executed_error": errors, "vs_megatron": {"executed": theirs / ours}}


PARTS: dict[str, Callable[[Context], dict[str, Figures]]] = {
    "fit": fit,
    "leave_out": leave_out_,
    "exact": exact,
    "simulator": simulator,
    "search": search_,
    "plans": plans,
    "executed": executed,
}


def _fastest(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        best = min(best, time.process_time() - started)
    return best


def _progress(done: int, total: int, best: float) -> None:
    if sys.stderr.isatty():
        print(f"\r  {done} of {total} degrees, best {best:.3f} s ", end="", file=sys.stderr, flush=True)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between (all)")
    arguments.add_argument(
        "--data", type=Path, default=DATA, help="a folder of trials_X.json, cluster_X.json and costs"
    )
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    arguments.add_argument("--table", action="store_true", help="show each trial")
    args = arguments.parse_args()
    chosen = args.only.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        arguments.error(f"--only takes {', '.join(PARTS)}; got {unknown[0]!r}")
    print(f"seed: repeat with --seed {args.seed}")
    context = Context(experiments(args.data), random.Random(args.seed), args.table)
    figures: dict[str, Figures] = {}
    for name in PARTS:
        if name in chosen:
            print(f"== {name}", flush=True)
            for key, value in PARTS[name](context).items():
                before = figures.get(key)
                figures[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    finish(figures, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
