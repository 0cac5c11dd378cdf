"""All ranks stop together: the first failure is posted once, and every rank's waits end.

    rank 2 raises                 store                       rank 0 waits for rank 1, rank 1 for rank 2
    ─────────────                 ─────                       ──────────────────────────────────────────
    guard: post ───────────────▶  abort = {rank 2, trace}
           cut connections ─────────────────────────────────▶ rank 1's wait raises; translate reads `abort`
           re-raise               ◀── watch threads, 5 x/s ─── rank 0 (not connected to any wait of rank 2) reads
                                                              `abort`, cuts its own connections: its wait raises
                                                              both raise PeerFailed(rank=2, trace=...)

A rank that is killed posts nothing: its connections end and its heartbeat in the store stops, which together tell who
it was, to those who wait for it and to the rank before it, which looks after it. Either alone proves nothing: a thread
may be starved by a long call, and a rank that is done may go. The host of the store takes that along, which is proof.

One daemon thread per process does the beating and looking; the main thread only comes here when something raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal, Protocol

import torch.distributed as dist

from smpar.comm.sockets import Connections
from smpar.comm.stall import StallWatch
from smpar.errors import CommError, PeerFailed, SmparError

TICK = 0.2  # s between two looks at the store
BEAT = 0.5  # s between two heartbeats
STALE = 2.0  # s without a beat, and the connection ended: dead
SILENT = 60.0  # s without a beat though the connection stands: dead machine. Long, as a thread may be starved
DOUBT = 4.0  # s after which a broken connection that nothing explains is reported as just that
GRACE = 3.0  # s that a rank may go on computing after another failed, before it is interrupted
LINGER = 2.0  # s that the store's host waits for others to read the reason

# what torch.distributed's plain RuntimeErrors say when a transfer fails under gloo
GLOO_MARKS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "[gloo]")


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Reason:
    """Why all ranks stop. ``rank`` is -1 where it could not be told."""

    rank: int
    kind: Literal["raised", "died", "left", "broken"]
    what: str
    trace: str = ""

    def error(self) -> PeerFailed:
        """What the other ranks raise."""
        if self.kind == "raised":
            values = f"rank {self.rank} raised {self.what}\n{_indent(self.trace)}"
            fix = f"see rank {self.rank}'s traceback above; then start all ranks again"
        elif self.kind == "died":
            values = f"rank {self.rank} died ({self.what})"
            fix = f"look at the end of rank {self.rank}'s log; a killed process is often one out of memory"
        elif self.kind == "left":
            values = f"rank {self.rank} {self.what}"
            fix = "call every collective, message and step on all ranks of the group, the same number of times"
        else:
            values = self.what
            fix = "check the network between the ranks"
        return PeerFailed("all ranks of a job must go on; one did not, so all stop", values, fix, self.rank, self.trace)


def _indent(text: str) -> str:
    return "\n".join("    | " + line for line in text.rstrip().splitlines())


def is_comm_error(error: BaseException | None) -> bool:
    """Whether a transfer's failure is at the root of this error, hence a peer may have caused it."""
    for _ in range(16):  # chains are short; a bound guards against cycles
        if error is None:
            return False
        if isinstance(error, (CommError, dist.DistError, PeerFailed)):
            return True
        if isinstance(error, RuntimeError) and any(mark in str(error) for mark in GLOO_MARKS):
            return True
        error = error.__cause__ or error.__context__
    return False


class FailureWatch:
    """Stops this rank when another fails, and the others when this one does.

    Args:
        store: this watch's own client of a store that all ranks share, under a prefix not used before.
        rank, size: this process and the number of them.
        connections: what to cut.
        store_host: the rank whose process serves the store; None if another process does.
        abort_devices: ends the device communicators (NCCL) that `connections` does not hold.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        connections: Connections,
        store_host: int | None = 0,
        abort_devices: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._rank, self._size, self._host = store, rank, size, store_host
        self._connections, self._abort_devices = connections, abort_devices
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reason: Reason | None = None
        self._known = threading.Event()
        self._wake = threading.Event()
        self._stopping = False
        self._suspicious = False
        self._guarded = 0  # identity of the thread inside guard()
        self._kicked = False
        self._lingered = False
        self._beats = 0
        self._store_answers = True
        self._thread: threading.Thread | None = None
        self._old_hook: Callable[..., object] | None = None

    @property
    def reason(self) -> Reason | None:
        """Why all ranks stop; None as long as none has failed."""
        return self._reason

    # -- life

    def start(self) -> None:
        """First heartbeat, then the thread. All ranks must have started before any of them may be suspected."""
        self._tell("ends", json.dumps(sorted(self._connections.own_ends())))
        self._beat()
        self._thread = threading.Thread(target=self._run, name="smpar-failure-watch", daemon=True)
        self._thread.start()
        self._old_hook, sys.excepthook = sys.excepthook, self._excepthook

    def close(self, patience: float = 60.0) -> None:
        """Says good-bye and ends the thread. The store's host stays until the others have left, at most `patience` s.

        Without failure this is the only place where a rank waits for another.
        """
        if self._thread is None:
            return
        if sys.excepthook == self._excepthook and self._old_hook is not None:
            sys.excepthook = self._old_hook
        if os.getpid() == self._pid:
            self._tell("left", "1")
            if self._host == self._rank and self._reason is None:
                self._await("left", patience)
            if self._reason is not None:
                self._linger()
            self._stopping = True
            self._wake.set()
            self._thread.join(timeout=5.0)
        self._thread = None

    # -- used by the rank's own code

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """A region in which this rank's exception stops all ranks, and another's failure raises PeerFailed here.

        Raises:
            PeerFailed: another rank raised, died or left.
        """
        if self._guarded:  # nested: the outer one does it
            yield
            return
        self._refuse()
        self._guarded = threading.get_ident()
        try:
            yield
        except BaseException as error:
            kicked = self._end_guard() and isinstance(error, KeyboardInterrupt)
            if kicked or is_comm_error(error):
                peer = self.translate(error)
                if peer is not error:
                    raise peer from error
            else:
                self.fail(error)
            raise
        finally:
            self._end_guard()

    @contextlib.contextmanager
    def translating(self) -> Iterator[None]:
        """As `guard` for transfers only: an exception of this rank's own passes and stops nobody."""
        self._refuse()
        try:
            yield
        except Exception as error:
            if not is_comm_error(error):
                raise
            peer = self.translate(error)
            if peer is error:
                raise
            raise peer from error

    def _refuse(self) -> None:
        """After a failure that the user's code handled: its connections are cut, also those of the rank that failed."""
        if self._reason is not None:
            raise self._reason.error()

    def fail(self, error: BaseException) -> None:
        """Posts this rank's failure, if it is the first, and ends its connections so that its peers wake."""
        if os.getpid() != self._pid:  # a forked helper must not stop the job
            return
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        said = error.values if isinstance(error, SmparError) else error
        what = f"{type(error).__name__}: {said}".split("\n")[0].removesuffix(": ")
        self._post(Reason(self._rank, "raised", what, "".join(lines)))
        self._linger()

    def meet(self, patience: float) -> bool:
        """Whether all ranks come to this call within ``patience`` s; each makes it once, and all get the same answer.

        For work together at the end, where a rank may have left its program in a way that nobody has seen yet.
        """
        self._tell("here", "1")
        end = time.monotonic() + patience
        missing = set(range(self._size))
        try:
            while self._reason is None and self._store_answers:
                missing = {r for r in missing if not self._store.check([f"here/{r}"])}
                verdict = "yes" if not missing else "no" if time.monotonic() >= end else ""
                if verdict or self._store.check(["met"]):  # the first rank to tell a verdict decides
                    return (self._store.compare_set("met", "", verdict or "no") or verdict.encode()) in (b"yes", "yes")
                time.sleep(0.02)
        except RuntimeError:
            pass
        return False

    def translate(self, error: BaseException) -> BaseException:
        """What a failed transfer really means. Takes up to STALE s for a death, DOUBT s at most.

        Returns:
            PeerFailed with the first failing rank's number and traceback; ``error`` itself if this rank was that one.
        """
        if isinstance(error, PeerFailed):
            return error
        if self._reason is None:
            self._suspicious = True
            self._wake.set()
            if not self._known.wait(DOUBT + 2.0):  # the thread decides earlier, unless the store hangs
                self._learn(self._store_lost())
        assert self._reason is not None
        self._linger()
        return error if self._reason.rank == self._rank else self._reason.error()

    # -- the reason

    def _post(self, reason: Reason) -> None:
        mine = json.dumps(asdict(reason))
        try:
            first = self._store.compare_set("abort", "", mine)
        except RuntimeError:
            self._learn(reason)  # the store is gone; cutting the connections still tells the others
        else:
            self._learn(Reason(**json.loads(first or mine)))

    def _learn(self, reason: Reason) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._known.set()
        self._tell("ack", "1")
        self._connections.cut()
        if self._abort_devices is not None:
            threading.Thread(target=self._abort_devices, name="smpar-abort-devices", daemon=True).start()

    def _tell(self, key: str, value: str) -> None:
        """Sets this rank's ``key``; in vain if the store is gone, which `_run` finds and says."""
        if self._store_answers:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{key}/{self._rank}", value)

    def _store_lost(self) -> Reason:
        self._store_answers = False
        if self._host is None or self._host == self._rank:
            return Reason(-1, "broken", "the launcher's key-value store does not answer")
        return Reason(self._host, "died", "the key-value store that it serves is gone")

    def _linger(self) -> None:
        # The reason would go away with its host's process, before others could read it.
        if self._host == self._rank and not self._lingered:
            self._lingered = True
            self._await("ack", LINGER)

    def _await(self, key: str, patience: float) -> None:
        """Waits until all ranks but the dead one have set their ``key``."""
        end = time.monotonic() + patience
        missing = set(range(self._size)) - {self._rank}
        while missing and self._store_answers and time.monotonic() < end and (key == "ack" or self._reason is None):
            if self._reason is not None:
                missing.discard(self._reason.rank)
            try:
                missing = {r for r in missing if not self._store.check([f"{key}/{r}"])}
            except RuntimeError:
                return
            time.sleep(0.02 if missing else 0.0)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        if not is_comm_error(error):
            self.fail(error)
        if self._old_hook is not None:
            self._old_hook(kind, error, trace)

    # -- the thread

    def _run(self) -> None:
        pulses, stall = _Pulses(self._store), StallWatch(self._store, self._rank, self._size)
        next_beat = time.monotonic() + BEAT
        suspected_since = learnt_at = 0.0
        while not self._stopping:
            self._wake.wait(TICK)
            self._wake.clear()
            now = time.monotonic()
            try:
                if self._store_answers and now >= next_beat:
                    self._beat()
                    next_beat = now + BEAT
                    if self._reason is None:
                        self._look_after_next(pulses, now)
                        stall.answer()
                if self._reason is None and self._store.check(["abort"]):
                    self._learn(Reason(**json.loads(self._store.get("abort"))))
                if self._reason is None and not self._suspicious:
                    stall.look(now)
                if self._reason is None and self._suspicious:
                    suspected_since = suspected_since or now
                    self._explain(pulses, now, now - suspected_since)
            except RuntimeError:  # torch's store errors
                self._learn(self._store_lost())
            if self._reason is not None:
                learnt_at = learnt_at or now
                if now - learnt_at > GRACE:
                    self._kick()

    def _beat(self) -> None:
        self._beats += 1
        self._tell("beat", str(self._beats))

    def _look_after_next(self, pulses: _Pulses, now: float) -> None:
        # Each looks after one other only, so that the store's load grows with the ranks, not with their square.
        for step in range(1, self._size):
            rank = (self._rank + step) % self._size
            if not pulses.left(rank):
                age = pulses.age(rank, now)
                if age >= SILENT or (age >= STALE and self._connection_ended(rank)):
                    self._post(Reason(rank, "died", f"no heartbeat for {age:.1f} s"))
                return

    def _explain(self, pulses: _Pulses, now: float, doubt: float) -> None:
        """A transfer failed ``doubt`` seconds ago, and no rank has said why: who is gone?"""
        others = [r for r in range(self._size) if r != self._rank]
        left = [r for r in others if pulses.left(r)]
        for rank in others:
            age = pulses.age(rank, now)
            if rank not in left and age >= STALE and self._connection_ended(rank) is not False:
                self._post(Reason(rank, "died", f"no heartbeat for {age:.1f} s"))
                return
        if left and doubt >= STALE + BEAT:
            gone = "had left (end of its script, or smpar's close) while others still needed it"
            self._post(Reason(left[0], "left", gone))
        elif doubt >= DOUBT:
            self._post(Reason(-1, "broken", "a connection broke, though all ranks are alive"))

    def _connection_ended(self, rank: int) -> bool | None:
        ends = json.loads(self._store.get(f"ends/{rank}"))
        return self._connections.ended_with({(address, port) for address, port in ends})

    # -- interrupting a rank that computes on

    def _end_guard(self) -> bool:
        with self._lock:
            self._guarded = 0
            return self._kicked

    def _kick(self) -> None:
        """Interrupts a main thread that is still inside guard(): it waits for no peer, so cutting did not help."""
        with self._lock:
            main = threading.main_thread().ident
            if self._kicked or main is None or self._guarded != main:
                return
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return
            self._kicked = True
            signal.pthread_kill(main, signal.SIGINT)


class _Pulses:
    """When each rank's heartbeat last changed, by this process's clock: ranks need no common time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._left: set[int] = set()

    def age(self, rank: int, now: float) -> float:
        """Seconds since the beat of ``rank`` changed, as far as this was looked at."""
        beat = self._store.get(f"beat/{rank}")
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = (beat, now)
        return now - self._seen[rank][1]

    def left(self, rank: int) -> bool:
        """Whether ``rank`` said good-bye."""
        if rank not in self._left and self._store.check([f"left/{rank}"]):
            self._left.add(rank)
        return rank in self._left
