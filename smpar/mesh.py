"""Ranks as points of a mesh with three axes: pipeline, (reduced) data and tensor parallelism. Pure arithmetic.

The placement names the axes, slowest first: D = data-parallel replica, P = pipeline, T = tensor. With 8 ranks,
pp = 2, tp = 2 (so rdp = 2):

    placement DPT (`cluster`)              placement TPD (`spread`)

             p0      p1                             p0      p1
           t0  t1  t0  t1                         t0  t1  t0  t1
    d0      0   1   2   3                   d0     0   4   2   6
    d1      4   5   6   7                   d1     1   5   3   7

Under DPT a replica (row) is made of neighbouring ranks; under TPD the copies of one shard (column) are.

An explicit order names the rank at each place instead; places are counted as under PDT. ``order=(2, 3, 0, 1)`` with
pp = 2 puts the pipeline's first ranks on the second machine of two::

             p0  p1
    d0        2   0
    d1        3   1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from smpar.errors import MeshError

Axis = Literal["world", "pp", "tp", "rdp", "mp", "dp"]
AXES: tuple[Axis, ...] = get_args(Axis)

PLACEMENT_NAMES = {"cluster": "DPT", "spread": "TPD"}


class Coords(NamedTuple):
    """Where a rank stands: pipeline rank, replica (reduced data-parallel rank), tensor-parallel rank."""

    pp: int
    rdp: int
    tp: int


def placement_letters(placement: str) -> str:
    """The three letters of a placement: ``cluster`` -> ``DPT``, ``spread`` -> ``TPD``, ``ptd`` -> ``PTD``.

    Raises:
        MeshError: it is neither a known name nor a permutation of D, P, T.
    """
    letters = PLACEMENT_NAMES.get(placement.lower(), placement.upper())
    if sorted(letters) != ["D", "P", "T"]:
        raise MeshError(
            "a placement is `cluster`, `spread`, or an order of the letters D, P, T",
            f"placement_strategy = {placement!r}",
            'smpar.init({"placement_strategy": "cluster"})',
        )
    return letters


@dataclass(frozen=True)
class Mesh:
    """The mesh of ``world_size`` ranks with ``pp`` stages and ``tp`` shards; the rest is data-parallel replicas.

    An axis' groups are the sets of ranks that differ along that axis only. ``mp`` runs along pp and tp (one
    replica), ``dp`` along rdp and tp (all ranks that hold one stage), ``world`` along all. Within a group the
    order is that of the global ranks, which for pp, tp and rdp is also the order of their coordinate; with an explicit
    ``order`` it is that of the places (of the global ranks along ``world``).

    Attributes:
        order: the rank at place ``tp + tp_degree * (rdp + rdp_degree * pp)``, instead of a placement.

    Raises:
        MeshError: a degree is below 1, or ``pp * tp`` does not divide ``world_size``, or the placement is unknown, or
            the order does not name each rank once.
    """

    world_size: int
    pp: int = 1
    tp: int = 1
    placement: str = "DPT"
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.world_size, self.pp, self.tp) < 1:
            raise MeshError(
                "the number of ranks and all degrees are at least 1",
                f"world size {self.world_size}, pipeline {self.pp}, tensor {self.tp}",
                "set the degrees to 1 or more",
            )
        if self.world_size % (self.pp * self.tp):
            fits = self.pp * self.tp * (self.world_size // (self.pp * self.tp) + 1)
            raise MeshError(
                "the pipeline degree times the tensor degree must divide the number of ranks",
                f"{self.pp} x {self.tp} = {self.pp * self.tp}, with {self.world_size} ranks",
                f"start {fits} ranks (torchrun --nproc-per-node), or change pipeline_parallel_degree "
                "or tensor_parallel_degree",
            )
        if self.order and sorted(self.order) != list(range(self.world_size)):
            raise MeshError(
                "an order of ranks names each of them once",
                f"{self.order} for {self.world_size} ranks",
                f"give the numbers 0 to {self.world_size - 1}, each once",
            )
        object.__setattr__(self, "placement", "PDT" if self.order else placement_letters(self.placement))

    @property
    def rdp(self) -> int:
        """Number of data-parallel replicas."""
        return self.world_size // (self.pp * self.tp)

    def coords(self, rank: int) -> Coords:
        """The coordinates of a global rank.

        Raises:
            MeshError: the rank is not in ``0 .. world_size - 1``.
        """
        self._check(rank)
        rest, at = self._places[rank] if self.order else rank, {}
        for letter in reversed(self.placement):
            rest, at[letter] = divmod(rest, self._degree(letter))
        return Coords(pp=at["P"], rdp=at["D"], tp=at["T"])

    def rank(self, pp: int = 0, rdp: int = 0, tp: int = 0) -> int:
        """The global rank at these coordinates.

        Raises:
            MeshError: a coordinate is outside its axis.
        """
        at, rank = {"P": pp, "D": rdp, "T": tp}, 0
        for letter in self.placement:
            degree = self._degree(letter)
            if not 0 <= at[letter] < degree:
                raise MeshError(
                    "a coordinate is at least 0 and below its axis' degree",
                    f"pp {pp} of {self.pp}, rdp {rdp} of {self.rdp}, tp {tp} of {self.tp}",
                    "use coordinates inside the mesh",
                )
            rank = rank * degree + at[letter]
        return self.order[rank] if self.order else rank

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The global ranks of the group along ``axis`` that ``rank`` is in, ascending (see above for an ``order``).

        Raises:
            MeshError: the rank is not in ``0 .. world_size - 1``.
        """
        here = self.coords(rank)
        pps = range(self.pp) if axis in ("world", "mp", "pp") else (here.pp,)
        rdps = range(self.rdp) if axis in ("world", "dp", "rdp") else (here.rdp,)
        tps = range(self.tp) if axis in ("world", "mp", "dp", "tp") else (here.tp,)
        ranks = [self.rank(p, d, t) for p in pps for d in rdps for t in tps]
        return tuple(ranks if self.order and axis != "world" else sorted(ranks))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axis``; each rank is in exactly one. Ordered by their first rank."""
        seen: dict[tuple[int, ...], None] = {}
        done: set[int] = set()
        for rank in range(self.world_size):
            if rank not in done:
                group = self.group(axis, rank)
                seen[group] = None
                done.update(group)
        return tuple(seen)

    def index(self, axis: Axis, rank: int) -> int:
        """The position of ``rank`` within its group along ``axis``: its pp_rank, mp_rank, and so on."""
        return self.group(axis, rank).index(rank)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.order)}

    def _degree(self, letter: str) -> int:
        return {"P": self.pp, "D": self.rdp, "T": self.tp}[letter]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise MeshError(
                "a rank is at least 0 and below the number of ranks",
                f"rank {rank} of {self.world_size}",
                "use a rank inside the world",
            )
