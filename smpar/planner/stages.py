"""Cut a chain of layers into stages that differ in speed, links and memory, exactly.

::

    layers     0   1   2   3   4   5   6   7
               ├──────────────┤├─────┤├──────┤
    cuts       0               4      6           -> StageCuts.cuts == (0, 4, 6)
    place      fast            slow   slow

Stage ``k``, layers ``[a, b)``, takes per microbatch, forward and backward::

    c_k(a, b) = seconds of its layers on its class of device
              + bytes * seconds_per_byte_k + count * latency_k      of the tensors that come in from earlier stages

A tensor comes in if its source lies before ``a`` and a target in ``[a, b)``, once however many targets. A microbatch
crosses all stages once and then follows its predecessor at the pace of the slowest, so the cuts minimise, as AMP's
pipeline cost does (arXiv 2210.07297)::

    sum of c + (microbatches - 1) * max of c

among all cuts that leave no stage empty and keep on each::

    memory_k(a, b) = state + in_flight_k * saved + transient_k <= limit_k

Where a rank holds several (virtual) stages, the slowest rank sets the pace instead; the formula and why it is so stand
in `smpar.planner.partition`. ``state`` and ``in_flight * saved`` then add up over the stages of a rank, of
``transient`` the largest counts, since a rank does one thing at a time.

The C++ core finds the optimum in three sweeps. Stages charged only for the tensors that their first layer uses cost
a difference of prefix sums; so cheap a bound, ``stages * layers`` steps, narrows the range of the largest cost and
drops nearly all cuts. Of the few intervals left true costs are laid out, and a dynamic program over Pareto frontiers
of (sum, max) decides, the one that `smpar.planner.partition` uses too. `smpar.planner.stages_reference` is the same in
a few lines of Python, and decides equally, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from smpar.errors import NothingFits, PlanError, TooFewUnits
from smpar.planner.chain import check_number, check_ranks, fold, shares_ranks
from smpar.planner.native import core


@dataclass(frozen=True)
class Tensor:
    """``nbytes`` per microbatch made by layer ``source`` and used by the later layers ``targets``."""

    source: int
    targets: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True)
class Layers:
    """A chain of layers.

    Attributes:
        times: seconds per microbatch, forward and backward, by device class and layer.
        state: bytes of each layer whatever is in flight: weights, gradients, optimizer state.
        saved: bytes of each layer kept for the backward of one microbatch.
        tensors: what flows between layers.

    Raises:
        PlanError: rows of different lengths, a number that is negative or not finite, a tensor that names layers
            outside the chain or flows backwards.
    """

    times: Sequence[Sequence[float]]
    state: Sequence[float]
    saved: Sequence[float]
    tensors: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        rows = {f"times[{c}]": row for c, row in enumerate(self.times)} | {"state": self.state, "saved": self.saved}
        lengths = {name: len(row) for name, row in rows.items()}
        if len(set(lengths.values())) > 1 or not self.times or not self.state:
            raise PlanError(
                "each layer has a time on each class of device, and bytes of state and saved activations",
                ", ".join(f"{name} has {length}" for name, length in lengths.items()),
                "give one number per layer in each row, and at least one row of times",
            )
        for name, row in rows.items():
            for layer, value in enumerate(row):
                check_number(value, f"{name} of layer {layer}")
        for i, tensor in enumerate(self.tensors):
            check_number(tensor.nbytes, f"nbytes of tensor {i}")
            if not all(0 <= tensor.source < target < len(self) for target in tensor.targets):
                raise PlanError(
                    "a tensor flows from a layer to later layers",
                    f"tensor {i} flows from {tensor.source} to {tensor.targets}; layers are 0 to {len(self) - 1}",
                    "name layers by their place in the chain",
                )

    def __len__(self) -> int:
        return len(self.state)

    @cached_property
    def as_core(self) -> tuple[list[list[float]], list[float], list[float], list[tuple[int, list[int], float]]]:
        """As the core takes it; kept, for a search that cuts the same layers many times."""
        tensors = [(t.source, list(t.targets), t.nbytes) for t in self.tensors]
        return [list(row) for row in self.times], list(self.state), list(self.saved), tensors


@dataclass(frozen=True)
class Place:
    """Where a stage runs.

    Attributes:
        device_class: row of `Layers.times`.
        seconds_per_byte: of its incoming link, for what crosses forward and the gradient that crosses back.
        latency: seconds per tensor of that link, both ways.
        in_flight: microbatches whose activations it holds at once, at most.
        transient: bytes of buffers that are there now and then.
        limit: bytes that its device has for all of this; infinite for no limit.

    Raises:
        PlanError: a number that is negative or not finite.
    """

    device_class: int = 0
    seconds_per_byte: float = 0.0
    latency: float = 0.0
    in_flight: float = 1.0
    transient: float = 0.0
    limit: float = math.inf

    def __post_init__(self) -> None:
        for name in ("seconds_per_byte", "latency", "in_flight", "transient"):
            check_number(getattr(self, name), f"{name} of a place")
        if self.limit != math.inf:
            check_number(self.limit, "limit of a place")

    def as_core(self) -> tuple[int, float, float, float, float, float]:
        """As the core takes it."""
        return self.device_class, self.seconds_per_byte, self.latency, self.in_flight, self.transient, self.limit


@dataclass(frozen=True)
class StageCuts:
    """Stage ``k`` holds layers ``cuts[k]`` up to ``cuts[k + 1]`` (the end, for the last one); ``cuts[0]`` is 0.

    ``seconds`` is the objective; ``stage_time`` in seconds per microbatch with the transfers that the stage pays;
    ``stage_memory`` in bytes; ``rank_time`` and ``rank_memory`` are those of each rank's stages together.
    """

    cuts: tuple[int, ...]
    seconds: float
    stage_time: tuple[float, ...]
    stage_memory: tuple[float, ...]
    rank_time: tuple[float, ...]
    rank_memory: tuple[float, ...]

    @classmethod
    def make(
        cls,
        places: Sequence[Place],
        ranks: Sequence[int],
        cuts: Sequence[int],
        seconds: float,
        time: Sequence[float],
        memory: Sequence[float],
    ) -> StageCuts:
        """From the seconds and bytes of stages."""
        held = [[k for k, rank in enumerate(ranks) if rank == r] for r in range(1 + max(ranks, default=-1))]

        def bytes_of(stages: Sequence[int]) -> float:
            if len(stages) == 1:
                return memory[stages[0]]
            most = max(places[k].transient for k in stages)
            return fold(memory[k] - places[k].transient for k in stages) + most

        rank_time = tuple(fold(time[k] for k in stages) for stages in held) if ranks else tuple(time)
        rank_memory = tuple(bytes_of(stages) for stages in held) if ranks else tuple(memory)
        return cls(tuple(cuts), seconds, tuple(time), tuple(memory), rank_time, rank_memory)


@dataclass(frozen=True)
class Excess:
    """The cuts that miss the limits by least: ``nbytes`` too many on ``stage``, which misses by most."""

    cuts: tuple[int, ...]
    stage: int
    nbytes: float


def cut_stages(
    layers: Layers, places: Sequence[Place], microbatches: int, ranks: Sequence[int] = (), evenness: float = 0.0
) -> StageCuts:
    """The best cuts of ``layers`` into one stage at each of ``places``.

    With one stage per rank, of equally good cuts the lexicographically smallest. With several, good cuts, proven to be
    the best where the proof is short (about a dozen layers, and more if transfers are cheap).

    Args:
        layers: what is cut.
        places: of the stages, in their order.
        microbatches: per step.
        ranks: the rank that holds each stage; empty if stage ``k`` is alone on rank ``k``. Stages of one rank have one
            class of device and one limit, which holds for the rank.
        evenness: where ranks are shared, the part of the pace that the dearest stage sets; between 0 and 1.

    Raises:
        TooFewUnits: fewer layers than stages.
        NothingFits: no cuts keep the limits (or none are found, if ranks are shared); says by how much the
            best-fitting ones miss.
        PlanError: a class of device that has no times; no stage or microbatch; ranks that mean nothing; numbers beyond
            float64.
        NativeMissing: smpar was not installed, only found.
    """
    found = find_cuts(layers, places, microbatches, ranks, evenness)
    if found is None:
        raise nothing_fits(layers, places, ranks)
    return found


def find_cuts(
    layers: Layers, places: Sequence[Place], microbatches: int, ranks: Sequence[int] = (), evenness: float = 0.0
) -> StageCuts | None:
    """As `cut_stages`, but nothing instead of an error where nothing fits: for a search that tries many places."""
    check(layers, places, microbatches, ranks, evenness)
    if shares_ranks(ranks):
        found, fits = _cut_shared(layers, places, microbatches, ranks, evenness)
        return found if fits else None
    best = core().cut_stages(*layers.as_core, [p.as_core() for p in places], microbatches)
    return None if best is None else StageCuts.make(places, ranks, *best)


def _cut_shared(
    layers: Layers, places: Sequence[Place], microbatches: int, ranks: Sequence[int], evenness: float
) -> tuple[StageCuts, bool]:
    at = [p.as_core() for p in places]
    found, fits = core().cut_shared(*layers.as_core, at, microbatches, list(ranks), evenness)
    return StageCuts.make(places, ranks, *found), fits


def least_excess(layers: Layers, places: Sequence[Place]) -> Excess:
    """The cuts whose fullest stage exceeds its limit by least; a negative number of bytes is room that is left.

    Raises:
        PlanError: as `cut_stages`; or no stage has a limit.
    """
    check(layers, places, 1)
    if all(p.limit == math.inf for p in places):
        raise PlanError("a stage exceeds its limit", "no stage has a limit", "give Place(limit=bytes)")
    cuts, stage, nbytes = core().least_excess(*layers.as_core, [p.as_core() for p in places])
    return Excess(tuple(cuts), stage, nbytes)


def nearest_cuts(layers: Layers, places: Sequence[Place], ranks: Sequence[int] = ()) -> tuple[int, ...]:
    """The cuts that come nearest to the limits, whether or not they keep them.

    Raises:
        PlanError: as `cut_stages`; or no place has a limit.
    """
    check(layers, places, 1, ranks)
    if shares_ranks(ranks):
        return _cut_shared(layers, places, 1, ranks, 0.0)[0].cuts
    return least_excess(layers, places).cuts


def nothing_fits(layers: Layers, places: Sequence[Place], ranks: Sequence[int] = ()) -> NothingFits:
    """The error for limits that no cuts keep: by how much, where, and what would help."""
    if shares_ranks(ranks):
        found, _ = _cut_shared(layers, places, 1, ranks, 0.0)
        limits = dict(zip(ranks, (p.limit for p in places), strict=True))
        at = max(limits, key=lambda r: found.rank_memory[r] - limits[r])
        cuts, nbytes, where = found.cuts, found.rank_memory[at] - limits[at], "rank"
        stages = [k for k, rank in enumerate(ranks) if rank == at]
    else:
        excess = least_excess(layers, places)
        cuts, at, nbytes, where = excess.cuts, excess.stage, excess.nbytes, "stage"
        stages = [at]
    held = [(k, range(cuts[k], (*cuts[1:], len(layers))[k])) for k in stages]
    state = fold(layers.state[i] for _, of in held for i in of)
    saved = fold(places[k].in_flight * layers.saved[i] for k, of in held for i in of)
    transient = max(places[k].transient for k in stages)
    helps = {
        "tensor parallelism, more stages or a sharded optimizer": state,
        "recomputation, smaller microbatches, tensor parallelism or a schedule with fewer in flight": saved,
        "smaller microbatches or recomputation": transient,
    }
    return NothingFits(
        f"each {where} keeps within the memory of its device",
        f"the best-fitting cuts {list(cuts)} need {nbytes:.0f} bytes too many on {where} {at} (layers "
        f"{', '.join(f'{of[0]} to {of[-1]}' for _, of in held)}): state {state:.0f}, saved for microbatches in flight "
        f"{saved:.0f}, transient {transient:.0f}; the limit is {places[stages[0]].limit:.0f}",
        f"use {max(helps, key=lambda h: helps[h])}; or devices with more memory",
        at=at,
        nbytes=nbytes,
    )


def check(
    layers: Layers, places: Sequence[Place], microbatches: int, ranks: Sequence[int] = (), evenness: float = 0.0
) -> None:
    """Raise the error that explains the first thing wrong with what layers and places are together."""
    if not places or microbatches < 1:
        raise PlanError(
            "a pipeline has at least one stage and one microbatch",
            f"{len(places)} places, microbatches={microbatches}",
            "give one Place per stage and a positive number of microbatches",
        )
    if len(layers) < len(places):
        raise TooFewUnits(
            "each pipeline stage holds at least one layer",
            f"{len(layers)} layers for {len(places)} stages",
            f"use {len(layers)} stages or fewer",
        )
    for k, place in enumerate(places):
        if not 0 <= place.device_class < len(layers.times):
            raise PlanError(
                "each stage runs on a class of device that has times",
                f"stage {k} has device_class {place.device_class}; times has rows 0 to {len(layers.times) - 1}",
                "measure or estimate the layers on that class of device",
            )
    check_ranks(ranks, len(places))
    if not 0.0 <= evenness <= 1.0:
        raise PlanError("evenness lies between 0 and 1", f"evenness={evenness}", "0 is ranks only")
    for rank in set(ranks):
        kinds = {(p.device_class, p.limit) for p, r in zip(places, ranks, strict=True) if r == rank}
        if len(kinds) > 1:
            raise PlanError(
                "the stages of a rank run on one device, with one limit",
                f"rank {rank} has (device_class, limit) {sorted(kinds)}",
                "give these places the same device_class and limit",
            )
    bytes_in = fold(t.nbytes * len(t.targets) for t in layers.tensors)
    links = max(bytes_in * p.seconds_per_byte + len(layers.tensors) * len(layers) * p.latency for p in places)
    slowest = max(fold(layers.times[c]) for c in {p.device_class for p in places})
    fullest = fold(layers.state) + max(p.in_flight for p in places) * fold(layers.saved)
    if not (math.isfinite((microbatches + len(places)) * (slowest + links)) and math.isfinite(fullest)):
        raise PlanError(
            "costs fit into a float64",
            f"slowest device {slowest} s, transfers {links} s, memory {fullest} bytes, microbatches {microbatches}",
            "check the units of these costs: seconds and bytes",
        )
