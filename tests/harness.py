"""Runs a function on several ranks, in worker processes that start once for the whole test session.

    pytest ── asks ──▶ fork server ── forks ──▶ worker 0 ┐
       │             (imports torch once,       worker 1 ├─ one per rank, kept from call to call
       │              never runs an operation)  worker 2 ┘
       └───────── (function, arguments), torchrun's environment ─────────▶ result or traceback

The pytest process may use torch as it likes: workers are forked from the server, which has no threads.
A call that fails in any way costs its workers; the next call gets new ones, in some 10 ms each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing as mp
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
GRACE = 15.0  # seconds that the other ranks get to end, too, after the first one failed
Kind = Literal["result", "error", "killed", "timeout"]


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank.

    Attributes:
        kind: ``result``; ``error`` (an exception); ``killed`` (the process died); ``timeout`` (it had to be killed).
        value: what the function returned.
        error: class name of the exception.
        text: traceback; for ``killed`` the exit code; for ``timeout`` the stacks of the process.
        seconds: from the start of the call to its end on this rank, shutdown included.
    """

    kind: Kind
    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        head = f"{self.kind} {self.error}".strip()
        return f"{head} after {self.seconds:.1f} s\n{self.text}" if self.text else f"{head} after {self.seconds:.1f} s"


class RanksFailed(AssertionError):
    """At least one rank of a call did not return; the message holds every rank's end."""

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        ends = "\n".join(f"--- rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))
        super().__init__(f"{what} on {len(outcomes)} ranks\n{ends}")


@dataclass(frozen=True)
class _Job:
    """A call for one rank; the function travels pickled so that a broken import is that rank's error, too."""

    environment: dict[str, str]
    payload: bytes


# ---- in the worker ---------------------------------------------------------------------------------------------


def _work(conn: Connection, stacks: str, single: bool) -> None:
    """A worker's life: calls, one after the other, until the pool hangs up (or one call if ``single``)."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # a collection walks what this process made, not the million objects that the server imported
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                job: _Job = pickle.loads(conn.recv_bytes())
            except EOFError:
                return
            os.environ.update(job.environment)
            outcome = _call(job)
            if single:  # its end is the process's end: the caller waits for both
                conn.send_bytes(pickle.dumps(outcome))
                _shutdown()
                return
            try:
                _shutdown()
            except Exception as error:
                if outcome.kind == "result":
                    outcome = _error(error, "in shutdown, after the function had returned\n")
            conn.send_bytes(pickle.dumps(outcome))
            del outcome, job
            gc.collect()


def _call(job: _Job) -> Outcome:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        fn, args = pickle.loads(job.payload)
        value = fn(*args)
        pickle.dumps(value)  # a result that cannot travel is this call's error
        outcome = Outcome("result", value)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        outcome = _error(error)
    return replace(outcome, seconds=time.perf_counter() - start)


def _error(error: BaseException, note: str = "") -> Outcome:
    return Outcome("error", error=type(error).__name__, text=note + "".join(traceback.format_exception(error)).rstrip())


def _shutdown() -> None:
    """Leaves a process that can ``init`` again."""
    if (smpar := sys.modules.get("smpar")) is not None:
        getattr(smpar, "shutdown", lambda: None)()
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# ---- in pytest -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _fork_server_environment() -> Iterator[None]:
    """The server is a new interpreter: it finds the tests by PYTHONPATH and must not start OpenMP threads."""
    before = dict(os.environ)
    path = os.environ.get("PYTHONPATH")
    os.environ.update(
        PYTHONPATH=str(ROOT) + (os.pathsep + path if path else ""),
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        # torch looks up the name of every address it connects to; where no name server answers, that takes 5 s each
        RES_OPTIONS="timeout:1 attempts:1",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, context: Any, folder: str, number: int, single: bool) -> None:
        self._stacks = Path(folder) / f"stacks.{number}"
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, str(self._stacks), single), daemon=True)
        self.process.start()
        theirs.close()  # else the pipe would stay open when the worker dies

    def stacks(self) -> str:
        """Where every thread of the process is now."""
        if not self._stacks.exists() or not self.process.is_alive():
            return "no stack: the process had not started or was gone"
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(50):
            time.sleep(0.02)
            if (text := self._stacks.read_text()).count("\n") > 1:
                return text
        return "no stack: the process did not answer"

    def end(self) -> None:
        self.conn.close()
        self.process.kill()
        self.process.join()


class Pool:
    """Worker processes that wait for calls; as many as the largest world so far."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="smpar-tests-")
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()
        self._ports = itertools.cycle(range(20_000, 32_000))  # below the range that connections take theirs from
        for _ in range(random.SystemRandom().randrange(12_000)):  # two sessions on one machine start apart
            next(self._ports)

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls the module-level ``fn(*args)`` on ranks 0 .. world_size - 1 and returns their results.

        ``smpar.shutdown()`` ends the call on every rank. Raises RanksFailed if any rank raised, died, or was not
        done after ``timeout`` seconds.
        """
        outcomes = self.attempt(world_size, fn, *args, timeout=timeout)
        if any(outcome.kind != "result" for outcome in outcomes):
            raise RanksFailed(f"{fn.__module__}.{fn.__qualname__}", outcomes)
        return [outcome.value for outcome in outcomes]

    def attempt(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """As ``run``, but reports how each rank ended, for tests that expect errors."""
        while len(self._workers) < world_size:
            self._workers.append(self._start(single=False))
        workers = self._workers[:world_size]
        outcomes = self._perform(workers, fn, args, timeout)
        if any(outcome.kind != "result" for outcome in outcomes):  # nobody knows what state they are in
            for worker in workers:
                worker.end()
            self._workers[:world_size] = [self._start(single=False) for _ in workers]
        return outcomes

    def run_fresh(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Outcome]:
        """As ``attempt``, in processes of their own, whose end counts: ``seconds`` includes leaving the process,
        and a process that answers but does not end is a ``timeout``. For faults: ranks killed, hung, gone."""
        workers = [self._start(single=True) for _ in range(world_size)]
        try:
            start = time.perf_counter()
            outcomes = self._perform(workers, fn, args, timeout)
            return [self._left(w, o, start, start + timeout) for w, o in zip(workers, outcomes, strict=True)]
        finally:
            for worker in workers:
                worker.end()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._folder.cleanup()

    def _start(self, single: bool) -> _Worker:
        modules = sorted(m for m in sys.modules if m.startswith("tests.") and not m.split(".")[-1].startswith("test_"))
        self._context.set_forkserver_preload(["tests.preload", *(m for m in modules if not m.endswith(".conftest"))])
        with _fork_server_environment():
            return _Worker(self._context, self._folder.name, next(self._numbers), single)

    def _port(self) -> int:
        for port in self._ports:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
        raise AssertionError("unreachable: the ports cycle")

    def _perform(
        self, workers: Sequence[_Worker], fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[Outcome]:
        """Sends the call to all workers and gathers their ends."""
        payload, port, start = pickle.dumps((fn, args)), self._port(), time.perf_counter()
        for rank, worker in enumerate(workers):
            job = _Job(torchrun_environment(rank, len(workers), port), payload)
            with contextlib.suppress(OSError):  # a dead worker shows below, as killed
                worker.conn.send_bytes(pickle.dumps(job))
        ends: dict[int, Outcome] = {}
        deadline = start + timeout
        while len(ends) < len(workers):
            waiting = {worker.conn: rank for rank, worker in enumerate(workers) if rank not in ends}
            ready = wait(list(waiting), max(0.0, deadline - time.perf_counter()))
            if not ready:
                break
            for conn in ready:
                rank, seconds = waiting[conn], time.perf_counter() - start
                try:
                    ends[rank] = replace(pickle.loads(conn.recv_bytes()), seconds=seconds)  # type: ignore[union-attr]
                except (EOFError, OSError):
                    workers[rank].process.join(1.0)
                    ends[rank] = Outcome("killed", text=f"exit code {workers[rank].process.exitcode}", seconds=seconds)
                if ends[rank].kind != "result":
                    deadline = min(deadline, time.perf_counter() + GRACE)
        for rank, worker in enumerate(workers):
            if rank not in ends:
                ends[rank] = Outcome("timeout", text=worker.stacks(), seconds=time.perf_counter() - start)
        return [ends[rank] for rank in range(len(workers))]

    @staticmethod
    def _left(worker: _Worker, outcome: Outcome, start: float, deadline: float) -> Outcome:
        """Waits until a single-call process has left, and notes when."""
        if outcome.kind not in ("result", "error"):
            return outcome
        worker.process.join(max(0.1, deadline - time.perf_counter()))
        seconds = time.perf_counter() - start
        if worker.process.exitcode is None:
            text = f"answered, then did not end:\n{worker.stacks()}\nits answer: {outcome}"
            return replace(outcome, kind="timeout", text=text, seconds=seconds)
        return replace(outcome, seconds=seconds)


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
