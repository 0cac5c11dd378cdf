"""A model as one rank of a tensor-parallel group has it, on a single process: to trace it, or to time it alone.

    model ──copy──▶ distribute(copy, group without processes) ──▶ the same names, smaller parameters

The units of the undivided model and of the divided ones are the same, by name: what cannot be cut in one stays whole in
all. Divided is what ``optimize="memory"`` gives, the default.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from smpar.nn.distribute import distribute
from smpar.nn.group import TensorGroup, assumed
from smpar.nn.marks import mark_as
from smpar.nn.registry import remember_as
from smpar.nn.twins import Region
from smpar.planner.profile import Divided, Layer, Profile
from smpar.probe.traces import tensors_of, tied_of
from smpar.runtime.partitioning import Explored
from smpar.slices import slicing_of

NOTHING = "nothing in the model is both marked for it (smpar.set_tensor_parallelism) and can be divided"


def divided_copy(model: nn.Module, tp: int, meta: bool) -> nn.Module | None:
    """The first rank's model, which has the most where heads do not divide evenly; None if nothing is divided.

    Args:
        model: stays as it is.
        tp: the degree.
        meta: put its parameters on the meta device.
    """
    memo: dict[int, Any] = {}
    if meta:
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    copied, group = copy.deepcopy(model, memo), TensorGroup(None, 0, tp, memory=True, joined=False)
    mark_as(copied, model)
    remember_as(copied, model)
    with assumed(group):
        made = distribute(copied, group)
    return made if any(slicing_of(p) is not None for p in made.parameters()) else None


def divided_copies(model: nn.Module, degrees: Iterable[int]) -> tuple[dict[int, nn.Module], str]:
    """Copies without data at the degrees above 1 that divide something; if there are none, why.

    A model that cannot be copied (its modules hold results of operations, locks, files) is not divided.
    """
    copies: dict[int, nn.Module] = {}
    wanted = [tp for tp in degrees if tp > 1]
    try:
        for tp in wanted:
            if (made := divided_copy(model, tp, meta=True)) is not None:
                copies[tp] = made
    except Exception as error:
        return {}, f"a copy to divide could not be made: {type(error).__name__}: {error}"
    return copies, NOTHING if wanted and not copies else ""


def alike(model: nn.Module, opened: Iterable[nn.Module], copies: Iterable[nn.Module]) -> set[nn.Module]:
    """Those of the opened modules that the copies have, too, not replaced by one of another class.

    Regions stay closed: only while it runs whole, one gathers again in its backward what else it would have to keep.
    """
    modules = [dict(c.named_modules()) for c in copies]
    names = {module: name for name, module in model.named_modules()}
    return {
        m
        for m in opened
        if all(isinstance(twin := there.get(names[m]), type(m)) and not isinstance(twin, Region) for there in modules)
    }


def counterparts(model: nn.Module, chosen: Iterable[nn.Module], other: nn.Module) -> set[nn.Module]:
    """Modules of the same names in another version of the model."""
    names, there = {m: name for name, m in model.named_modules()}, dict(other.named_modules())
    return {there[names[m]] for m in chosen}


def unlike(seen: Explored, other: Explored) -> str:
    """How the units of a divided model differ from those of the undivided one; empty if they do not."""
    here, there = ([unit.name for unit in x.graph.units] for x in (seen, other))
    odd = sorted(set(here) ^ set(there))
    return "" if here == there else f"divided, it runs other modules than undivided: {odd or there}"


def divided_of(tp: int, model: nn.Module, seen: Explored, size: int, whole: Profile, made: Sequence[Layer]) -> Divided:
    """What a divided model keeps and tells.

    Args:
        tp: the degree.
        model, seen: that model, traced with ``size`` samples.
        whole: of the undivided model.
        made: the divided model's layers, as `layers_of` gives them.
    """
    own = {id(p): p.numel() for p in model.parameters() if slicing_of(p) is None}
    everywhere = [float(sum(own.get(id(p), 0) for p in m.parameters())) for m in seen.modules]
    for key, index in seen.anchors.items():
        everywhere[index] += own.get(key, 0)
    told = [_told(seen, size, late) for late in (False, True)]
    return Divided(
        tp,
        tuple(x.parameters for x in made),
        tuple(everywhere),
        tuple(x.saved for x in made),
        tuple(x.transient for x in made),
        _matched([(t.layers, t.parameters) for t in whole.tied], [(t.layers, t.parameters) for t in tied_of(seen)]),
        _matched(
            [((t.source, t.targets), t.elements) for t in whole.tensors],
            [((t.source, t.targets), t.elements) for t in tensors_of(seen, size)],
        ),
        told[0][0],
        told[1][0],
        told[0][1],
        told[1][1],
    )


def _told(seen: Explored, size: int, late: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes per sample, and number, of each unit's collectives in the forward or (``late``) in the backward."""
    each = [[(w.told, times) for w, times in u.work if w.told and w.late == late] for u in seen.graph.units]
    return (
        tuple(sum(told * times for told, times in unit) / size for unit in each),
        tuple(float(sum(times for _, times in unit)) for unit in each),
    )


def _matched(wanted: Sequence[tuple[Any, float]], found: Sequence[tuple[Any, float]]) -> tuple[float, ...]:
    """For each wanted key the number found under it, in turn where there are several; its own if there is none."""
    by_key: dict[Any, list[float]] = {}
    for key, value in found:
        by_key.setdefault(key, []).append(value)
    return tuple(left.pop(0) if (left := by_key.get(key, [])) else value for key, value in wanted)
