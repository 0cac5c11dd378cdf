"""Show what a plan's step is predicted to do, and let processes of this machine do it.

    smpar simulate plan.json           the timetable to scale, and when each rank is done
    smpar simulate plan.json --run     the same executed: real processes, messages and schedule, kernels that sleep

A process stands for a rank of a replica, with all of its tensor-parallel group. Times are stretched or shrunk so that
kernels are long beside what the machine delays a sleep by; all that is printed is in the plan's own seconds.
Durations of kernels and transfers are the plan's own: what is checked is their order, and who waits for whom. The
timetable ends with the last backward; the table's seconds include the reduction's rest and the optimizer.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from smpar.emulate import Emulation, Emulator, predicted
from smpar.emulate.report import compared, drawn
from smpar.errors import EmulationError
from smpar.planner.plans import Plan

MANY = 32
"""Processes that a machine of few cores runs without delaying them."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a file that `smpar plan` wrote")
    parser.add_argument("--run", action="store_true", help="execute it, too")
    parser.add_argument("--steps", type=int, default=3, help="how many steps to execute; the fastest is shown (3)")
    parser.add_argument("--replicas", type=int, default=0, metavar="N", help="only the first N replicas (all)")
    parser.add_argument(
        "--kernel", type=float, default=0.02, metavar="SECONDS", help="about how long an executed forward takes (0.02)"
    )
    parser.add_argument("--width", type=int, default=96, help="columns of the timetable (96)")


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PlanFileError: the file is no plan.
        EmulationError: an option is out of range, or more processes would be needed than make sense.
        EmulationFailed: a process failed.
    """
    plan = Plan.from_file(options.plan)
    if plan.parts is None:
        rule = "a plan to be simulated says what its step is made of"
        raise EmulationError(rule, f"{options.plan} has no `parts`", "let `smpar plan` write it again")
    emulation = Emulation.of(plan.strategy, plan.parts)
    if options.replicas:
        if not 1 <= options.replicas <= emulation.replicas:
            raise _wrong("--replicas", f"from 1 to {emulation.replicas}", options.replicas)
        emulation = emulation.first(options.replicas)
    if options.steps < 1:
        raise _wrong("--steps", "at least 1", options.steps)
    if not 0 < options.kernel < float("inf"):
        raise _wrong("--kernel", "above 0", options.kernel)
    prediction = predicted(emulation)
    print(f"{plan.strategy}\n\npredicted\n{drawn(emulation, prediction, options.width)}")
    if not options.run:
        for replica, ends in enumerate(prediction.ends):
            done = ", ".join(f"{end:.4g}" for end in ends)
            print(f"{f'replica {replica}: ' if emulation.replicas > 1 else ''}ranks are done after {done} s")
        return 0
    if emulation.processes > MANY:
        fewer = max(1, MANY // emulation.size)
        raise EmulationError(
            f"at most {MANY} processes execute a plan on one machine",
            f"{emulation.replicas} replicas of {emulation.size} ranks",
            f"--replicas {fewer}" if emulation.size <= MANY else "execute a plan with fewer pipeline ranks",
        )
    factor = 2.0 ** round(math.log2(options.kernel / emulation.kernel)) if emulation.kernel else 1.0
    length = factor * prediction.seconds
    print(f"\nexecuting {options.steps} steps of {length:.3g} s by {emulation.processes} processes", flush=True)
    with Emulator() as emulator:
        steps = [step.scaled(1 / factor) for step in emulator.run(emulation.scaled(factor), options.steps)]
    best = min(steps, key=lambda step: step.seconds)
    print(f"\nexecuted\n{drawn(emulation, best, options.width)}\n\n{compared(prediction, steps)}")
    return 0


def _wrong(option: str, must: str, found: float) -> EmulationError:
    return EmulationError(f"{option} is {must}", f"{found}", "smpar simulate --help tells more")
