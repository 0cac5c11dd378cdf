"""A model's profile, measured on the present device: layers, the tensors between them, seconds by microbatch size.

model ──trace──▶ units (the layers) ──trace again at each size──▶ calls ──time──▶ Profile
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smpar.errors import CommandError
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times
from smpar.probe.devices import device_name
from smpar.probe.whole import whole_seconds
from smpar.runtime.measure import Measurer
from smpar.runtime.measure import Times as Measured
from smpar.runtime.module_graph import open_until_even, run
from smpar.runtime.partitioning import Explored, survey
from smpar.stage.split import Call
from smpar.trace import tree
from smpar.trace.fake import FakeRunner
from smpar.trace.outcomes import Outcomes

_ENOUGH = 0.2  # seconds of timing one call
_ENOUGH_WHOLE = 1.0  # and the whole model


def profile_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Sequence[int],
    device: torch.device,
    step: Callable[..., Any] | None = None,
    done: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure a model on a device, where it stays.

    Layers are the units of `smpar.module_graph`, found at the largest size, whose bytes count, too. Times are of each
    unit alone, on random inputs, scaled so that they add up to the whole model's; equal units are measured once.

    Args:
        model: in the mode (``train`` or ``eval``) that matters.
        args, kwargs: a batch; the tensors whose first axis is as long as the first tensor's are cut or repeated to
            each size, all others are left alone.
        sizes: samples of a microbatch.
        device: of the measurement.
        step: ``step(model, *args, **kwargs)`` calls the model and the loss; None calls the model.
        done: called after each size.

    Raises:
        CommandError: the model is on the meta device, the batch holds no tensor, or the model does not run at a size.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise CommandError("microbatch sizes are whole numbers of at least 1", f"{list(sizes)}", "give 1,2,4")
    if any(p.is_meta for p in model.parameters()):
        raise CommandError(
            "times are measured on real parameters", "some on the meta device", "make the model on a CPU"
        )
    model.to(device)
    args, kwargs = tree.map_tensors(lambda t: t.to(device), (tuple(args), dict(kwargs)))
    fn = step or run
    outcomes = Outcomes(FakeRunner(device))
    with torch.inference_mode(False), torch.enable_grad():
        even = at_size(sizes[-1], lambda: open_until_even(fn, call_of(model, args, kwargs, sizes[-1]), model, outcomes))
        opened, glue_hooks = set(even.layout.split), set(even.layout.glue_hooks)
        rows: list[list[Measured]] = []
        with Measurer(outcomes, lambda work: work(), split=True, enough=_ENOUGH) as measurer:
            for size in sizes:
                call = call_of(model, args, kwargs, size)
                seen = at_size(size, lambda c=call: survey(fn, c, model, outcomes, opened, glue_hooks))  # type: ignore[misc]
                if seen.modules != even.modules:
                    raise CommandError(
                        "a model runs the same modules at every microbatch size",
                        f"others at {size} than at {sizes[-1]} samples",
                        f"leave {size} out of the sizes",
                    )
                rows.append(_adding_up(measurer.times(seen), whole_seconds(fn, call, model, device, _ENOUGH_WHOLE)))
                done()
    times = Times(
        device_name(device),
        1,
        tuple(float(size) for size in sizes),
        *(tuple(tuple(getattr(t, part) for t in row) for row in rows) for part in ("forward", "backward", "weight")),
    )
    return Profile(layers_of(model, even, sizes[-1]), tensors_of(even, sizes[-1]), (times,), tied_of(even))


def _adding_up(row: Sequence[Measured], whole: tuple[float, float]) -> list[Measured]:
    """Times of units scaled to the whole model's: between them lie glue, cold caches and the sums of gradients."""
    forward, backward = sum(t.forward for t in row), sum(t.backward for t in row)
    more = [w / part if w > 0.0 and part > 0.0 else 1.0 for w, part in zip(whole, (forward, backward), strict=True)]
    return [Measured(t.forward * more[0], t.backward * more[1], t.weight * more[1]) for t in row]


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
