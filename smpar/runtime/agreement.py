"""At the start of each step the ranks of a replica make sure that they do the same, and share a seed.

Two questions, each one small exchange:

    agree           were all called with the same step function, batch, and modes?     each step
    agree_programs  do all run the same modules and operations on the same stages?     where a program is new

Without the second, a step that looks at its rank would be silently wrong, or wait for ever.

Ranks of a tensor-parallel group that have samples of their own must have equal shapes, not equal values:

              tp 0   tp 1                            tp 0   tp 1
    pp 0       a  ==  b   shapes                      a  ==  a
    pp 1       a  ==  b   and values down             a  ==  a    ``prescaled_batch``: values everywhere
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from smpar.comm.messages import CommGroup, allgather, broadcast
from smpar.comm.world import World
from smpar.errors import BatchesDisagree, ProgramsDisagree, RanksDisagree, ShapesDisagree
from smpar.stage.layout import Layout
from smpar.stage.record import Event, MicrobatchProgram
from smpar.trace import tree
from smpar.trace.outcome import Out, meta_of

_SAMPLE = 1 << 18  # bytes of a tensor that go into its checksum
_Line = tuple[str, str]  # what a program does, and what that gives
_CHECKED_ON_CUDA = 3  # steps whose contents are compared on CUDA, where each comparison waits for the device


@dataclasses.dataclass(frozen=True)
class Called:
    """How one rank was called for a step.

    Attributes:
        step: number of the step on this rank.
        function: the step function's name.
        arguments: name -> value, as given by the user.
        circumstances: what else decides what a step does: modes of the model and of the thread. Printable values.
        digest: a checksum of these.
        known: whether its programs are known, so that no rank needs to compare them.
    """

    step: int
    function: str
    arguments: Mapping[str, Any]
    circumstances: Callable[[], Mapping[str, Any]]
    digest: int
    known: bool


def agree(world: World, called: Called, seed: int, joined: bool) -> tuple[int, bool]:
    """Compare how the ranks of this rank's replica (its pipeline and tensor-parallel groups) were called.

    Args:
        seed: this rank's draw.
        joined: whether ranks of a tensor-parallel group have samples of their own.

    Returns:
        the first rank's seed, and whether the program of every rank is known.

    Raises:
        RanksDisagree: on every rank, naming the first argument or mode that differs.
    """
    contents = world.device.type != "cuda" or called.step < _CHECKED_ON_CUDA
    kind = zlib.crc32(repr((called.function, called.step, called.digest)).encode())
    values = 0
    for name, value in called.arguments.items():
        kind, values = _marks(value, contents, zlib.crc32(name.encode(), kind), values)
    table = _gather(world, [kind, values, seed, int(called.known)])
    firsts = _firsts(world, joined)
    if any(row[0] != kind or row[1] != table[first][1] for row, first in zip(table, firsts, strict=True)):
        _explain(world, called, firsts, ShapesDisagree if joined else BatchesDisagree)
    return table[0][2], all(row[3] for row in table)


def _firsts(world: World, joined: bool) -> list[int]:
    """For each rank of a replica the first one with the same batch; both as places in its group."""
    column = [world.mesh.coords(rank).tp if joined else 0 for rank in world.group("mp")]
    return [column.index(tp) for tp in column]


def agree_programs(world: World, programs: Sequence[MicrobatchProgram] | None, layout: Layout) -> None:
    """Compare the microbatches' programs over the replica; None stands for programs not known beforehand.

    Shapes are compared over the pipeline only, as slices inside of distributed modules may be unequal.

    Raises:
        ProgramsDisagree: on every rank, naming the first module or operation that differs.
    """
    lines = _lines(programs, layout)
    what, shapes = (zlib.crc32("\n".join(column).encode()) for column in zip(*lines, strict=True))
    firsts = _firsts(world, True)
    table = _gather(world, [what, shapes])
    if all(row[0] == what and row[1] == table[first][1] for row, first in zip(table, firsts, strict=True)):
        return
    every, ranks = allgather(lines, CommGroup.MP_GROUP), world.group("mp")
    for theirs, rank in zip(every, ranks, strict=True):
        _same_lines(every[0], theirs, ranks[0], rank, shapes=False)
    for theirs, rank, first in zip(every, ranks, firsts, strict=True):
        _same_lines(every[first], theirs, ranks[first], rank, shapes=True)
    raise ProgramsDisagree("the programs' checksums differ")


def _same_lines(first: Sequence[_Line], other: Sequence[_Line], base: int, rank: int, shapes: bool) -> None:
    here, there = ([line if shapes else line[:1] for line in lines] for lines in (first, other))
    if here != there:
        common = min(len(here), len(there))
        at = next((i for i in range(common) if here[i] != there[i]), common)
        told = ["".join(lines[at]) if at < len(lines) else "nothing more" for lines in (first, other)]
        raise ProgramsDisagree(f"operation {at}: {told[0]} on rank {base}, {told[1]} on rank {rank}")


def share_costs(world: World, programs: Sequence[MicrobatchProgram] | None) -> None:
    """Give the programs' segments the costs that they have on the first rank of the tensor-parallel group.

    Slices may be unequal, and what they cost; but schedules, which follow the costs, have to be equal on all ranks.
    """
    if world.axis_size("tp") == 1:
        return
    own = list(dict.fromkeys(programs or ()))
    costs = [[(s.forward, s.backward, s.weight, s.saved) for s in p.shape.segments] for p in own]
    first = broadcast(costs, CommGroup.TP_GROUP, src=0)
    if list(map(len, first)) != list(map(len, costs)):
        return  # other programs: `agree_programs` says so
    for program, theirs in zip(own, first, strict=True):
        segments = tuple(
            dataclasses.replace(s, forward=forward, backward=backward, weight=weight, saved=saved)
            for s, (forward, backward, weight, saved) in zip(program.shape.segments, theirs, strict=True)
        )
        program.shape = dataclasses.replace(program.shape, segments=segments)


def _gather(world: World, numbers: list[int]) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(world.axis_size("mp"))]
    # the group itself: the wrapper around it takes as long as the transfer, in every step
    world.process_group("mp").allgather([everyone], [mine]).wait()
    return [row.tolist() for row in everyone]


def _lines(programs: Sequence[MicrobatchProgram] | None, layout: Layout) -> list[_Line]:
    if programs is None:
        return [("program order", "")]
    distinct = list(dict.fromkeys(programs))
    lines = [line for program in distinct for line in _program_lines(program, layout)]
    # Schedules follow the costs: where these differ, ranks would take each other's messages for others of their size.
    return lines + [(f"costs of {segment}", "") for program in distinct for segment in program.shape.segments]


def _program_lines(program: MicrobatchProgram, layout: Layout) -> list[_Line]:
    lines = [(f"state in {program.in_turn}", "")] if program.in_turn else []
    for event in program.events:
        if not isinstance(event, Event):
            lines.append(("model.backward", ""))
            continue
        name = layout.name(event.target)
        if " at 0x" in name:  # an address is another one on each rank
            name = type(event.target).__name__
        made = [
            f"{place.meta.dtype} {list(place.meta.shape)}{' with gradient' if place.meta.requires_grad else ''}"
            if isinstance(place, Out)
            else f"argument {place}"
            for place in (*event.outcome.places, *(out for _, out in event.outcome.written))
        ]
        origins = ", ".join("-" if i is None else f"#{i}" for i in event.inputs)
        draws = f" with {event.outcome.draws} draws" if event.outcome.draws else ""
        lines.append((f"{name} on stage {event.stage} of ({origins}){draws}", f" -> {', '.join(made)}"))
    return lines


def _layout(spec: tree.Spec) -> Any:
    if isinstance(spec, tree.Const):
        return str(spec.key)
    if isinstance(spec, tree.Node):
        return spec.cls.__name__, str(spec.aux), tuple(_layout(child) for child in spec.children)
    return "*"


def _marks(value: Any, contents: bool, kind: int, values: int) -> tuple[int, int]:
    """Checksums of what a value is (structure, constants, shapes of tensors), and of its tensors' contents."""
    leaves: list[torch.Tensor] = []
    spec = tree.flatten(value, leaves)
    kind = zlib.crc32(repr(_layout(spec)).encode(), kind)
    for leaf in leaves:
        meta = meta_of(leaf)
        kind = zlib.crc32(repr((meta.shape, meta.dtype)).encode(), kind)
        if contents and leaf.numel() and leaf.layout is torch.strided and meta.device.type != "meta":
            values = zlib.crc32(_sample(leaf), values)
    return kind, values


def _sample(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1)
    step = -(-flat.numel() * flat.element_size() // _SAMPLE)
    return flat[::step].contiguous().cpu().view(torch.uint8).numpy().data


def _explain(world: World, called: Called, firsts: Sequence[int], across: type[RanksDisagree]) -> None:
    """Exchange everything, and raise the same error on every rank.

    Args:
        across: what to raise if ranks of a tensor-parallel group differ in an argument.
    """
    arguments = {name: (*_marks(value, True, 0, 0), _shown(value)) for name, value in called.arguments.items()}
    table = allgather((called.function, called.step, arguments, dict(called.circumstances())), CommGroup.MP_GROUP)
    ranks = world.group("mp")
    columns = [world.mesh.coords(rank).tp for rank in ranks]

    def same_arguments(by: int, place: int, base: int) -> None:
        error = RanksDisagree if columns[place] == columns[base] else across
        _same_arguments(table[base], table[place], ranks[base], ranks[place], by, error)

    checks: list[Callable[[int], None]] = [
        lambda place: _same_call(table[0], table[place], ranks[0], ranks[place]),
        lambda place: _same_modes(table[0][3], table[place][3], ranks[0], ranks[place]),
        lambda place: same_arguments(_BY_SHAPE, place, 0),
        lambda place: same_arguments(_BY_VALUES, place, firsts[place]),
    ]
    for check in checks:
        for place in range(1, len(ranks)):
            check(place)
    raise RanksDisagree(f"the arguments of {called.function} differ")


def _shown(value: Any) -> str:
    leaves: list[torch.Tensor] = []
    spec = tree.flatten(value, leaves)
    if leaves:
        return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in leaves)
    text = str(spec.key) if isinstance(spec, tree.Const) else type(value).__name__
    return text if len(text) < 80 else type(value).__name__


def _same_call(first: Any, other: Any, base: int, rank: int) -> None:
    if first[0] != other[0]:
        raise RanksDisagree(f"rank {base} calls {first[0]}, rank {rank} calls {other[0]}")
    if first[1] != other[1]:
        raise RanksDisagree(
            f"{first[0]} is step {first[1]} on rank {base}, but step {other[1]} on rank {rank}, which has called "
            f"{'fewer' if other[1] < first[1] else 'more'} steps"
        )
    if list(first[2]) != list(other[2]):
        raise RanksDisagree(
            f"{first[0]} gets the arguments {', '.join(first[2])} on rank {base}, {', '.join(other[2])} on rank {rank}"
        )


def _same_modes(first: dict[str, Any], other: dict[str, Any], base: int, rank: int) -> None:
    for name, value in first.items():
        if name in other and other[name] != value:  # a rank whose batch cannot be split tells no modes
            raise ProgramsDisagree(f"{name}: {value} on rank {base}, {other[name]} on rank {rank}")


_BY_SHAPE, _BY_VALUES = 0, 1


def _same_arguments(first: Any, other: Any, base: int, rank: int, by: int, error: type[RanksDisagree]) -> None:
    for name, argument in first[2].items():
        if other[2][name][by] != argument[by]:
            shown, there = argument[2], other[2][name][2]
            what = f"{shown} on rank {base}, {there} on rank {rank}"
            if shown == there:
                what = f"{shown} with other values on rank {base} than on rank {rank}"
            raise error(f"argument {name} of {first[0]}: {what}")
