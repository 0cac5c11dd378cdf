"""Execution is the truth that predictions are held against: processes that really send, wait and sleep."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from smpar.emulate import Emulation, Emulator, Tied, fastest, predicted
from smpar.emulate.trials import SCHEDULES, Tried, executed_error, in_order, trial
from smpar.errors import EmulationError, EmulationFailed
from smpar.planner.pipeline import Pipeline
from smpar.schedule import make_schedule, times


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


def two_ranks(microbatches: int = 2, **more: Any) -> Emulation:
    """Forwards of 20 ms, backwards of 40 ms."""
    pipeline = Pipeline((0, 1), (0.02, 0.02), (0.04, 0.04), (0.0, 0.0), (1, 1), **more)
    return Emulation("1f1b", microbatches, (pipeline,))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_takes_what_the_simulator_says(emulator: Emulator, seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    emulation = trial(rng, schedule, rng.choice((2, 4)), rng.random() < 0.7, rng.random() < 0.7, microbatches=4)
    assert abs(executed_error(emulator, emulation, within=0.04)) <= 0.05


def test_eight_processes_in_two_unlike_replicas(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)
    emulation = trial(rng, rng.choice(SCHEDULES), 4, microbatches=4, replicas=2)
    assert emulation.processes == 8
    assert abs(executed_error(emulator, emulation, within=0.08)) <= 0.10


def test_of_five_plans_execution_prefers_the_predicted_ones(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)
    plans = [trial(rng, rng.choice(SCHEDULES), 2, microbatches=rng.randint(3, 6)) for _ in range(5)]
    results = []
    for plan in plans:
        expected = predicted(plan).seconds
        results.append(Tried(expected, expected * (1 + executed_error(emulator, plan, within=0.005))))
    assert in_order(results, apart=0.03)  # nearer ones are one choice


def test_messages_queue_on_their_channel() -> None:
    """::

    rank 0   |0F0 |0F1 |                              |0B0     |         |0B1     |
    0 to 1        |act. 0      |act. 1      |
    1 to 0                             |gr. 0  |               |gr. 1 |
    rank 1                     |1F0|1B0      |1F1|1B1      |
    """
    slow = two_ranks(wire_forward=(0.07,), latency_forward=(0.01,), wire_backward=(0.03,), latency_backward=(0.0,))
    starts = {str(timed.action): round(timed.start, 6) for timed in predicted(slow).actions[0]}
    assert starts["1F0"] == 0.1  # 20 ms, 70 ms on the channel, 10 ms
    assert starts["1B0"] == 0.12
    assert starts["1F1"] == 0.17  # the channel is free at 90 ms, not at 40; so 160 + 10
    assert starts["0B0"] == 0.19
    assert starts["1B1"] == 0.19
    assert starts["0B1"] == 0.26
    assert round(predicted(slow).seconds, 6) == 0.3


@pytest.mark.parametrize("host", [0.0, 0.015])
def test_executed_messages_queue_on_their_channel_and_keep_their_ranks_busy(emulator: Emulator, host: float) -> None:
    wires = {"wire_forward": (0.07,), "latency_forward": (0.01,), "wire_backward": (0.03,), "latency_backward": (0.0,)}
    slow = two_ranks(**wires, host=host)
    executed = {str(timed.action): timed.start for timed in fastest(emulator.run(slow, steps=4)).actions[0]}
    for timed in predicted(slow).actions[0]:
        assert executed[str(timed.action)] == pytest.approx(timed.start, abs=0.01)


def test_a_reduction_waits_for_the_slowest_replica_and_overlaps_the_rest(emulator: Emulator) -> None:
    """Stage 1 is reduced while stage 0 still computes; what counts is the slower replica.

    replica 0   rank 0 |0F0 |    ...       |0B0     | waits    |reduce 0        |opt |
    replica 1   rank 0 |0F0     |      ...            |0B0             |reduce 0        |opt |
                rank 1          |1F0     |1B0            |reduce 1                |opt |
    """
    fast, slow = (Pipeline((0, 1), (f * 0.02,) * 2, (f * 0.04,) * 2, (0.0, 0.0), (1, 1)) for f in (1.0, 2.0))
    both = Emulation("gpipe", 1, (fast, slow), reduction=(0.05, 0.15), optimizer=(0.01, 0.02))
    step = predicted(both)
    # the slow replica: 2 forwards of 40 ms, 1B0 ends at 160, 0B0 at 240
    assert step.ends[0] == step.ends[1] == pytest.approx((0.24 + 0.05 + 0.01, 0.16 + 0.15 + 0.02))
    executed = fastest(emulator.run(both, steps=4))
    for ends in executed.ends:
        assert ends == pytest.approx(step.ends[0], abs=0.015)


def test_a_tied_parameter_is_complete_when_its_last_stage_has_its_part(emulator: Emulator) -> None:
    """Stage 1 waits for stage 0, and both for their sum.

    rank 0   |0F0 |             |0B0     |tied  |reduce 0    |
    rank 1        |1F0 |1B0     |    ... |tied  |reduce 1|
    """
    tied = replace(two_ranks(microbatches=1), reduction=(0.05, 0.02), tied=(Tied((0, 1), 0.03),))
    assert predicted(tied).ends[0] == pytest.approx((0.12 + 0.03 + 0.05, 0.12 + 0.03 + 0.02))
    executed = fastest(emulator.run(tied, steps=4))
    assert executed.ends[0] == pytest.approx(predicted(tied).ends[0], abs=0.015)


def test_times_scale(seed: int) -> None:
    rng = random.Random(seed)
    plan = trial(rng, rng.choice(SCHEDULES), rng.randint(2, 4), replicas=2)
    factor = 2.0 ** rng.randint(-6, 6)
    assert predicted(plan.scaled(factor)) == predicted(plan).scaled(factor)  # without rounding, hence in equal orders


def test_without_links_predictions_are_those_of_the_schedule_room(seed: int) -> None:
    rng = random.Random(seed)
    for schedule in SCHEDULES:
        plan = trial(rng, schedule, rng.randint(1, 8), slow=rng.random() < 0.5)
        idle = dict.fromkeys(("wire_forward", "wire_backward", "latency_forward", "latency_backward"), ())
        plan = replace(plan, pipelines=(replace(plan.pipelines[0], **idle),))  # type: ignore[arg-type]
        program = plan.pipelines[0].program
        truth = times(make_schedule(schedule, program, plan.microbatches), program)
        found = predicted(plan).actions[0]
        assert [t.action for t in found] == [t.action for t in truth]
        assert [t.end for t in found] == pytest.approx([t.end for t in truth])


def test_one_rank_needs_no_other(emulator: Emulator) -> None:
    alone = Emulation("1f1b", 3, (Pipeline((0,), (0.01,), (0.02,), (0.0,), (1,)),), optimizer=(0.01,))
    assert executed_error(emulator, alone, within=0.05) == pytest.approx(0.0, abs=0.1)


# ---- it is an execution, not a second prediction -----------------------------------------------------------------


def ranks_of(emulator: Emulator, count: int) -> list[psutil.Process]:
    host = psutil.Process(emulator.pid)
    while len(ranks := host.children()) < count or any(rank.num_threads() < 4 for rank in ranks):
        time.sleep(0.01)
    return ranks


def test_a_rank_that_stands_still_delays_all(emulator: Emulator) -> None:
    emulation = two_ranks(microbatches=8)
    stopped, done = 0.4, threading.Event()

    def hinder() -> None:
        rank = ranks_of(emulator, 2)[1]
        with contextlib.suppress(psutil.NoSuchProcess):
            while not done.wait(0.8):
                rank.suspend()
                time.sleep(stopped)
                rank.resume()

    thread = threading.Thread(target=hinder)
    thread.start()
    steps = emulator.run(emulation, steps=3)
    done.set()
    thread.join()
    assert max(step.seconds for step in steps) >= predicted(emulation).seconds + stopped / 2


# ---- ends ----------------------------------------------------------------------------------------------------------


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.parametrize(
    ("how", "end"),
    [(signal.SIGKILL, r"rank 1\n.*exit code -9"), (signal.SIGINT, r"rank 1\n(.*\n)*.*KeyboardInterrupt")],
)
def test_a_failed_rank_ends_all_in_seconds_and_the_next_emulation_runs(emulator: Emulator, how: int, end: str) -> None:
    ranks: list[psutil.Process] = []
    failed_at = 0.0

    def fail() -> None:
        nonlocal failed_at
        ranks.extend(ranks_of(emulator, 2))
        time.sleep(1.0)
        failed_at = time.monotonic()
        ranks[1].send_signal(how)

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(EmulationFailed, match=end):
        emulator.run(two_ranks(microbatches=50), steps=20)
    thread.join()
    assert time.monotonic() - failed_at < 10
    assert gone(ranks, 1.0)
    assert executed_error(emulator, two_ranks(), within=0.04) <= 0.1


CALLER = """
from smpar.emulate import Emulation, Emulator
from smpar.planner.pipeline import Pipeline
with Emulator() as emulator:
    print(emulator.pid, flush=True)
    emulator.run(Emulation("1f1b", 50, (Pipeline((0, 1), (0.02,) * 2, (0.04,) * 2, (0.0,) * 2, (1, 1)),)), steps=20)
"""


def test_a_killed_or_interrupted_caller_takes_all_along() -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CALLER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    with start() as killed, start() as interrupted:
        everyone = []
        for caller in (killed, interrupted):
            assert caller.stdout is not None
            host = psutil.Process(int(caller.stdout.readline()))
            while len(host.children()) < 2:
                time.sleep(0.02)
            everyone += [host, *host.children()]
        killed.kill()
        interrupted.send_signal(signal.SIGINT)
        assert gone(everyone, 5.0)


def test_an_emulation_that_takes_too_long_is_given_up(emulator: Emulator) -> None:
    with pytest.raises(EmulationFailed, match="did not end within 1 s"):
        emulator.run(two_ranks(microbatches=50), steps=20, limit=1.0)


# ---- numbers that mean nothing ---------------------------------------------------------------------------------------


def test_numbers_that_contradict_each_other_are_refused(emulator: Emulator) -> None:
    plan = two_ranks()
    (pipeline,) = plan.pipelines
    other = replace(pipeline, ranks=(1, 0))
    for wrong in (
        lambda: replace(plan, pipelines=()),
        lambda: replace(plan, microbatches=0),
        lambda: replace(plan, pipelines=(pipeline, other), reduction=(0.1, 0.1)),
        lambda: replace(plan, pipelines=(pipeline, pipeline)),
        lambda: replace(plan, optimizer=(0.1,)),
        lambda: replace(plan, optimizer=(0.1, float("nan"))),
        lambda: replace(plan, reduction=(0.1, 0.1), tied=(Tied((0, 2), 0.1),)),
        lambda: replace(plan, tied=(Tied((0, 1), 0.1),)),
        lambda: plan.scaled(0.0),
        lambda: replace(plan, pipelines=(replace(pipeline, ranks=(0, 2)),)),
        lambda: emulator.run(plan, steps=0),
    ):
        with pytest.raises(EmulationError):
            wrong()
