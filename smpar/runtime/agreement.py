"""At the start of each step the ranks of a pipeline make sure that they were called alike, and share a seed."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from smpar.comm.messages import CommGroup, allgather
from smpar.comm.world import World
from smpar.errors import RanksDisagree
from smpar.trace import tree
from smpar.trace.fake import meta_of

_SAMPLE = 1 << 18  # bytes of a tensor that go into its checksum
_CHECKED_ON_CUDA = 3  # steps whose contents are compared on CUDA, where each comparison waits for the device


def agree(world: World, step: int, name: str, arguments: Any, seed: int) -> int:
    """Compare the step's arguments over this rank's pipeline group.

    Args:
        step: number of the step.
        name: the step function's.
        arguments: (args, kwargs) as given by the user.
        seed: this rank's draw.

    Returns:
        the first rank's seed.

    Raises:
        RanksDisagree: on every rank, naming the first argument that differs.
    """
    leaves: list[torch.Tensor] = []
    spec = tree.flatten(arguments, leaves)
    contents = world.device.type != "cuda" or step < _CHECKED_ON_CUDA
    mark = zlib.crc32(repr((name, step, _layout(spec))).encode())
    for leaf in leaves:
        mark = _checksum(leaf, contents, mark)
    group = world.process_group("pp")
    mine = torch.tensor([mark, seed], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(world.axis_size("pp"))]
    dist.all_gather(everyone, mine, group=group)
    table = torch.stack(everyone).tolist()
    if any(row[0] != mark for row in table):
        _explain(world, step, name, arguments)
    return int(table[0][1])


def _layout(spec: tree.Spec) -> Any:
    if isinstance(spec, tree.Const):
        return str(spec.key)
    if isinstance(spec, tree.Node):
        return spec.cls.__name__, str(spec.aux), tuple(_layout(child) for child in spec.children)
    return "*"


def _checksum(tensor: torch.Tensor, contents: bool, start: int) -> int:
    meta = meta_of(tensor)
    mark = zlib.crc32(repr((meta.shape, meta.dtype)).encode(), start)
    if not contents or tensor.numel() == 0 or tensor.layout is not torch.strided or meta.device.type == "meta":
        return mark
    flat = tensor.detach().reshape(-1)
    step = -(-flat.numel() * flat.element_size() // _SAMPLE)
    sample = flat[::step].contiguous().cpu()
    return zlib.crc32(memoryview(sample.view(torch.uint8).numpy()), mark)


def _explain(world: World, step: int, name: str, arguments: Any) -> None:
    args, kwargs = arguments
    parts: list[tuple[str, str, int]] = []
    for label, value in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
        leaves: list[torch.Tensor] = []
        spec = tree.flatten(value, leaves)
        mark = zlib.crc32(repr(_layout(spec)).encode())
        for leaf in leaves:
            mark = _checksum(leaf, True, mark)
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves) or type(value).__name__
        parts.append((str(label), shapes, mark))
    table = allgather((name, step, parts), CommGroup.PP_GROUP)
    ranks = world.group("pp")
    for row, rank in zip(table, ranks, strict=True):
        if row[:2] != table[0][:2]:
            raise RanksDisagree(f"rank {ranks[0]} runs {table[0][0]}, step {table[0][1]}; rank {rank} {row[0]}, {row[1]}")
        for (label, shapes, mark), (label0, shapes0, mark0) in zip(row[2], table[0][2], strict=False):
            if (label, shapes, mark) != (label0, shapes0, mark0):
                what = f"shape {shapes0} on rank {ranks[0]}, {shapes} on rank {rank}"
                raise RanksDisagree(
                    f"{label} of {name}: {what if shapes != shapes0 else f'other values on ranks {ranks[0]} and {rank}'}"
                )
    raise RanksDisagree(f"the number of arguments of {name} differs")
