"""One rank fails: every other one stops within seconds and names it, whatever it was doing.

rank 0        rank 1         rank 2          rank 3
waits for 1 ─▶ waits for 2 ─▶ fails           computes, or waits in a collective
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smpar.comm import messages
from smpar.comm.channels import GlooChannels
from smpar.comm.failure import FailureWatch
from smpar.comm.messages import CommGroup, RankType
from smpar.comm.world import World, set_current
from smpar.config import Config
from smpar.errors import CommError, PeerFailed
from tests.harness import ROOT, Outcome, Pool, torchrun_environment

LIMIT = 10.0  # s, the promise
AIM = 3.0  # s, what a failure that leaves a traceback should take, on a loaded machine


class Boom(Exception):
    pass


def start(size: int = 4) -> World:
    world = World.open(Config.from_dict({"partitions": size}))
    set_current(world)
    messages.barrier()
    return world


def report(error: PeerFailed, since: float) -> dict[str, Any]:
    return {"rank": error.rank, "text": str(error), "trace": error.trace, "seconds": time.monotonic() - since}


def block(world: World, how: str) -> None:
    """Waits for rank 2 in one of the ways that the runtime waits; rank 0 only by way of rank 1."""
    if how == "chain":
        channels = GlooChannels(world)
        if world.rank == 3:
            for _ in range(10_000):  # computes, and only then communicates
                torch.ones(100).sum()
            channels.send(2, torch.ones(1_000_000))
            channels.finish()
        else:
            channels.post_recv(world.rank + 1, torch.empty(3)).wait()
    elif how == "reduction":
        dist.all_reduce(torch.ones(5), group=world.process_group("world"))
    elif how == "message":
        messages.recv_from(2, RankType.WORLD_RANK)
    elif how == "gather":
        messages.allgather("x", CommGroup.WORLD)
    elif how == "sleep":  # in Python and in no transfer: nothing to cut
        while True:
            time.sleep(60.0)


def waits(how: str, failing: int, fault: str) -> dict[str, Any] | str:
    world = start()
    since = time.monotonic()
    try:
        with world.guard():
            if world.rank == failing:
                time.sleep(0.5)
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "exit":
                    os._exit(3)
                raise Boom("no such luck")
            block(world, how)
        return "went on"
    except PeerFailed as error:
        return report(error, since + 0.5)
    except Boom:
        if fault == "raise and stay":  # its process does not end, so its connections do only if they are cut
            time.sleep(6.0)
        return "own error"
    finally:
        world.close()


def check(outcomes: list[Outcome], failing: int, within: float, word: str) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == failing:
            continue
        assert outcome.kind == "result", (rank, outcome)
        found = outcome.value
        print(f"rank {rank}: {found['seconds']:.2f} s")
        assert found["rank"] == failing, found
        assert word in found["text"], found["text"]
        assert found["seconds"] < within, found


@pytest.mark.parametrize("how", ["chain", "reduction", "message", "gather"])
def test_a_rank_that_raises_stops_all_with_its_traceback(pool: Pool, how: str) -> None:
    outcomes = pool.run_fresh(4, waits, how, 2, "raise")
    assert outcomes[2].value == "own error"
    check(outcomes, 2, AIM, "rank 2 raised Boom: no such luck")
    assert all('raise Boom("no such luck")' in outcomes[r].value["trace"] for r in (0, 1, 3))


@pytest.mark.parametrize("how", ["chain", "reduction"])
def test_a_rank_that_raises_and_lives_on_stops_all(pool: Pool, how: str) -> None:
    outcomes = pool.run_fresh(4, waits, how, 2, "raise and stay")
    assert outcomes[2].seconds > 6.0
    check(outcomes, 2, AIM, "rank 2 raised Boom: no such luck")


@pytest.mark.parametrize(("how", "within"), [("reduction", AIM), ("sleep", LIMIT)])
def test_the_host_of_the_store_that_raises_is_heard_before_it_goes(pool: Pool, how: str, within: float) -> None:
    outcomes = pool.run_fresh(4, waits, how, 0, "raise")
    check(outcomes, 0, within, "rank 0 raised Boom: no such luck")


@pytest.mark.parametrize(("failing", "fault"), [(2, "kill"), (2, "exit"), (0, "kill")])
def test_a_rank_that_is_killed_is_named(pool: Pool, failing: int, fault: str) -> None:
    outcomes = pool.run_fresh(4, waits, "chain" if failing else "reduction", failing, fault)
    assert outcomes[failing].kind == "killed"
    check(outcomes, failing, LIMIT, f"rank {failing} died")


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_rank_that_waits_for_nobody_is_interrupted(pool: Pool, fault: str) -> None:
    outcomes = pool.run_fresh(4, waits, "sleep", 2, fault)
    check(outcomes, 2, LIMIT, "rank 2 ")


def both_raise() -> str:
    world = start(3)
    try:
        with world.guard():
            if world.rank > 0:
                raise Boom(f"of rank {world.rank}")
            block(world, "reduction")
    except Boom as error:
        return str(error)
    except PeerFailed as error:
        return f"heard {error.rank}: {error.trace.rstrip().splitlines()[-1].split('.')[-1]}"
    finally:
        world.close()
    return "went on"


def test_a_rank_with_an_error_of_its_own_keeps_it(pool: Pool) -> None:
    first, *own = pool.run_fresh(3, both_raise)
    assert [o.value for o in own] == ["of rank 1", "of rank 2"]
    assert first.value in ("heard 1: Boom: of rank 1", "heard 2: Boom: of rank 2")


def leaves() -> dict[str, Any] | str:
    world = start(3)
    since = time.monotonic()
    try:
        if world.rank == 1:
            return "left"
        with world.guard():
            block(world, "reduction")
        return "went on"
    except PeerFailed as error:
        return report(error, since)
    finally:
        world.close()


def test_a_rank_that_left_too_early_is_named(pool: Pool) -> None:
    outcomes = pool.run_fresh(3, leaves)
    assert outcomes[1].value == "left"
    check(outcomes, 1, LIMIT, "rank 1 had left")


def own_mistake() -> list[str]:
    world = start(2)
    try:
        if world.rank == 0:
            with contextlib.suppress(Exception), world.translating():
                raise Boom("handled")
            with pytest.raises(CommError):
                messages.send(1, 7, RankType.PP_RANK)
            with pytest.raises(AttributeError), world.translating():
                messages.send(lambda: 0, 1, RankType.PP_RANK)
        messages.barrier()
        with world.guard(), world.guard():
            return messages.allgather(f"alive {world.rank}", CommGroup.WORLD)
    finally:
        world.close()


def test_a_mistake_that_the_user_handles_stops_nobody(pool: Pool) -> None:
    for outcome in pool.run_fresh(2, own_mistake):
        assert outcome.value == ["alive 0", "alive 1"], outcome


def holds_the_interpreter(seconds: int) -> bool:
    """A long C call that keeps the GIL stops the heartbeat, and must not be taken for death."""
    world = start(2)
    try:
        with world.guard():
            if world.rank == 1:
                ctypes.PyDLL(None).sleep(seconds)
            messages.barrier()
            return True
    finally:
        world.close()


def test_a_busy_rank_is_not_called_dead(pool: Pool) -> None:
    outcomes = pool.run_fresh(2, holds_the_interpreter, 6)
    assert [o.value for o in outcomes] == [True, True], outcomes
    assert min(o.seconds for o in outcomes) > 5.5


def one_left_one_is_busy(seconds: int) -> Any:
    """Rank 2 is done and goes, which ends connections; rank 1 misses its heartbeats; both are in order."""
    world = start(3)
    try:
        if world.rank == 2:
            return None
        with world.guard():
            if world.rank == 1:
                ctypes.PyDLL(None).sleep(seconds)
                return messages.send("all is well", 0, RankType.WORLD_RANK)
            return messages.recv_from(1, RankType.WORLD_RANK)
    finally:
        world.close()


def test_a_rank_that_left_does_not_make_others_look_dead(pool: Pool) -> None:
    outcomes = pool.run_fresh(3, one_left_one_is_busy, 6)
    assert [o.value for o in outcomes] == ["all is well", None, None], outcomes


def threads_and_hooks() -> tuple[int, int, bool]:
    world = start(2)
    during = sum(t.name.startswith("smpar") for t in threading.enumerate())
    world.close()
    world.close()
    after = sum(t.name.startswith("smpar") for t in threading.enumerate())
    return during, after, type(getattr(sys.excepthook, "__self__", None)) is FailureWatch


def test_nothing_stays_behind(pool: Pool) -> None:
    assert pool.run(2, threads_and_hooks) == [(1, 0, False)] * 2


SCRIPT = """
import os, torch, torch.distributed as dist
from smpar.comm.world import World
from smpar.comm import messages
from smpar.config import Config
world = World.open(Config.from_dict({"partitions": 3}))
if world.rank == 1:
    undefined_name
with world.guard():
    dist.all_reduce(torch.ones(3))
"""


def test_an_uncaught_exception_anywhere_in_a_script_stops_all(pool: Pool) -> None:
    port = pool._port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONPATH": str(ROOT), **torchrun_environment(rank, 3, port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        texts = [p.communicate(timeout=60)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [1, 1, 1]
    for text in texts:
        assert "name 'undefined_name' is not defined" in text
    assert all("rank 1 raised NameError" in texts[r] for r in (0, 2))
