"""Whole states of a model and its optimizer from the parts that ranks hold, and back.

One tensor after the other is made whole: its slices come together along ``tp``, on the stage that answers for it; from
there it goes to the others along ``pp``. With two stages of two slices each, for a parameter of stage 0::

                tp 0        tp 1                 tp 0        tp 1                   tp 0        tp 1
    stage 0    | a . |     | . b |    join      | a b |     | a b |   broadcast    | a b |     | a b |
    stage 1                           ────▶                            ────▶       | a b |     | a b |

A part of the model may have other parameters than the module in whose place it stands. It then has two methods, which
get and return whole tensors under their full names, those that begin with ``prefix``; what they do not get, they leave
out::

    def whole_state(self, state: dict[str, Any], prefix: str) -> dict[str, Any]: ...  # its names -> the other's
    def own_state(self, state: dict[str, Any], prefix: str) -> dict[str, Any]: ...    # the other's -> its names
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpar.comm.messages import CommGroup, allgather
from smpar.comm.world import World
from smpar.errors import OtherSlice
from smpar.mesh import Axis
from smpar.slices import Slicing, slicing_of

if TYPE_CHECKING:
    from smpar.runtime.pipeline import Pipeline

PARTIAL = "_smp_is_partial"  # key of a state dict: whether there is more on other ranks
SLICE = "_smp_slice"  # key of a partial one: rank and size of the tensor-parallel group that it was made on


# ---- whole from parts ------------------------------------------------------------------------------------------


def gather_state(module: nn.Module, pipeline: Pipeline | None, world: World) -> OrderedDict[str, Any]:
    """The whole state dict, copied, on every rank; all ranks of a replica call it together.

    Args:
        pipeline: None while every rank has all stages.
    """
    state = module.state_dict(keep_vars=True)
    owners = {} if pipeline is None else _owners(pipeline)
    wholes: dict[int, Tensor] = {}  # a tensor of several names is sent once, and stays one
    for name, part in state.items():
        if isinstance(part, Tensor):
            if id(part) not in wholes:
                wholes[id(part)] = _gathered(part, slicing_of(part), owners.get(id(part)), world)
            state[name] = wholes[id(part)]
    return translated(module, state, "whole_state")


def gather_optimizer_state(
    parameters: Sequence[Tensor], state: Mapping[int, dict[str, Any]], pipeline: Pipeline | None, world: World
) -> dict[int, dict[str, Any]]:
    """The whole state of an optimizer, on every rank; all ranks of a replica call it together.

    Args:
        parameters: all of them, in the order of their numbers.
        state: of the parameters that this rank holds, by number.
    """
    own = {n: s for n, s in state.items() if pipeline is None or pipeline.owns(parameters[n])}
    outline = {n: {k: _outline(v, parameters[n]) for k, v in s.items()} for n, s in own.items()}
    outlines = [outline] if pipeline is None else allgather(outline, CommGroup.PP_GROUP)
    owners = {number: rank for rank, part in enumerate(outlines) for number in part}

    def whole(number: int, key: str, entry: Any) -> Any:
        if not isinstance(entry, _LikeParameter):
            return entry
        part = own[number][key] if number in own else torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return _gathered(part, slicing_of(parameters[number]), owners[number] if pipeline is not None else None, world)

    return {
        number: {key: whole(number, key, entry) for key, entry in outlines[owners[number]][number].items()}
        for number in sorted(owners)
    }


@dataclass(frozen=True)
class _LikeParameter:
    """Stands for a tensor of a parameter's shape, of which each rank holds what it holds of the parameter."""

    shape: torch.Size
    dtype: torch.dtype


def _outline(value: Any, parameter: Tensor) -> Any:
    return _LikeParameter(value.shape, value.dtype) if _is_like(value, parameter.shape) else value


def _is_like(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == tuple(shape)


def _owners(pipeline: Pipeline) -> dict[int, int]:
    """Id of each tensor that stages have to themselves -> the rank of the pipeline that answers for it."""
    layout = pipeline.layout
    owners = {key: layout.ranks[stage] for key, stage in layout.parameter_home.items()}
    for unit, stage in layout.units.items():
        for buffer in unit.buffers():
            owners.setdefault(id(buffer), layout.ranks[stage])
    return owners


def _gathered(part: Tensor, slicing: Slicing | None, owner: int | None, world: World) -> Tensor:
    """A whole tensor, as a contiguous copy.

    Args:
        part: what this rank holds; on other stages than the owner's it tells shape and type only.
        owner: rank of the pipeline that answers for it; None: all do.
    """
    shape = tuple(part.shape) if slicing is None else slicing.whole_shape(part.shape)
    part = part.detach()
    if owner is None and part.is_meta:
        return part.new_empty(shape)
    if owner is not None and owner != world.axis_rank("pp"):
        whole = torch.empty(shape, dtype=part.dtype, device=world.device)
    else:
        whole = _plain(part) if slicing is None else slicing.join(_parts(_plain(part), slicing, world))
    if owner is not None:
        _broadcast(whole, owner, "pp", world)
    return whole


def _plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _parts(part: Tensor, slicing: Slicing, world: World) -> list[Tensor]:
    """The slices of a tensor-parallel group's ranks, which may be of unequal sizes."""
    shape, parts = list(part.shape), []
    for rank in range(world.axis_size("tp")):
        shape[slicing.dim] = slicing.size(rank)
        parts.append(part if rank == world.axis_rank("tp") else part.new_empty(shape))
        _broadcast(parts[-1], rank, "tp", world)
    return parts


def _broadcast(tensor: Tensor, source: int, axis: Axis, world: World) -> None:
    """Fill a contiguous tensor with what the rank ``source`` along an axis has in its own, whatever the type."""
    if tensor.numel() and world.axis_size(axis) > 1:
        bits = tensor.view(-1).view(torch.uint8)
        dist.broadcast(bits, world.group(axis)[source], group=world.process_group(axis))


# ---- parts from wholes -----------------------------------------------------------------------------------------


def load_state(
    module: nn.Module, state: Mapping[str, Any], strict: bool, holds: Callable[[Tensor], bool], world: World
) -> Any:
    """Load this rank's part of a whole or partial state dict.

    Args:
        holds: whether this rank has a tensor's data.

    Returns:
        names that are missing and names that are too many, as ``nn.Module.load_state_dict`` does.

    Raises:
        RuntimeError: names or shapes that do not fit, as there.
        OtherSlice: see `is_partial`.
    """
    partial = is_partial(state, world)
    given = _like(state, ((n, v) for n, v in state.items() if n not in (PARTIAL, SLICE)))
    if not partial:
        given = translated(module, given, "own_state")
    misfits = []
    for name, target in module.state_dict(keep_vars=True).items():
        value = given.get(name)
        if not isinstance(value, Tensor) or not isinstance(target, Tensor):
            continue
        slicing = None if partial else slicing_of(target)
        if slicing is not None:
            whole = slicing.whole_shape(target.shape)
            if tuple(value.shape) != whole:
                misfits.append(
                    f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
                    f"the shape in current model is {torch.Size(whole)}."
                )
                continue
            value = slicing.take(value, world.axis_rank("tp"))
        # where other ranks have the data, a tensor of the right shape is loaded from itself, which changes nothing
        given[name] = value if holds(target) or value.shape != target.shape else target
    if misfits:
        raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *misfits]))
    return module.load_state_dict(given, strict=strict and not partial)


def own_slice(value: Any, parameter: Tensor, world: World) -> Any:
    """This rank's slice of an optimizer's tensor that belongs to a whole parameter, copied; all else as it is."""
    slicing = slicing_of(parameter)
    if slicing is None or not _is_like(value, slicing.whole_shape(parameter.shape)):
        return value
    return slicing.take(value, world.axis_rank("tp")).clone(memory_format=torch.contiguous_format)


def partial_marks(staged: bool, world: World) -> dict[str, Any]:
    """What the state dict of one rank's part says of itself.

    Args:
        staged: whether other ranks have other stages.
    """
    size = world.axis_size("tp")
    return {PARTIAL: staged or size > 1, **({SLICE: (world.axis_rank("tp"), size)} if size > 1 else {})}


def is_partial(state: Mapping[str, Any], world: World) -> bool:
    """Whether a state dict is one rank's part.

    Raises:
        OtherSlice: it is, and that rank has other slices than this one.
    """
    partial = bool(state.get(PARTIAL, False))
    made, here = tuple(state.get(SLICE, (0, 1))), (world.axis_rank("tp"), world.axis_size("tp"))
    if partial and made != here:
        raise OtherSlice(*made, *here)
    return partial


# ---- names -----------------------------------------------------------------------------------------------------


def translated(
    module: nn.Module, state: Mapping[str, Any], method: Literal["whole_state", "own_state"]
) -> OrderedDict[str, Any]:
    """From a model's own names to those of the undivided one, or back. Entries keep their place in the order."""
    result = _like(state, state.items())
    paths = list(module.named_modules(remove_duplicate=False))  # from the outside in, as names are taken over
    for path, part in paths if method == "own_state" else reversed(paths):
        change = getattr(type(part), method, None)  # of the class: modules may pass attributes of inner ones for theirs
        prefix = f"{path}." if path else ""
        before = {n: v for n, v in result.items() if n.startswith(prefix)}
        if change is not None and before:
            first = list(result).index(next(iter(before)))
            others = [(n, v) for n, v in result.items() if n not in before]
            result = _like(state, [*others[:first], *change(part, before, prefix).items(), *others[first:]])
    return result


def _like(state: Mapping[str, Any], items: Iterable[tuple[str, Any]]) -> OrderedDict[str, Any]:
    """A state dict with the versions of modules that torch noted on another."""
    made: OrderedDict[str, Any] = OrderedDict(items)
    if hasattr(state, "_metadata"):
        made._metadata = state._metadata  # type: ignore[attr-defined]
    return made
