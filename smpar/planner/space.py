"""The space of strategies: degrees, microbatch sizes, schedules, and places on a cluster; what the user fixed of it.

Device orders of a mixed cluster (two nodes of A, one of B), places along them stage by stage or replica by replica::

    A A B        stage by stage, pp 3 x dp 4:    stage 0 = A's, stage 1 = A's, stage 2 = B's
    B A A        replica by replica, pp 4 x dp 3:  replica 0 = A's, replica 1 = A's, replica 2 = B's
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from smpar.errors import PlanError
from smpar.planner.cluster import Cluster
from smpar.schedule import virtual_stages_of

VIRTUAL = (2, 3, 4)
"""Numbers of virtual stages that are tried where a schedule leaves the choice."""
_SMALL = 64
"""Up to so many devices all pipeline degrees are tried, and all types of those used in every order."""
_PERMUTED = 4
"""Up to so many device types all orders are tried, beyond only by speed."""


@dataclass(frozen=True)
class Constraints:
    """What the user allows. Each is a tuple of allowed values, or None for all.

    Attributes:
        tp, pp, dp: degrees.
        microbatch: samples of a microbatch.
        schedule: names of `smpar.schedule.make_schedule`.
        virtual_stages: stages on each pipeline rank.
        recompute: "none", "full" (of a stage, where memory asks for it).
        shard_optimizer: False, True.
        devices: how many devices are used.
    """

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    schedule: tuple[str, ...] | None = None
    virtual_stages: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    shard_optimizer: tuple[bool, ...] | None = None
    devices: tuple[int, ...] | None = None

    @classmethod
    def make(cls, fix: Mapping[str, Any] | None = None) -> Constraints:
        """From what a user writes: ``{"tp": 1, "pp": [2, 4]}``.

        Raises:
            PlanError: an unknown name, or a value that it cannot have.
        """
        known = [f.name for f in fields(cls)]
        values: dict[str, tuple[Any, ...]] = {}
        for name, value in (fix or {}).items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                raise PlanError(
                    f"a plan's constraints are {', '.join(known)}",
                    f"{name!r}",
                    f"did you mean {near[0]!r}?" if near else f"remove {name!r}",
                )
            several = tuple(value) if isinstance(value, (list, tuple, set, frozenset, range)) else (value,)
            if not several:
                raise PlanError(
                    f"the constraint `{name}` allows something", "no value", f"give one, or leave {name} out"
                )
            for one in several:
                _require_good(name, one)
            values[name] = several
        return cls(**values)

    def allows(self, name: str, value: Any) -> bool:
        """Whether `value` is allowed."""
        allowed = getattr(self, name)
        return allowed is None or value in allowed

    def __str__(self) -> str:
        said = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return ", ".join(f"{name} in {list(values)}" for name, values in said.items()) or "none"


def _require_good(name: str, value: Any) -> None:
    if name in ("schedule", "recompute"):
        good, must = isinstance(value, str), "a name"
        if name == "recompute":
            good, must = value in ("none", "full"), '"none" or "full"'
        elif good:
            virtual_stages_of(value)
    elif name == "shard_optimizer":
        good, must = isinstance(value, bool), "True or False"
    else:
        good, must = isinstance(value, int) and not isinstance(value, bool) and value >= 1, "a whole number, 1 or more"
    if not good:
        raise PlanError(f"the constraint `{name}` is {must}, or a list of such", f"{name}={value!r}", f"correct {name}")


@dataclass(frozen=True)
class Degrees:
    """Degrees and the size of microbatches: everything that decides how much each rank computes."""

    tp: int
    pp: int
    dp: int
    microbatch: int
    microbatches: int

    @property
    def devices(self) -> int:
        """How many it uses."""
        return self.tp * self.pp * self.dp


def tensor_degrees(cluster: Cluster, constraints: Constraints) -> tuple[int, ...]:
    """Tensor-parallel degrees worth knowing the costs of: powers of two, and whole nodes; those allowed, if some are.

    A tensor-parallel group lies inside one node.
    """
    widest = max(node.count for node in cluster.nodes)
    usual = {1, *(2**k for k in range(1, widest.bit_length())), *(node.count for node in cluster.nodes)}
    return tuple(sorted(tp for tp in constraints.tp or usual if tp <= widest))


def degrees(
    cluster: Cluster, layers: int, tensor: tuple[int, ...], global_batch: int, constraints: Constraints
) -> Iterator[Degrees]:
    """All degrees that the cluster, the batch and the constraints allow; perhaps with fewer devices than there are.

    Args:
        tensor: tensor-parallel degrees with known costs. A tensor-parallel group lies inside one node.
        layers: at most so many stages.
        global_batch: samples of a step; replicas and microbatches divide it evenly.
    """
    widest = max(node.count for node in cluster.nodes)
    for tp in sorted(set(tensor)):
        slots = sum(node.count // tp for node in cluster.nodes)
        if tp > widest or not constraints.allows("tp", tp):
            continue
        for dp in divisors(global_batch):
            if dp > slots or not constraints.allows("dp", dp):
                continue
            for pp in _depths(min(layers, slots // dp), cluster.size):
                if not constraints.allows("pp", pp) or not constraints.allows("devices", tp * pp * dp):
                    continue
                for microbatch in divisors(global_batch // dp):
                    if constraints.allows("microbatch", microbatch):
                        yield Degrees(tp, pp, dp, microbatch, global_batch // (dp * microbatch))


def _depths(most: int, devices: int) -> Iterator[int]:
    """Pipeline degrees to try: all on small clusters; on large ones, where neighbours are alike, 1 2 3 4 6 8 12 ..."""
    for pp in range(1, most + 1):
        rest = pp
        while rest % 2 == 0:
            rest //= 2
        if devices <= _SMALL or rest in (1, 3):
            yield pp


def schedules(pp: int, layers: int, constraints: Constraints, named: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Schedules and virtual stages that `pp` ranks may run.

    Args:
        named: what the runtime knows.
    """
    if pp == 1:  # all are the same there
        alike = [name for name in constraints.schedule or named if virtual_stages_of(name) == 1]
        if alike and constraints.allows("virtual_stages", 1):
            yield ("1f1b" if "1f1b" in alike else alike[0]), 1
        return
    for name in constraints.schedule or named:
        default = virtual_stages_of(name)
        choices = {"zbv": (2,), "interleaved_1f1b": constraints.virtual_stages or VIRTUAL}.get(name, (default,))
        for virtual in choices:
            if constraints.allows("virtual_stages", virtual) and pp * virtual <= layers:
                yield name, virtual


def placements(cluster: Cluster, tp: int, pp: int, dp: int, speed: Mapping[str, float]) -> list[tuple[int, ...]]:
    """Ways to put the places of these degrees on devices; see `smpar.planner.strategy.Strategy.devices`.

    Nodes come type by type, in every order of the types (by speed only, if there are many), and devices are taken from
    the front: so slow types may be left out. Those taken are put in every such order again (on large clusters in the
    same one), so each type may be anywhere in the pipeline. Along that order places go stage by stage (replicas side by
    side, good for reductions) or replica by replica (stages side by side, good for messages).

    Args:
        speed: of each device type; any unit.
    """
    first = {}
    start = 0
    for index, node in enumerate(cluster.nodes):
        first[index] = start
        start += node.count
    types = list(dict.fromkeys(node.device for node in cluster.nodes))
    by_speed = sorted(types, key=lambda name: -speed[name])
    every = [tuple(by_speed), tuple(by_speed[::-1])]
    if len(types) <= _PERMUTED:
        every = list(itertools.permutations(by_speed))
    whole = {
        order: [
            (name, tuple(range(first[i] + k, first[i] + k + tp)))
            for name in order
            for i, node in enumerate(cluster.nodes)
            if node.device == name
            for k in range(0, node.count - tp + 1, tp)
        ]
        for order in every
    }
    found: dict[tuple[int, ...], None] = {}
    small = cluster.size <= _SMALL
    for chosen, order in ((a, b) for a in every for b in every if small or a == b):
        taken = whole[chosen][: pp * dp]
        if len(taken) < pp * dp:
            continue
        slots = [slot for name in order for device, slot in taken if device == name]
        by_stage: Callable[[int, int], int] = lambda p, d: p * dp + d  # noqa: E731
        by_replica: Callable[[int, int], int] = lambda p, d: d * pp + p  # noqa: E731
        for at in (by_stage, by_replica) if pp > 1 and dp > 1 else (by_stage,):
            found[tuple(i for p in range(pp) for d in range(dp) for i in slots[at(p, d)])] = None
    return list(found)


def every_placement(cluster: Cluster, tp: int, slots: int, most: int) -> list[tuple[int, ...]]:
    """All ways to put so many groups of `tp` devices on nodes, but for exchanging equal nodes, or devices inside one.

    Returns:
        Nothing if there are more than `most`.
    """
    alike = [(node.device, node.count, node.intra, node.nic, node.nics) for node in cluster.nodes]
    whole = cluster.matrix is None
    room = [node.count // tp for node in cluster.nodes]
    if slots > sum(room):
        return []
    found: list[tuple[int, ...]] = [()]
    for _ in range(slots):  # each beginning has an end: if there are too many now, there will be then
        longer = []
        for taken in found:
            fresh = set()
            for node, kind in enumerate(alike):
                if taken.count(node) == room[node]:
                    continue
                if whole and node not in taken:
                    if kind in fresh:
                        continue  # of equal nodes not used yet, the first only
                    fresh.add(kind)
                longer.append((*taken, node))
        found = longer
        if len(found) > most:
            return []
    result = []
    for nodes in found:
        free = [itertools.count(start, tp) for start in cluster.starts]
        result.append(tuple(at + t for at in (next(free[node]) for node in nodes) for t in range(tp)))
    return result


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})
