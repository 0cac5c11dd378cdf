"""What traces of a model at some number of samples say of its layers, tensors and shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smpar.errors import CommandError
from smpar.planner.profile import Layer, Tensor, Tied
from smpar.runtime.partitioning import Explored
from smpar.stage.split import Call
from smpar.trace import tree


def at_size(size: int, trace: Callable[[], Explored]) -> Explored:
    try:
        return trace()
    except CommandError:  # says more than what follows
        raise
    except Exception as error:
        raise CommandError(
            "the model runs on a microbatch of each size",
            f"{type(error).__name__} at {size} samples: {str(error).splitlines()[0] if str(error) else ''}",
            "leave that size out, or correct the model or its batch",
        ) from error


def call_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> Call:
    batch = resized((tuple(args), dict(kwargs)), size)
    return (model, *batch[0]), batch[1]


def resized(batch: Any, size: int) -> Any:
    """The batch with so many samples: cut, or repeated from its start.

    Raises:
        CommandError: no tensor has a first axis.
    """
    leaves: list[torch.Tensor] = []
    spec = tree.flatten(batch, leaves)
    samples = next((t.shape[0] for t in leaves if t.dim() and t.shape[0]), 0)
    if not samples:
        raise CommandError(
            "a batch has a tensor with samples along its first axis",
            f"tensors of shapes {[tuple(t.shape) for t in leaves]}",
            "return model, batch: batch is what the model is called with",
        )
    index = torch.arange(size) % samples
    return tree.unflatten(spec, [_taken(t, index) if t.dim() and t.shape[0] == samples else t for t in leaves])


def _taken(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[index.to(tensor.device)].requires_grad_(tensor.requires_grad)


def layers_of(model: nn.Module, seen: Explored, size: int) -> tuple[Layer, ...]:
    """Parameters of split modules (a class token) go with the unit that reads them."""
    own = {id(p): p.numel() for p in model.parameters()}
    glued = [0] * len(seen.modules)
    for key, index in seen.anchors.items():
        glued[index] += own.get(key, 0)
    handed = [0.0] * len(seen.modules)
    for link in seen.graph.links:
        handed[link.source] += link.nbytes
    element = max((p.element_size() for p in model.parameters()), default=4)
    made = []
    for i, (unit, module) in enumerate(zip(seen.graph.units, seen.modules, strict=True)):
        shapes = sum(torch.Size(shape).numel() for shape in unit.output_shapes)
        made.append(
            Layer(
                unit.name or "(model)",
                float(sum(p.numel() for p in module.parameters()) + glued[i]),
                saved=unit.saved_bytes / size,
                output=(handed[i] or float(shapes * element)) / size,  # the last one hands nothing on
            )
        )
    return tuple(made)


def tensors_of(seen: Explored, size: int) -> tuple[Tensor, ...]:
    return tuple(Tensor(x.source, x.targets, x.elements / size, x.gradient) for x in seen.graph.links)


def tied_of(seen: Explored) -> tuple[Tied, ...]:
    numbers = {name: p.numel() for m in seen.modules for name, p in _named(m, seen)}
    return tuple(Tied(shared.units, float(numbers[shared.name])) for shared in seen.graph.shared)


def _named(module: nn.Module, seen: Explored) -> list[tuple[str, nn.Parameter]]:
    return [(seen.layout.parameter_names.get(id(p), "?"), p) for p in module.parameters()]
