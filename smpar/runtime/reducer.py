"""Averages gradients over data-parallel replicas while the last backward still runs.

    microbatch  0    0   1    1   2    2
    compute    |F   |B  |F   |B  |F   |B p5 p4 p3 p2 p1 p0|
    window                            |===================|    only here gradients become final
    reductions                              [p5]   [p4 p3 p2]   [p1 p0]

A hook on each parameter tells when its gradient was accumulated. It listens in *windows*: between ``before(stage)`` and
``after(stage)``, around what gives the last gradients of a step to weights of a stage on this rank. A parameter is
ready when it was told of as often as in the windows of an earlier step that ran the same; the first such step only
learns. Buckets are reduced in one order on all replicas: each when it and those before it are ready, the rest at the
step's end. Averaging is linear and leaves alone what all replicas have alike, so what earlier steps left in the
gradients needs no setting aside.

Under tensor parallelism a bucket is averaged over the ranks that hold its parameters: those of one slice in all
replicas, or, of what is whole on each rank, all ranks of the stage.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smpar.comm.buckets import FIRST, Bucket, CommHook, plan_buckets
from smpar.comm.peers import Peers
from smpar.errors import LateGradient
from smpar.runtime.join import Joining
from smpar.runtime.ties import Gradients, Ties
from smpar.runtime.wide import Wide, wide_type
from smpar.slices import slicing_of

_PARTS = 2  # at least so many buckets, as long as none is smaller than the first; 8 were slower on busy cores
_REMEMBERED = 128  # programs whose windows are known
_NEVER = 1 << 62  # times to be told of, for a parameter that is ready at the step's end only


class _Listener:
    """What the parameters' hooks speak to; they do not keep the reducer alive."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told: Callable[[int], None] | None = None

    def hook(self, index: int) -> Callable[[Tensor], None]:
        def accumulated(_: Tensor) -> None:
            if self.told is not None:
                self.told(index)

        return accumulated


def _same(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _size(parameter: Tensor) -> int:
    """Number of elements, of a slice an even share of the whole, so that all ranks of a group lay buckets out alike."""
    slicing = slicing_of(parameter)
    if slicing is None:
        return parameter.numel()
    return -(-math.prod(slicing.whole_shape(parameter.shape)) // len(slicing.runs))


class Reducer:
    """The gradients of one rank's parameters, and the other ranks that hold the same ones.

    The executor calls `before` and `after` around the last action of each kind (B, or I and W) of each stage that this
    rank runs in a step. Actions outside of these windows give no gradient to a parameter that was told of inside one as
    often as it will be; `LateGradient` otherwise. Whoever adds to a gradient by hand calls the parameter's
    post-accumulate hooks, as autograd does.

    Args:
        peers: the ranks that hold this rank's whole parameters: its data-parallel group.
        sliced: those that hold its slices of distributed parameters; None if there are none of these.
        cap: bytes at which a bucket is closed.
        overlap: start reductions while backward runs; else all at the step's end.
        early_views: move gradients into their bucket at the first microbatch, so that they are never held twice.
        wide: sum gradients of half-precision parameters in float32.
        every: only each so-many-th step that runs a backward reduces.
        name_of: a parameter's name, for messages.

    Attributes:
        sync: False inside ``no_sync``.
        comm_hook: what reduces a bucket of whole parameters instead of the sum: (state, function).
        joining: set inside ``join``.
        reduced: whether the last step reduced.
    """

    def __init__(
        self,
        peers: Peers,
        sliced: Peers | None = None,
        *,
        cap: int = 25 << 20,
        overlap: bool = True,
        early_views: bool = False,
        wide: bool = False,
        every: int = 1,
        name_of: Callable[[Tensor], str] = lambda p: f"of shape {list(p.shape)}",
    ) -> None:
        self.peers, self.sliced = peers, peers if sliced is None or sliced == peers else sliced
        self.sync = True
        self.comm_hook: tuple[Any, CommHook] | None = None
        self.joining: Joining | None = None
        self.reduced = False
        self._cap, self._overlap, self._early_views, self._every = cap, overlap, early_views, every
        self._name_of = name_of
        self._wide = Wide() if wide else None
        self._passes = 0
        self._listener = _Listener()
        self._handles: list[Any] = []
        self._given: Sequence[nn.Parameter] | None = None
        self._parameters: list[nn.Parameter] = []
        self._index: dict[int, int] = {}  # id of a parameter -> its place in the list
        self._ties: Ties | None = None
        self._common = 0  # so many of the parameters, the first ones, are in all replicas' buckets
        self._tied: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []  # on all replicas alike; owned ones
        self._waiting: set[int] = set()  # tied and owned on this replica only: in a bucket as if they were not tied
        self._settled = False  # whether the buckets follow the order in which gradients become ready
        self._order: list[int] = []  # that order on this rank, as far as it is known
        self._buckets: list[Bucket] = []
        self._last_buckets: list[Bucket] = []  # of tied parameters: their sums over the pipeline come first
        self._home: list[tuple[Bucket, int] | None] = []  # bucket and place of each parameter
        self._expected: OrderedDict[Hashable, list[int]] = OrderedDict()  # how often it is told of in the windows
        self._key: Hashable = None
        self._overlapping = False
        self._open = False  # whether the buckets' memory is this step's
        self._left: list[int] = []
        self._heard: list[int] | None = None  # while learning: who was told of in the windows
        self._strays: set[int] = set()  # and of them, who was told of after its window
        self._next = 0
        self._latest: Bucket | None = None  # the last one that was launched
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    # -- a step ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, parameters: Sequence[nn.Parameter], key: Hashable, ties: Ties | None = None) -> Iterator[None]:
        """Around the forwards and backwards of one step; `finish` comes inside, at the end.

        Args:
            parameters: those of this rank that require gradients; the same list as long as they are the same.
            key: what the step runs; equal keys have equal windows.
            ties: those among the parameters that other ranks of the pipeline hold, too.
        """
        self.prepare(parameters, ties)
        self._begin(key)
        try:
            yield
        finally:
            self._listener.told = None
            self._restore()

    def before(self, stage: int) -> None:
        """The next backward is this step's last of its kind that reaches weights of ``stage`` on this rank."""
        if self._overlapping:
            self._listener.told = self._tell

    def after(self, stage: int) -> None:
        """That backward is done. What is not reduced yet stays for a later window, or for `finish`."""
        if self._overlapping:
            self._listener.told = self._guard

    def finish(self, backward: bool) -> None:
        """All backwards of the step are done: reduce what is not reduced yet, and wait for all of it.

        Args:
            backward: whether the step ran any.

        Raises:
            PeerFailed: another rank stopped.
        """
        self._listener.told = None
        due = backward and self._due
        if self.joining is not None:
            due = self.joining.announce(due)
        self.reduced = due
        if backward:
            self._passes = 0 if due else self._passes + 1
            with torch.no_grad():
                self._complete(due)

    def shadow(self) -> None:
        """Take part in the other replicas' reductions of one step, with nothing to give."""
        with torch.no_grad():
            for bucket in (*self._buckets, *self._last_buckets):
                bucket.begin()
                bucket.fill([None] * len(bucket.parameters), 1.0)
                bucket.launch(self._hook(bucket.peers))
                bucket.settle()
            self._shared_presence()
            for bucket in (*self._buckets, *self._last_buckets):
                bucket.wait()
            self._settle()

    def prepare(self, parameters: Sequence[nn.Parameter], ties: Ties | None = None) -> None:
        """Lay out the buckets of these parameters, unless they are laid out already; see `step`."""
        if parameters is self._given and ties is self._ties:
            return
        laid_out = self._given is not None
        self._given, self._ties = parameters, ties
        here = ties.here if ties is not None else set()
        tied = [p for p in ties.parameters if id(p) not in here] if ties is not None else []
        owned = [p for p in ties.owned if id(p) not in here] if ties is not None else []
        waiting = {id(p) for p in ties.owned} & here if ties is not None else set()
        common = [p for p in parameters if _size(p) and (id(p) not in here or id(p) in waiting)]
        added = [p for p in parameters if _size(p) and id(p) in here and id(p) not in waiting]
        # This replica may have come to other ties than the others: what they share stays as it is.
        kept = laid_out and _same(common, self._parameters[: self._common])
        kept = kept and all(map(_same, (tied, owned), self._tied))
        places = {i for i, p in enumerate(common) if id(p) in waiting}
        if kept and places == self._waiting and _same(added, self._parameters[self._common :]):
            return
        self._common, self._tied, self._waiting = len(common), (tied, owned), places
        self._parameters = common + added
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._expected.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._listener.hook(i))
            for i, p in enumerate(self._parameters)
            if self._is_reduced(p) or (self._wide and wide_type(p.dtype) != p.dtype)
        ]
        if kept:
            self._home = [*self._home[: len(common)], *[None] * len(added)]
            return
        self._settled = not self._overlap or not self._reduces
        self._order = []
        self._lay_out(tuple(reversed(range(len(common)))))

    def listen(self, told: Callable[[int], None] | None) -> None:
        """Outside of steps: who is told when a parameter's gradient was accumulated; each step forgets it."""
        self._listener.told = told

    def use_comm_hook(self, state: Any, hook: CommHook) -> None:
        """From the next step on, ``hook(state, bucket)`` reduces the buckets."""
        self.comm_hook, self._given = (state, hook), None

    def restart(self) -> None:
        """Count the steps up to the next reduction anew."""
        self._passes = 0

    @property
    def idle(self) -> bool:
        """Whether gradients need nothing, unless they are tied over a pipeline."""
        return not self._reduces and self._wide is None

    # -- its beginning --------------------------------------------------------------------------

    @property
    def _reduces(self) -> bool:
        return self.peers.size > 1 or self.comm_hook is not None

    def peers_of(self, parameter: Tensor) -> Peers:
        """The ranks over which a parameter's gradient is averaged."""
        return self.peers if slicing_of(parameter) is None else self.sliced

    def _hook(self, peers: Peers) -> tuple[Any, CommHook] | None:
        return self.comm_hook if peers is self.peers else None

    def _is_reduced(self, parameter: Tensor) -> bool:
        peers = self.peers_of(parameter)
        return peers.size > 1 or self._hook(peers) is not None

    @property
    def _due(self) -> bool:
        return self._reduces and self.sync and self._passes + 1 >= self._every

    def _begin(self, key: Hashable) -> None:
        self._key, self._next, self._latest, self._heard = key, 0, None, None
        tied = self._ties.parameters if self._ties is not None else ()
        self._before = [(p, p.grad) for p in tied if p.grad is not None]
        for p, _ in self._before:
            p.grad = None
        due = self._due and torch.is_grad_enabled()
        self._open = due or self._early_views or self._wide is not None
        if self._open:
            self._open_buckets()
        self._overlapping = due and self._overlap and bool(self._buckets) and self.joining is None
        if self._overlapping:
            expected = self._expected.get(key)
            if expected is None:
                self._heard, self._strays = [], set()
            else:
                self._expected.move_to_end(key)
                self._left = expected.copy()
        self._listener.told = self._take if self._wide or (self._early_views and self._buckets) else None

    def _open_buckets(self) -> None:
        for bucket in (*self._buckets, *self._last_buckets):
            bucket.begin()
        if self._wide is not None:
            homes = [home if home and home[0].wide else None for home in self._home]
            self._wide.begin(self._parameters, [home and home[0].memory.views[home[1]] for home in homes])

    def _restore(self) -> None:
        """If the step failed, what was set aside comes back, beside what has come since."""
        for p, earlier in self._before:
            p.grad = earlier if p.grad is None else earlier + p.grad
        self._before = []
        if self._wide is not None:
            self._wide.end()

    # -- what hooks tell ------------------------------------------------------------------------

    def _take(self, index: int) -> None:
        """A microbatch's gradient goes where the step's sum is."""
        if self._wide is not None and self._wide.is_wide(index):
            self._wide.take(index)
        elif self._early_views and (home := self._home[index]) is not None:
            bucket, place = home
            with torch.no_grad(), torch._C.DisableTorchFunction():
                grad = self._parameters[index].grad
                assert grad is not None
                bucket.put(place, grad)

    def _tell(self, index: int) -> None:
        """In a window: one gradient less to wait for."""
        if self._heard is not None:
            self._heard.append(index)
            self._take(index)
            return
        home = self._home[index]
        if home is None or index in self._waiting or home[0] in self._last_buckets:
            self._take(index)
            return
        bucket, place = home
        if bucket.filled[place]:
            self._refuse(index)
        self._left[index] -= 1
        if self._wide is not None or self._left[index]:
            self._take(index)
        if not self._left[index]:
            # now, while the gradient is in the cache
            with torch._C.DisableTorchFunction():
                grad = self._gradient(index)
                assert grad is not None
                bucket.put(place, grad, self._scale(bucket.peers))
            bucket.filled[place] = True
            bucket.missing -= 1
            if not bucket.missing:
                self._launch_ready()

    def _guard(self, index: int) -> None:
        """Outside of windows: a parameter that is told of in one before is done later than that."""
        if self._heard is not None and index in self._heard:
            self._strays.add(index)
        home = self._home[index]
        if home is not None and home[0].filled[home[1]]:
            self._refuse(index)
        self._take(index)

    def _refuse(self, index: int) -> None:
        raise LateGradient(f"parameter {self._name_of(self._parameters[index])}")

    def _launch_ready(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                if self._latest is not None and self._latest.at_work:
                    break
                self._launch(self._buckets[self._next])
                self._next += 1

    # -- its end --------------------------------------------------------------------------------

    def _gradient(self, index: int) -> Tensor | None:
        if self._wide is not None and self._wide.is_wide(index):
            return self._wide.sums[index]
        return self._parameters[index].grad

    def _scale(self, peers: Peers) -> float:
        if self._hook(peers) is not None:  # which divides by itself
            return 1.0
        return 1.0 / (self.joining.divisor(peers) if self.joining is not None else peers.size)

    def _launch(self, bucket: Bucket) -> None:
        if self._latest is not None:  # a hook's second message must not come after another bucket's first one
            self._latest.settle()
        self._latest = bucket
        bucket.fill([self._gradient(number) for number in bucket.numbers], self._scale(bucket.peers))
        bucket.launch(self._hook(bucket.peers))

    def _complete(self, due: bool) -> None:
        step: Gradients = {}
        if self._ties is not None:
            step = {id(p): self._gradient(self._index[id(p)]) for p in self._ties.parameters}
            self._ties.offer(step)
        ready = [*self._buckets[self._next :], *self._last_buckets]
        if due:
            if not self._open:
                self._open_buckets()
            while ready and ready[0] not in self._last_buckets and self._waiting.isdisjoint(ready[0].numbers):
                self._launch(ready.pop(0))
        if self._ties is not None:
            self._gather(self._ties, step)
        if due:
            for bucket in ready:
                self._launch(bucket)
            self._accept()
        if self._wide is not None:
            self._wide.end()
        if self._ties is not None:
            self._ties.hand_back()
        if due:
            self._learn()
            self._settle()

    def _gather(self, ties: Ties, step: Gradients) -> None:
        """Sums over the pipeline of what this step gave, then what earlier ones gave on top: that is summed already."""
        ties.gather(step, wide_type if self._wide is not None else lambda dtype: dtype)
        earlier = {id(p): grad for p, grad in self._before}
        self._before = []
        for p in ties.owned:
            total, before = step[id(p)], earlier.get(id(p))
            if before is not None:
                total = before if total is None else total + before.to(total.dtype)
            index = self._index[id(p)]
            if self._wide is not None and self._wide.is_wide(index):
                self._wide.sums[index] = total
            else:
                p.grad = total

    def _accept(self) -> None:
        """Wait for all buckets; gradients are what they hold."""
        shared = self._shared_presence()
        for bucket in (*self._buckets, *self._last_buckets):
            present = bucket.wait()
            if shared is not None and self._hook(bucket.peers) is not None:
                present = [shared[number] for number in bucket.numbers]
            if not bucket.absent and not bucket.wide:
                continue
            for place, (p, there) in enumerate(zip(bucket.parameters, present, strict=True)):
                if bucket.wide:
                    assert self._wide is not None
                    self._wide.give_back(bucket.numbers[place], bucket.memory.views[place] if there else None)
                elif not there:
                    p.grad = None
                elif p.grad is None:
                    bucket.adopt(place)

    def _shared_presence(self) -> list[bool] | None:
        """With a communication hook: whether any rank has a gradient, by parameter. Else flags ride in buckets."""
        if self.comm_hook is None or self.peers.group is None:
            return None
        flags = torch.zeros(self._common, dtype=torch.int32)
        for bucket in (*self._buckets, *self._last_buckets):
            for place, number in enumerate(bucket.numbers):
                flags[number] = place not in bucket.absent
        if self._latest is not None:
            self._latest.settle()
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        flags = flags.to(device)
        self.peers.group.allreduce([flags]).wait()
        return [bool(flag) for flag in flags.tolist()]

    # -- layout ---------------------------------------------------------------------------------

    def _learn(self) -> None:
        heard, self._heard = self._heard, None
        if heard is None:
            return
        counts = [0] * len(self._parameters)
        for index in heard:
            counts[index] += 1
        self._expected[self._key] = [
            _NEVER if index in self._strays else max(1, count) for index, count in enumerate(counts)
        ]
        if len(self._expected) > _REMEMBERED:
            self._expected.popitem(last=False)
        last = list(dict.fromkeys(i for i in reversed(heard) if i < self._common))  # each where it was told of last
        self._order = last[::-1]

    def _settle(self) -> None:
        """Once: order the buckets as gradients become ready, on the first rank."""
        if self._settled or not self._common:
            return
        self._settled = True
        order = torch.full((self._common,), -1, dtype=torch.int64, device=self._parameters[0].device)
        order[: len(self._order)] = torch.tensor(self._order, dtype=torch.int64)
        if self.peers.group is not None:
            self.peers.group.broadcast(order, 0).wait()
        known = [index for index in order.tolist() if index >= 0]
        if known:
            rest = [index for index in reversed(range(self._common)) if index not in set(known)]
            self._lay_out((*known, *rest))

    def _lay_out(self, order: Sequence[int]) -> None:
        self._buckets, self._last_buckets = [], []
        self._home = [None] * len(self._parameters)
        if not self._reduces:
            return
        types = [wide_type(p.dtype) if self._wide is not None else p.dtype for p in self._parameters]
        tied, owned = ({id(p) for p in some} for some in self._tied)
        reduced = [self._is_reduced(p) for p in self._parameters]
        free = [i for i in order if reduced[i] and id(self._parameters[i]) not in tied]
        last = [i for i, p in enumerate(self._parameters[: self._common]) if reduced[i] and id(p) in owned]
        sizes = [_size(p) * t.itemsize for p, t in zip(self._parameters, types, strict=True)]
        kinds = [(p.dtype, p.device, self.peers_of(p)) for p in self._parameters]
        for indices, buckets in ((free, self._buckets), (last, self._last_buckets)):
            whole = sum(sizes[i] for i in indices)
            cap = min(self._cap, max(FIRST, whole // _PARTS))  # of a small model only the last part is reduced late
            for members in plan_buckets(sizes, kinds, indices, min(FIRST, cap), cap):
                number = len(self._buckets) + len(self._last_buckets)
                dtype, peers = types[members[0]], kinds[members[0]][2]
                bucket = Bucket(number, members, [self._parameters[i] for i in members], dtype, peers)
                buckets.append(bucket)
                for place, index in enumerate(members):
                    self._home[index] = bucket, place
        for bucket in (self._last_buckets or self._buckets)[-1:]:
            bucket.last = True
