"""The processes of a job, seen from one of them: its ranks, its groups, and the watch that stops all together.

    torchrun's environment ──▶ store ──▶ world group ──▶ pp, tp, rdp, mp, dp groups ──▶ failure watch
    plain ``python``       ──▶ a world of one: no process group, no thread

A group of `World` carries both CPU and, on CUDA, device tensors: gloo for the former (objects too), NCCL for the
latter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from smpar.comm.failure import FailureWatch
from smpar.comm.sockets import Connections
from smpar.config import Config
from smpar.errors import ConfigError, MeshError, NotInitialized, SmparError
from smpar.mesh import AXES, Axis, Mesh

TIMEOUT = timedelta(minutes=30)
MEETING = timedelta(minutes=5)  # how long a rank waits for the others to start
LINGER = 3.0  # s that the store's host waits for others to read why they cannot start

_current: World | None = None


def current() -> World:
    """The world that ``smpar.init`` opened.

    Raises:
        NotInitialized: ``smpar.init`` has not run.
    """
    if _current is None:
        raise NotInitialized(
            "smpar.init must run before anything else of smpar",
            "it has not run in this process",
            "import smpar as smp\n    smp.init({...})",
        )
    return _current


def set_current(world: World | None) -> None:
    """Makes ``world`` the one that `current` gives; None: there is none."""
    global _current
    _current = world


def is_initialized() -> bool:
    """Whether ``smpar.init`` has run."""
    return _current is not None


class World:
    """This process among all of the job. Make it with `World.open`; `close` undoes that.

    Attributes:
        mesh: which rank stands where.
        rank, size: global rank, number of ranks.
        local_rank, local_size, instance_id: the same within this machine, and the machine's number.
        device: where this rank computes.
        mailbox: messages that this rank sent to itself.
        watch: stops all ranks together; None in a world of one.
    """

    def __init__(self, mesh: Mesh, rank: int, local_rank: int, local_size: int, instance_id: int) -> None:
        self.mesh, self.rank, self.size = mesh, rank, mesh.world_size
        self.local_rank, self.local_size, self.instance_id = local_rank, local_size, instance_id
        self.device = torch.device("cuda", local_rank) if _on_cuda() else torch.device("cpu")
        self.mailbox: deque[bytes] = deque()
        self.watch: FailureWatch | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._further: list[dist.ProcessGroup] = []
        self._timeout = TIMEOUT
        self._ranks = {axis: mesh.group(axis, rank) for axis in AXES}
        self._owns_dist = False
        self._closed = False

    @classmethod
    def open(cls, config: Config, timeout: timedelta = TIMEOUT) -> World:
        """Joins the job: all its processes call this, with equal configurations.

        A process group that torch.distributed has already is used (and left alone by `close`); else one is made from
        torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without that the world is of size 1.

        Args:
            config: gives the degrees and the placement.
            timeout: how long a collective or transfer may wait.

        Raises:
            MeshError: the number of processes does not fit the degrees, or the machine's GPUs.
            ConfigError: another rank's configuration is another one, or wrong.
        """
        given = dist.is_initialized()
        rank, size = _rank_and_size(given)
        try:
            order: tuple[int, ...] = ()
            if config.plan is not None:
                config.plan.check_world(size)
                order = config.plan.order
            mesh = Mesh(size, config.pipeline_parallel_degree, config.tensor_parallel_degree, config.placement, order)
        except MeshError as error:
            refuse(error)
            raise
        if size == 1:
            return cls(mesh, 0, 0, 1, 0)

        connections = Connections()
        store, prefix = _meet(given, rank, size)
        own_client = store.clone()  # type: ignore[attr-defined]  # so that the watch blocks nobody and nobody blocks it
        store = PrefixStore(prefix, store)
        local_rank, local_size, instance_id = _locality(store, rank, size)
        world = cls(mesh, rank, local_rank, local_size, instance_id)
        world._timeout = timeout
        if world.device.type == "cuda":
            try:
                _use_device(world)
            except MeshError as error:
                _announce(store, rank, size, error=error)
                raise
        _announce(store, rank, size, config)
        with connections.recording(but_port=int(os.environ.get("MASTER_PORT", -1))):
            world._make_groups(store, given, timeout)
        launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        world.watch = FailureWatch(
            PrefixStore(f"{prefix}/watch", own_client),
            rank,
            size,
            connections,
            store_host=None if launcher_serves else 0,
            abort_devices=world._abort_devices if world.device.type == "cuda" else None,
        )
        world.watch.start()
        dist.barrier(group=world.process_group("world"))  # all hearts beat before anyone may call one dead
        atexit.register(world.close)
        return world

    # -- who and with whom

    def group(self, axis: Axis) -> list[int]:
        """Global ranks of this rank's group along ``axis``, in the group's order: ascending unless a plan says else."""
        return list(self._ranks[axis])

    def axis_rank(self, axis: Axis) -> int:
        """This rank's place in its group along ``axis``."""
        return self._ranks[axis].index(self.rank)

    def axis_size(self, axis: Axis) -> int:
        """How many ranks this rank's group along ``axis`` has."""
        return len(self._ranks[axis])

    def process_group(self, axis: Axis) -> dist.ProcessGroup:
        """The process group of this rank's group along ``axis``.

        In a world of one it is made here, at its first use: nothing else needs torch.distributed then.
        """
        ranks = self._ranks[axis]
        if ranks not in self._groups:
            assert self.size == 1, "all groups of a larger world are made when it opens"
            if not dist.is_initialized():
                dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
                self._owns_dist = True
            self._groups[ranks] = _default_group()
        return self._groups[ranks]

    def new_group(self, ranks: Sequence[int], backend: str, what: str) -> dist.ProcessGroup:
        """A further process group, which ends with this world, and is aborted with it when a rank fails.

        All ranks of the world call this, in one order: torch names groups by counting them.

        Args:
            ranks: its members, global.
            backend: name of a backend of torch.distributed.
            what: what it is for, for logs.
        """
        group = dist.new_group(list(ranks), timeout=self._timeout, backend=backend, group_desc=what)
        if self.rank in ranks:
            self._further.append(group)
        return group

    # -- failure

    def guard(self) -> AbstractContextManager[None]:
        """Around work that ranks do together: see `FailureWatch.guard`."""
        return self.watch.guard() if self.watch else contextlib.nullcontext()

    def translating(self) -> AbstractContextManager[None]:
        """Around a single transfer: see `FailureWatch.translating`."""
        return self.watch.translating() if self.watch else contextlib.nullcontext()

    # -- life

    def close(self) -> None:
        """Leaves the job: ends the watch and the process groups; the process may open another world. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.watch is not None:
            self.watch.close()
        if self._owns_dist and dist.is_initialized():
            dist.destroy_process_group()
        else:
            for group in (*self._groups.values(), *self._further):
                if dist.is_initialized() and group is not _default_group():
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._further.clear()
        if _current is self:
            set_current(None)

    def _make_groups(self, store: Store, given: bool, timeout: timedelta) -> None:
        backend = _backend()
        everyone = tuple(range(self.size))
        if given:
            # The user's own group may lack a backend for objects, and its connections are the user's.
            made = {everyone: dist.new_group(list(everyone), timeout=timeout, backend=backend)}
        else:
            dist.init_process_group(
                backend, store=PrefixStore("world", store), rank=self.rank, world_size=self.size, timeout=timeout
            )
            self._owns_dist = True
            made = {everyone: _default_group()}
        for axis in AXES:
            for ranks in self.mesh.groups(axis):
                if len(ranks) > 1 and ranks not in made:
                    # Every rank makes every group, in the same order: torch names groups by counting them.
                    made[ranks] = _new_group(ranks, timeout, backend)
        alone = (self.rank,)
        made[alone] = dist.new_group(list(alone), timeout=timeout, backend=backend, use_local_synchronization=True)
        self._groups = {ranks: group for ranks, group in made.items() if self.rank in ranks}

    def _abort_devices(self) -> None:
        for group in (*self._groups.values(), *self._further):
            with contextlib.suppress(RuntimeError):  # never used on the device: no communicator to abort
                group._get_backend(torch.device("cuda")).abort()


def _new_group(ranks: tuple[int, ...], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """A process group in which the members have the order of ``ranks``.

    Raises:
        MeshError: this torch can make ascending groups only.
    """
    ordered: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise MeshError(
                "pipeline ranks against the order of the processes' ranks need a torch whose groups keep their order",
                f"ranks {ranks}, torch {torch.__version__}",
                "update torch, or start the machines in another order and plan for that",
            )
        ordered["sort_ranks"] = False
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, **ordered)


def _on_cuda() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if _on_cuda() else "gloo"


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _use_device(world: World) -> None:
    count = torch.cuda.device_count()
    if world.local_rank >= count:
        raise MeshError(
            "each process of a machine has a GPU of its own",
            f"local rank {world.local_rank}, {count} GPUs visible",
            f"torchrun --nproc-per-node {count} ..., or CUDA_VISIBLE_DEVICES= to train on CPUs",
        )
    torch.cuda.set_device(world.device)


def _rank_and_size(given: bool) -> tuple[int, int]:
    if given:
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def refuse(error: SmparError) -> None:
    """Tells the other ranks, which wait for this one in `World.open`, that it cannot join, and why."""
    given = dist.is_initialized()
    rank, size = _rank_and_size(given)
    if size == 1 or not (given or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        return

    def tell() -> None:
        with contextlib.suppress(RuntimeError):
            store, prefix = _meet(given, rank, size)
            _announce(PrefixStore(prefix, store), rank, size, error=error)

    # The others may be late, or not there at all; this rank's own error shall not wait for that.
    thread = threading.Thread(target=tell, name="smpar-refuse", daemon=True)
    thread.start()
    thread.join(LINGER)


def _announce(
    store: Store, rank: int, size: int, config: Config | None = None, error: SmparError | None = None
) -> None:
    """Each rank's configuration, or why it cannot join, to all.

    Raises:
        ConfigError: they differ, or another rank cannot join.
    """
    mine = config.to_dict() if config is not None else {"error": f"{error}"}
    store.set(f"config/{rank}", json.dumps(mine))
    everyone: list[dict[str, Any]] = []
    problem: ConfigError | None = None
    if error is None:
        everyone = [json.loads(text) for text in store.multi_get([f"config/{r}" for r in range(size)])]
        problem = _difference(everyone)
    store.set(f"read/{rank}", "1")
    if (error or problem) and rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # The store would go away with this process before the others have read it.
        with contextlib.suppress(RuntimeError):
            store.wait([f"read/{r}" for r in range(size)], timedelta(seconds=LINGER))
    if problem is not None:
        raise problem


def _difference(everyone: list[dict[str, Any]]) -> ConfigError | None:
    for rank, other in enumerate(everyone):
        if "error" in other:
            text = "\n    | ".join(str(other["error"]).split("\n"))
            return ConfigError(
                "all ranks of a job must be able to start",
                f"rank {rank} cannot\n    | {text}",
                f"see rank {rank}'s message above; give smpar.init the same configuration on all ranks",
            )
    for rank, other in enumerate(everyone):
        for key, value in everyone[0].items():
            if other[key] != value:
                return ConfigError(
                    "all ranks give smpar.init the same configuration",
                    f"{key} = {value!r:.200} on rank 0, {other[key]!r:.200} on rank {rank}",
                    "let nothing in the configuration depend on the rank",
                )
    return None


def _meet(given: bool, rank: int, size: int) -> tuple[Store, str]:
    """The job's store, and the prefix of this world's keys there."""
    if given:
        store: Store = dist.distributed_c10d._get_default_store()
    else:
        store = _rendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, size)
    # The store outlives its worlds: each rank counts its worlds there, all count alike, so each has its own keys.
    return store, f"smpar/{store.add(f'smpar/worlds of {rank}', 1)}"


@functools.lru_cache(maxsize=1)
def _rendezvous(address: str, port: int, rank: int, size: int) -> Store:
    """The job's store. It lives as long as the process: a server stopped and started again would lose its clients."""
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not launcher_serves
    if rank > 0 and not launcher_serves:
        _await_listener(address, port)
    return TCPStore(address, port, size, serves, timeout=MEETING, multi_tenant=True)


def _await_listener(address: str, port: int) -> None:
    """Waits until someone listens there. A TCPStore that comes too early tries again after half a second, or five."""
    end = time.monotonic() + MEETING.total_seconds()
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
        except OSError:
            time.sleep(0.01)
        else:
            return


def _locality(store: Store, rank: int, size: int) -> tuple[int, int, int]:
    """Local rank, local size, machine number: from torchrun, else by comparing host names."""
    env: dict[str, Any] = dict(os.environ)
    if "LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env:
        local_size = int(env["LOCAL_WORLD_SIZE"])
        return int(env["LOCAL_RANK"]), local_size, int(env.get("GROUP_RANK", rank // local_size))
    store.set(f"host/{rank}", socket.gethostname())
    hosts = [store.get(f"host/{r}") for r in range(size)]
    here = [r for r in range(size) if hosts[r] == hosts[rank]]
    machines = list(dict.fromkeys(hosts))
    return here.index(rank), len(here), machines.index(hosts[rank])
