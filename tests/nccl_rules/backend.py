"""A backend of torch.distributed that treats CPU tensors as NCCL treats a GPU's, over gloo.

    host        pg.send(a, 1) ─┐ returns at once; wait() waits
                pg.recv(b, 1) ─┤
    queue       [send, recv, ...]       one per communicator, strictly in order
    one thread  head: tell the peers what I do ◀──▶ hear what they do ── equal? ──▶ move the data ── done ──▶ next

* No tags, nothing buffered: a send is done when the matching receive has its data.
* An operation that nobody matches blocks all behind it; one that the peer answers by another is an error naming both.
* The first operation of a communicator blocks the host until all its ranks come to their first: NCCL connects then.
* A receive's memory holds NaN until it is done, and what is sent is read when its turn comes, not before; to change
  it meanwhile is an error. (On a GPU both would be races.)
* Where nothing goes on for `patience()` seconds, all ranks fail, and the error shows every rank's queues.

A rank waits here with its host, where under NCCL only its stream waits. As an operation starts no earlier than what
its stream had to do before it was asked for, both give the same order of who waits for whom.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.nccl_rules.calls import Call, fit, refusal, sizes

BACKEND = "nccl_rules"
HEADER = 512  # bytes in which an operation is described
EVER = timedelta(minutes=10)
HEAD_TAG, DATA_TAG = 1, 2


class RuleBroken(RuntimeError):
    """What NCCL would answer by hanging, by wrong data, or by an error."""


def patience() -> float:
    """Seconds without progress after which the job counts as deadlocked."""
    return float(os.environ.get("NCCL_RULES_PATIENCE", "20"))


class Operation(dist._Work):
    """One operation in a communicator's queue."""

    def __init__(self, call: Call, tensors: Sequence[torch.Tensor], move: Callable[[], None]) -> None:
        super().__init__()
        self.call, self.tensors = call, list(tensors)
        self.move: Callable[[], None] | None = move
        self.since = time.monotonic()
        self._versions = [t._version for t in tensors]
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def check_unchanged(self) -> None:
        if self.call.kind == "send" and [t._version for t in self.tensors] != self._versions:
            raise RuleBroken(f"{self.call}: the tensor was changed before it was sent")

    def finish(self, error: Exception | None = None) -> None:
        if self._done.is_set():
            return
        self._error = error
        self.move = None  # memory must not seem in use when `wait` has returned
        if self.call.kind == "send":
            self.tensors = []
        self._done.set()
        if error is None:
            self._future.set_result(self.tensors)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise RuleBroken(str(self._error)) from self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self.tensors


class Communicator(dist.ProcessGroup):
    """A process group whose operations follow the rules."""

    def __init__(self, store: dist.Store, rank: int, size: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stub knows one of three forms
        self._ranks = list(ranks)
        self._me = self._ranks[rank]
        self._number = name
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, EVER)
        self._met = False
        self._failed: Exception | None = None
        self._pending: deque[Operation] = deque()  # the head is under way
        self._todo: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"nccl-rules-{name}", daemon=True)
        self._thread.start()
        self._watch = watch()
        self._watch.add(self)

    # -- what torch.distributed calls

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Operation:  # type: ignore[override]
        (tensor,) = tensors
        call = Call("send", self._me, self._ranks[dst], sizes(tensors))
        return self._ask(call, tensors, lambda: _done(self._gloo.send([_bytes(tensor)], dst, DATA_TAG)))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Operation:  # type: ignore[override]
        (tensor,) = tensors
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            with torch.no_grad():
                tensor.detach().fill_(float("nan"))
        call = Call("recv", self._me, self._ranks[src], sizes(tensors))
        return self._ask(call, tensors, lambda: _done(self._gloo.recv([_bytes(tensor)], src, DATA_TAG)))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Operation:  # type: ignore[override]
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        name = next(n for n in ("SUM", "AVG", "MAX", "MIN", "PRODUCT") if op == getattr(dist.ReduceOp, n))

        def move() -> None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM if name == "AVG" else op
            for tensor in tensors:
                _done(self._gloo.allreduce([tensor], options))
                if name == "AVG":
                    tensor.div_(self.size())

        return self._ask(Call("allreduce", self._me, None, sizes(tensors), name), tensors, move)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Operation:  # type: ignore[override]
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Operation:  # type: ignore[override]
        if isinstance(tensors, torch.Tensor):  # the short form: a tensor and the root's rank
            tensors = [tensors]
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0

        def move() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            for tensor in tensors:
                _done(self._gloo.broadcast([_bytes(tensor)], options))

        detail = f"from rank {self._ranks[root]}"
        return self._ask(Call("broadcast", self._me, None, sizes(tensors), detail), tensors, move)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Operation:
        (mine,), (parts,) = inputs, outputs
        return self._ask(
            Call("allgather", self._me, None, sizes(inputs)),
            [mine, *parts],
            lambda: _done(self._gloo.allgather([parts], [mine])),
        )

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Operation:
        parts = list(output.view(-1).split(given.numel()))
        return self.allgather([parts], [given.view(-1)])

    def barrier(self, opts: Any = None) -> Operation:  # type: ignore[override]
        return self._ask(Call("barrier", self._me, None), [], lambda: None)

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        """Ends the thread, after what is queued."""
        self._todo.put(None)
        if self._failed is None:
            self._thread.join(timeout=2.0)
        self._watch.drop(self)

    abort = shutdown

    # -- the queue

    def _ask(self, call: Call, tensors: Sequence[torch.Tensor], move: Callable[[], None]) -> Operation:
        if (why := refusal(list(tensors))) is not None:
            raise RuleBroken(f"{call}: {why}")
        if not self._met:
            self._met = True
            self._queue(Operation(Call("connect", self._me, None), [], lambda: None)).wait()
        return self._queue(Operation(call, tensors, move))

    def _queue(self, operation: Operation) -> Operation:
        if self._failed is not None:
            operation.finish(self._failed)
            return operation
        self._pending.append(operation)
        self._todo.put(operation)
        return operation

    def _run(self) -> None:
        while (operation := self._todo.get()) is not None:
            operation.since = time.monotonic()
            try:
                if self._failed is not None:
                    raise self._failed
                self._meet(operation.call)
                assert operation.move is not None
                operation.move()
                operation.check_unchanged()
            except Exception as error:
                self.fail(error)
            else:
                self._pending.popleft()
                operation.finish()
            del operation

    def _meet(self, mine: Call) -> None:
        """Tells the others of this operation what it is, and hears what they are at."""
        peers = [mine.peer] if mine.peer is not None else [r for r in self._ranks if r != self._me]
        text = json.dumps(asdict(mine)).encode().ljust(HEADER)
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        answers = {peer: torch.empty_like(header) for peer in peers}
        works = [self._gloo.recv([t], self._ranks.index(peer), HEAD_TAG) for peer, t in answers.items()]
        works += [self._gloo.send([header], self._ranks.index(peer), HEAD_TAG) for peer in peers]
        for work in works:
            work.wait()
        for answer in answers.values():
            read = json.loads(bytes(answer.tolist()))
            theirs = Call(**{**read, "tensors": tuple(read["tensors"])})
            if not fit(mine, theirs):
                raise RuleBroken(f"on {self}: {mine}, but {theirs}")

    def fail(self, error: Exception) -> None:
        """Nothing goes through any more; all that is queued ends with the error."""
        self._failed = self._failed or self._watch.deadlock or error
        for operation in list(self._pending):
            operation.finish(self._failed)

    def stuck_since(self) -> float | None:
        """When the operation under way started; None if there is none."""
        if self._failed is not None:
            return None
        try:
            return self._pending[0].since
        except IndexError:
            return None

    def state(self) -> str:
        """The queue, head first; empty if nothing is queued."""
        waiting = [str(operation.call) for operation in list(self._pending)]
        more = f" | {len(waiting) - 4} more" if len(waiting) > 4 else ""
        return f"{self}: {' | '.join(waiting[:4])}{more}" if waiting else ""

    def __str__(self) -> str:
        name = self.group_desc if self.group_desc not in ("", "undefined") else f"ranks {self._ranks}"
        return f"communicator {self._number} ({name})"


class Watch:
    """Looks whether this process's queues go on; if those of any rank do not, tells what all ranks have queued."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self.store = store
        self._rank, self._size = rank, size
        self._client = dist.PrefixStore("nccl rules", store.clone())  # type: ignore[attr-defined]
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.deadlock: RuleBroken | None = None  # once one is known, it is the reason for whatever breaks then
        threading.Thread(target=self._run, name="nccl-rules-watch", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def add(self, communicator: Communicator) -> None:
        with self._lock:
            self._communicators.add(communicator)

    def drop(self, communicator: Communicator) -> None:
        with self._lock:
            self._communicators.discard(communicator)
            if not self._communicators:  # before the store goes: the host of it may leave first
                self.end()

    def end(self) -> None:
        self._over.set()

    def _all(self) -> list[Communicator]:
        with self._lock:
            return list(self._communicators)

    def _run(self) -> None:
        try:
            while not self._over.wait(0.1):
                since = [s for c in self._all() if (s := c.stuck_since()) is not None]
                if since and time.monotonic() - min(since) > patience():
                    self._client.set("stuck", "1")
                if self._client.check(["stuck"]):
                    self._tell()
                    return
        except RuntimeError:  # the store is gone: the job has ended
            return

    def _tell(self) -> None:
        states = [state for c in self._all() if (state := c.state())]
        end = time.monotonic() + 5.0
        self._client.set(f"queues {self._rank}", "\n".join(f"    {state}" for state in sorted(states)))
        lines = [f"deadlock: an operation had no match for {patience():g} s. Queues, head first:"]
        for rank in range(self._size):
            key = f"queues {rank}"
            text = self._client.get(key).decode() if self._comes(key, end) else "    no answer"
            lines.append(f"  rank {rank}:\n{text or '    nothing queued'}")
        self.deadlock = RuleBroken("\n".join(lines))
        # who fails, leaves, and its connections close: not before all know why
        self._client.set(f"told {self._rank}", "1")
        with contextlib.suppress(RuntimeError):  # rank 0 has left, and its store with it
            for rank in range(self._size):
                self._comes(f"told {rank}", end)
        for communicator in self._all():
            communicator.fail(self.deadlock)

    def _comes(self, key: str, end: float) -> bool:
        """Whether a rank has set the key before ``end``."""
        while not (there := self._client.check([key])) and time.monotonic() < end:
            time.sleep(0.02)
        return bool(there)


_watch: Watch | None = None


def watch() -> Watch:
    """The watch of this process's present job."""
    global _watch
    store = dist.distributed_c10d._get_default_store()
    if _watch is None or _watch.store is not store or _watch.over:
        if _watch is not None:
            _watch.end()
        _watch = Watch(dist.get_rank(), dist.get_world_size(), store)
    return _watch


def _done(work: Any) -> None:
    work.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whatever its type."""
    return tensor.detach().view(-1).view(torch.uint8)


def _make(options: Any, _: Any) -> Communicator:
    return Communicator(
        options.store, options.group_rank, options.group_size, options.global_ranks_in_group, options.group_id
    )


def register() -> None:
    """Makes the backend known to torch.distributed; idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
