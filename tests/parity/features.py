"""What modules and step functions may do: one small training each, run by one process or by a pipeline.

A feature is a model, the order in which its parts go to stages, and a step function that both sides run unchanged:

    parts "a b c d", degree 2        a b | c d
    stages "0 1 0 1"                 a on 0, b on 1, c on 0, d on 1
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp
from smpar.config import Config
from smpar.trace import tree

W = 8  # width of all layers


def regression(model: Any, x: Any, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def vectors(step: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Seven samples: microbatches are uneven."""
    return tuple(torch.randn(7, W, dtype=torch.float64, generator=generator) for _ in range(2))


def sequences(step: int, generator: torch.Generator) -> tuple[Any, ...]:
    return tuple(torch.randn(7, 5, W, dtype=torch.float64, generator=generator) for _ in range(2))


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Feature:
    """One training.

    Attributes:
        parts: names of modules in stage order; empty for the automatic partition.
        stages: stage of each part, if not spread evenly.
        step: (model, *batch) -> what a step returns; calls ``model.backward``.
        batch: (step, generator) -> the step's arguments.
        refused: class of the error that it must end in, on every rank.
        most: stages that it can be cut into.
        apart: another test than the one over all features trains it.
    """

    model: Callable[[], nn.Module]
    parts: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    degrees: tuple[int, ...] = (2,)
    step: Callable[..., Any] = regression
    batch: Callable[[int, torch.Generator], tuple[Any, ...]] = vectors
    microbatches: int = 3
    steps: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    step_options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    tolerance: float = 1e-10
    average: bool = True
    refused: str = ""
    most: int = 60
    apart: bool = False
    dtype: torch.dtype = torch.float64


FEATURES: dict[str, Feature] = {}


def feature(parts: str = "", stages: str = "", name: str = "", **options: Any) -> Callable[[Any], Any]:
    """Register a model class."""

    def register(model: Any) -> Any:
        FEATURES[name or model.__name__] = Feature(
            model, tuple(parts.split()), tuple(map(int, stages.split())), **options
        )
        return model

    return register


@dataclass
class Seen:
    """What a training gave: results by step, gradients after each step, state at the end, notes of the model."""

    results: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)


def build(feature: Feature) -> nn.Module:
    torch.manual_seed(11)
    return feature.model().to(feature.dtype)


def batches(feature: Feature, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [feature.batch(step, generator) for step in range(feature.steps)]


class Plain(nn.Module):
    """A single process's stand-in for the wrapped model: ``backward`` weighs the microbatch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.share = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        grads = (
            [grad_tensors] * len(roots)
            if grad_tensors is None
            else ([grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors))
        )
        starts = [torch.ones_like(r) if g is None else g for r, g in zip(roots, grads, strict=True)]
        torch.autograd.backward(roots, [s * self.share for s in starts], retain_graph=True)


def alone(name: str, seed: int) -> Seen:
    """Train in this process by microbatches, in plain PyTorch."""
    feature = FEATURES[name]
    model = Plain(build(feature))
    parameters = list(model.parameters())
    optimizer = feature.optimizer(parameters) if parameters else None
    seen = Seen()
    for step, batch in enumerate(batches(feature, seed)):
        if optimizer is not None:
            optimizer.zero_grad()
        parts = _cut(batch, feature)
        size = sum(n for _, n in parts)
        outputs = []
        for part, n in parts:
            model.share = n / size if feature.average else 1.0
            torch.manual_seed(seed + step)
            outputs.append(feature.step(model, *part))
        seen.results.append(_detached(outputs))
        seen.gradients.append({n: _dense(p.grad) for n, p in model.module.named_parameters()})
        if optimizer is not None:
            optimizer.step()
    seen.state = _detached(dict(model.module.state_dict()))
    seen.notes = list(getattr(model.module, "notes", []))
    return seen


def _cut(batch: tuple[Any, ...], feature: Feature) -> list[tuple[tuple[Any, ...], int]]:
    leaves: list[Tensor] = []
    spec = tree.flatten(batch, leaves)
    columns = [torch.tensor_split(t, feature.microbatches) if t.dim() else [t] * feature.microbatches for t in leaves]
    sizes = [len(part) for part in next(c for t, c in zip(leaves, columns, strict=True) if t.dim())]
    return [(tree.unflatten(spec, [c[i] for c in columns]), sizes[i]) for i in range(feature.microbatches)]


def _dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().to_dense().clone() if grad.is_sparse else grad.detach().clone()


def _detached(value: Any) -> Any:
    return tree.map_tensors(lambda t: t.detach().clone(), value)


def place(model: nn.Module, feature: Feature, stages: int) -> None:
    """Put the parts on stages: evenly, or as the feature says, spread over as many times more stages as there are.

    "0 1 0 1" on 4 stages: 0 2 1 3
    """
    least = max(feature.stages, default=0) + 1
    for i, part in enumerate(feature.parts):
        stage = i * stages // len(feature.parts)
        if feature.stages:
            more = max(stages // least, 1)
            stage = feature.stages[i] * more + i // least % more
        smp.set_partition(model.get_submodule(part), stage)


def piped(name: str, degree: int, seed: int, config: dict[str, Any]) -> Seen:
    """The same training over ``degree`` ranks; runs in a worker."""
    feature = FEATURES[name]
    manual = {"auto_partition": False, "default_partition": 0} if feature.parts else {}
    options = {"pipeline_parallel_degree": degree, "microbatches": feature.microbatches, "ddp": True, **manual,
               **feature.config, **config}  # fmt: skip
    smp.init(options)
    module = build(feature)
    stages = Config.from_dict(options).stages
    if feature.parts and stages > 1:
        place(module, feature, stages)
    model = smp.DistributedModel(module, average_grads_across_microbatches=feature.average)
    parameters = list(model.parameters())
    optimizer = smp.DistributedOptimizer(feature.optimizer(parameters)) if parameters else None
    step_function = smp.step(**feature.step_options)(feature.step)
    seen = Seen()
    for step, batch in enumerate(batches(feature, seed)):
        if optimizer is not None:
            optimizer.zero_grad()
        torch.manual_seed(seed + step)
        seen.results.append(_by_microbatch(step_function(model, *batch), feature.microbatches))
        seen.gradients.append({n: _dense(p.grad) for n, p in model.local_named_parameters()})
        if optimizer is not None:
            optimizer.step()
    seen.state = _detached(dict(model.state_dict()))
    seen.notes = list(getattr(module, "notes", []))
    return seen


def _by_microbatch(result: Any, count: int) -> list[Any]:
    """Undo the merging: each microbatch's result."""

    def pick(value: Any, i: int) -> Any:
        if isinstance(value, smp.StepOutput):
            return value.outputs[i]
        if isinstance(value, dict):
            return {k: pick(v, i) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(pick(v, i) for v in value))
        if isinstance(value, (list, tuple)):
            return type(value)(pick(v, i) for v in value)
        if hasattr(value, "__dataclass_fields__"):
            made = copy.copy(value)
            for f in value.__dataclass_fields__:
                setattr(made, f, pick(getattr(value, f), i))
            return made
        return value

    return [pick(result, i) for i in range(count)]


def unlike(got: Any, want: Any, tolerance: float, where: str = "") -> list[str]:
    """Where two nested values differ, in words."""
    a: list[Tensor] = []
    b: list[Tensor] = []
    if tree.flatten(got, a) != tree.flatten(want, b):
        return [f"{where}: {got!r}, not {want!r}"[:300]]
    found = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"{where}[{i}]: {tuple(x.shape)} {x.dtype}, not {tuple(y.shape)} {y.dtype}")
        elif x.numel():
            wide = torch.complex128 if x.is_complex() else torch.float64
            gap = float((x.to(wide) - y.to(wide)).abs().max() / (1 + y.to(wide).abs().max()))
            if not gap <= tolerance:
                found.append(f"{where}[{i}]: off by {gap:.1e}")
    return found


def compare(ranks: Sequence[Seen], want: Seen, tolerance: float) -> list[str]:
    """Every rank's results and state, and the gradients of every parameter on all who hold it."""
    found: list[str] = []
    for rank, got in enumerate(ranks):
        for step, (a, b) in enumerate(zip(got.results, want.results, strict=True)):
            found += unlike(a, b, tolerance, f"rank {rank} step {step} result")
        a, b = dict(sorted(got.state.items())), dict(sorted(want.state.items()))
        found += unlike(a, b, tolerance, f"rank {rank} state")
        for step, gradients in enumerate(got.gradients):
            for name, grad in gradients.items():
                expected = want.gradients[step][name]
                if (grad is None) != (expected is None):
                    there = "missing" if grad is None else "there"
                    found.append(f"rank {rank} step {step}: gradient of {name} is {there}")
                elif grad is not None:
                    found += unlike(grad, expected, tolerance, f"rank {rank} step {step} gradient of {name}")
    for name in want.gradients[0]:
        if not any(name in got.gradients[0] for got in ranks):
            found.append(f"{name} is on no rank")
    notes = [note for got in ranks for note in got.notes]
    if sorted(map(str, set(map(str, notes)))) != sorted(set(map(str, want.notes))):
        found.append(f"notes: {notes}, not {want.notes}")
    return found
