"""The process that the ranks of emulations are forked from: it has imported torch, has no threads, and watches them.

    caller ── emulation ──▶ host ── forks ──▶ rank 0, rank 1, ...      ready in some 0.1 s, torch being imported
           ◀── steps ──────      ◀── what each saw ──

Whoever of them ends takes the others along. The caller's end closes its connection to the host, which kills the ranks;
the host's end closes a pipe that every rank's thread listens to; and a rank's end is seen by the host, which lets the
others say what they make of it before it kills them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from smpar.comm.world import World
from smpar.config import Config
from smpar.emulate.clock import be_prompt
from smpar.emulate.emulation import Emulation, Step
from smpar.emulate.job import Failure, Job
from smpar.emulate.rank import Rank
from smpar.errors import PeerFailed
from smpar.schedule import Timed

GRACE = 6.0  # s that the other ranks get to end, too, after the first one failed


_Seen = list[tuple[float, list[Timed]]]  # of one rank: each step's end and actions


class _CallerGone(Exception):
    """There is nobody to work for any more."""


def serve(fd: int) -> None:
    """The host's life: jobs, one after the other, until the caller hangs up."""
    caller = Connection(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what an interrupt means, and closes
    try:
        while True:
            job: Job = caller.recv()
            caller.send(_perform(job, caller))
    except (EOFError, OSError, _CallerGone):
        return


def _perform(job: Job, caller: Connection) -> tuple[Step, ...] | Failure:
    emulation = job.emulation
    assert emulation.orders  # made here once, not by each rank
    context = multiprocessing.get_context("fork")
    port = _port()
    listens, life = os.pipe()
    ranks: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        for rank in range(emulation.processes):
            process: BaseProcess
            ours, theirs = context.Pipe()
            environment = _environment(rank, emulation.processes, port)
            closes = (life, caller.fileno(), *(conn.fileno() for conn in ranks), ours.fileno())
            process = context.Process(
                target=_live, args=(job, theirs, listens, closes, environment), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            ranks[ours] = rank, process
        return _gather(job, ranks, caller)
    finally:
        for conn, (_, process) in reversed(
            ranks.items()
        ):  # rank 0, which serves the store, last: others would complain
            process.kill()
            process.join()
            conn.close()
        os.close(listens)
        os.close(life)


def _gather(
    job: Job, ranks: Mapping[Connection, tuple[int, BaseProcess]], caller: Connection
) -> tuple[Step, ...] | Failure:
    seen: dict[int, _Seen] = {}
    failures: list[tuple[bool, Failure]] = []  # whether it is a consequence of another
    waiting = set(ranks)
    deadline = time.monotonic() + job.limit
    while waiting:
        ready = wait([*waiting, caller], max(0.0, deadline - time.monotonic()))
        if caller in ready:
            raise _CallerGone
        if not ready:
            missing = ", ".join(ranks[conn][1].name for conn in waiting)
            failures.append((bool(failures), Failure(missing, f"did not end within {job.limit:.0f} s")))
            break
        for conn in ready:
            assert isinstance(conn, Connection)
            rank, process = ranks[conn]
            waiting.discard(conn)
            try:
                told: _Seen | tuple[bool, str] = conn.recv()
            except (EOFError, OSError):
                process.join(1.0)
                told = False, f"ended with exit code {process.exitcode}"
            if isinstance(told, tuple):
                failures.append((told[0], Failure(process.name, told[1])))
                deadline = min(deadline, time.monotonic() + GRACE)
            else:
                seen[rank] = told
    if failures:
        return min(failures, key=lambda failure: failure[0])[1]
    return tuple(_step(job.emulation, seen, number) for number in range(job.steps))


def _step(emulation: Emulation, seen: Mapping[int, _Seen], number: int) -> Step:
    ends, actions = [], []
    for replica in range(emulation.replicas):
        mine = [seen[replica * emulation.size + rank][number] for rank in range(emulation.size)]
        ends.append(tuple(end for end, _ in mine))
        timeline = [timed for _, timeline in mine for timed in timeline]
        actions.append(tuple(sorted(timeline, key=lambda timed: (timed.start, timed.rank, timed.end))))
    return Step(tuple(ends), tuple(actions))


# ---- in a rank's process ---------------------------------------------------------------------------------------


def _live(job: Job, conn: Connection, listens: int, closes: tuple[int, ...], environment: Mapping[str, str]) -> None:
    """A rank's life: it tells what it saw, or (whether another failed before, its traceback)."""
    for fd in closes:
        os.close(fd)  # else the ends of others would not be seen while this process lives
    signal.signal(signal.SIGINT, signal.default_int_handler)  # with which the failure watch interrupts a long kernel
    threading.Thread(target=_end_with_host, args=(listens,), name="smpar-host-watch", daemon=True).start()
    os.environ.update(environment)
    try:
        world = World.open(Config.from_dict({"pipeline_parallel_degree": job.emulation.size}))
        with world.guard():
            rank = Rank(job.emulation, world)
            be_prompt()
            seen = [rank.step() for _ in range(job.steps)]
        conn.send(seen)
        world.close()
    except BaseException as error:
        conn.send((isinstance(error, PeerFailed), "".join(traceback.format_exception(error)).rstrip()))


def _end_with_host(listens: int) -> None:
    os.read(listens, 1)  # nothing is ever written: this returns when the host has ended, and its end of the pipe
    os._exit(1)


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What `World.open` reads of a launcher's variables: all ranks on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _port() -> int:
    """A free port, below those that the system gives to connections, which might take it before rank 0 does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
