"""How a region is divided: the linears between which each rank works on its heads or channels.

Heads are divided as evenly as they go, whole ones. Where queries share key and value heads, all of a group go together;
with fewer of those than ranks, several ranks work with one, each on its queries (here 6 and 2, on 4 ranks)::

    queries           | 0 1 | 2 | 3 4 | 5 |        sliced
    keys and values   |    0    |    1    |        whole on each rank, which takes the rows that it needs
    rank                 0    1    2    3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from smpar.nn.experts import Experts
from smpar.nn.group import TensorGroup, partial
from smpar.nn.linears import in_features, out_dim, out_features, slice_columns, slice_rows
from smpar.nn.module import become, partial_rest, slice_parameter
from smpar.nn.twins import Places, Region, SharedColumns, WholeRegion, region_entries
from smpar.slices import Slicing, bounds_of

if TYPE_CHECKING:
    from smpar.nn.family import Family


@dataclass
class Found:
    """A region, as far as a plan says.

    Attributes:
        columns: linears by output features, each with its number of blocks; an embedding has a feature per head.
        rows: linears by input features.
        experts: modules of experts.
        inside: regions in this one, beside its experts.
        unserved: words of the plan that are not known here.
    """

    path: str
    module: nn.Module
    columns: list[tuple[nn.Module, int]] = field(default_factory=list)
    rows: list[nn.Module] = field(default_factory=list)
    experts: list[nn.Module] = field(default_factory=list)
    inside: list[Found] = field(default_factory=list)
    unserved: set[str] = field(default_factory=set)

    def rest(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that the plan does not speak of."""
        spoken = {id(p) for m in (*(m for m, _ in self.columns), *self.rows, *self.experts) for p in m.parameters()}
        return ((name, p) for name, p in self.module.named_parameters() if id(p) not in spoken)


@dataclass(frozen=True)
class Shares:
    """Which heads or channels each rank works on.

    Attributes:
        units: the number of pieces that all consist of.
        bounds: for each rank its pieces, from and to.
        shared: the number of key and value heads, if ranks share them.
        head: features of a piece, where it is a head.
    """

    units: int
    bounds: tuple[tuple[int, int], ...]
    shared: int = 0
    head: int = 1

    def slicing(self, dim: int, length: int, blocks: int = 1) -> Slicing:
        """Of a dim of that length, which consists of so many blocks of all units."""
        block, unit = length // blocks, length // blocks // self.units
        runs = (tuple((b * block + i * unit, b * block + j * unit) for b in range(blocks)) for i, j in self.bounds)
        return Slicing(dim, length, tuple(runs))


def head_of(module: nn.Module, family: Family) -> int:
    """The number of features that stay together in a region."""
    return next((h for name in family.head if isinstance(h := getattr(module, name, None), int)), 1)


def shares_of(region: Found, head: int, ranks: int) -> Shares | str:
    """How to divide a region; or why not."""
    if region.unserved:
        return f"{', '.join(sorted(region.unserved))} in its plan is not served"
    if not region.rows:
        return "no row-parallel linear ends it"
    strange = next((name for name, p in region.rest() if p.dim() != 1 or p.shape[0] != head or head == 1), None)
    if strange is not None:
        return f"its plan does not speak of its {strange}"
    queries = [in_features(m) / head for m in region.rows]
    counts = [out_features(m) / (1 if isinstance(m, nn.Embedding) else head * n) for m, n in region.columns]
    least, most = int(min(counts + queries)), int(max(counts + queries))
    if least >= ranks and all(count % least == 0 for count in counts + queries):
        return Shares(least, tuple(bounds_of(least, ranks)), head=head)
    if least and ranks % least == 0 and {*counts} == {least, most} and {*queries} == {most} and most % least == 0:
        together, sharing = most // least, ranks // least
        if together >= sharing:
            parts = bounds_of(together, sharing)
            bounds = tuple((g * together + i, g * together + j) for g in range(least) for i, j in parts)
            return Shares(most, bounds, least, head)
    return f"it has {least} heads or channels for {ranks} ranks"


def divide_region(region: Found, family: Family, group: TensorGroup) -> None:
    """Make twins of a region and its linears, in place."""
    if region.experts:
        _divide_experts(region, family, group)
        return
    head = head_of(region.module, family)
    shares = shares_of(region, head, group.size)
    if isinstance(shares, str):
        keep_whole(region.module, shares, family, group)
        return
    divide_linears(region, shares, group)
    _set_counts(region.module, shares, family, group)
    for _, parameter in region.rest():
        partial(parameter, group)
    places = Places(region.module.forward)
    become(
        region.module,
        Region,
        group,
        entries=region_entries(places.names, family.others),
        places=places,
        open=any(linear is region.module for linear, _ in region.columns),
        shares=tuple(stop - start for start, stop in shares.bounds) if head > 1 else (),
    )


def divide_linears(region: Found, shares: Shares, group: TensorGroup, inside: bool = False) -> None:
    """Slice the linears of a region.

    Args:
        inside: another region, around this one, begins and ends the work on slices.
    """
    for linear, blocks in region.columns:
        length = out_features(linear)
        if shares.shared and length == shares.shared * shares.head:
            first = group.rank * shares.shared // group.size * shares.head
            become(linear, SharedColumns, group, rows=(first, first + shares.head))
            partial_rest(linear, group)
            continue
        slice_columns(linear, shares.slicing(out_dim(linear), length, blocks), group)
    for linear in region.rows:
        slice_rows(linear, shares.slicing(1 - out_dim(linear), in_features(linear)), group, inside=inside)


def _divide_experts(region: Found, family: Family, group: TensorGroup) -> None:
    """Give each rank some of the experts, whole; all see all tokens, and the results are summed at the region's end."""
    module = region.module
    found = {experts: experts_of(experts) for experts in region.experts}
    inside = [(part, shares_of(part, 1, group.size)) for part in region.inside]
    why = next((shares for _, shares in inside if isinstance(shares, str)), None)
    if region.unserved:
        why = f"{', '.join(sorted(region.unserved))} in its plan is not served"
    served = {id(m) for part in (*region.experts, *(part.module for part in region.inside)) for m in part.modules()}
    strange = next((n for n, m in module.named_modules() if n and any(m.children()) and id(m) not in served), None)
    if strange is not None:
        why = f"its plan does not speak of its {strange}"
    if min(found.values()) < group.size:
        why = f"it has {min(found.values())} experts for {group.size} ranks"
    if why is not None:
        keep_whole(module, why, family, group)
        return
    for experts, count in found.items():
        slicing = Slicing.even(0, count, group.size)
        for parameter in experts.parameters():
            slice_parameter(parameter, slicing, group)
        become(experts, Experts, group, first=slicing.runs[group.rank][0][0], num_experts=slicing.size(group.rank))
    for part, shares in inside:
        assert isinstance(shares, Shares)
        divide_linears(part, shares, group, inside=True)
    partial_rest(module, group)
    places = Places(module.forward)
    entries = region_entries(places.names, family.others)
    become(module, Region, group, entries=entries, places=places, leaves=True, alike=True)


def experts_of(module: nn.Module) -> int:
    """The number of experts in a module that holds their parameters stacked; 0 if it does not."""
    counts = {p.shape[0] for p in module.parameters()}
    count = getattr(module, "num_experts", None)
    return count if isinstance(count, int) and counts == {count} else 0


def keep_whole(module: nn.Module, why: str, family: Family, group: TensorGroup) -> None:
    """Make a module work on whole sequences, alike on all ranks."""
    places = Places(module.forward)
    become(module, WholeRegion, group, entries=region_entries(places.names, family.others), places=places, why=why)


def _set_counts(module: nn.Module, shares: Shares, family: Family, group: TensorGroup) -> None:
    start, stop = shares.bounds[group.rank]
    for name in family.counts:
        count = getattr(module, name, None)
        if isinstance(count, int) and count % shares.units == 0:
            setattr(module, name, count // shares.units * (stop - start))
    for name in family.queries_per_key if shares.shared else ():
        if hasattr(module, name):
            setattr(module, name, stop - start)
