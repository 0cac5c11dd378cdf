"""Models for replicas, and their training side by side: smpar, and torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

WIDTH = 6


class Layers(nn.Module):
    """Layers of unlike sizes."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, 16, 5, 12, 9, WIDTH]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tied(Layers):
    """The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight


class Sometimes(Layers):
    """One parameter is used where ``extra`` says so, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = super().forward(x, extra)
        return self.extra(x) if extra else x


class Wandering(Layers):
    """One parameter is always read at the start, one at the end; where ``extra`` says so, at the other end, too."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = super().forward(x * self.start * self.end if extra else x * self.start, extra)
        return x * self.end + self.start if extra else x * self.end


class Frozen(Layers):
    """Some parameters do not train."""

    def __init__(self) -> None:
        super().__init__()
        for p in (*self.layers[1].parameters(), self.layers[3].bias):
            p.requires_grad_(False)


class Normed(Layers):
    """Batch norms, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(w.out_features) for w in self.layers)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return x


class Complex(nn.Module):
    """A complex weight between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        return self.outer((self.inner(x).to(self.mix.dtype) @ self.mix).abs())


class Images(nn.Module):
    """Convolutions whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.head = nn.Linear(3 * WIDTH // 2, WIDTH)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = x.view(len(x), 1, 2, WIDTH // 2).transpose(1, 2)
        return self.head(self.second(torch.relu(self.first(x))).flatten(1))


@dataclasses.dataclass(frozen=True)
class Case:
    """One training, done twice.

    Attributes:
        model: makes the module.
        config: of ``smpar.init``.
        options: of ``smpar.DistributedModel``.
        samples: of each replica's batch.
        synced: for each step, whether it averages gradients: whether it is outside of ``no_sync``.
        contexts: whether smpar gets ``no_sync``, too; else its options say which steps average.
        zeroed: how gradients are zeroed: ``none``, ``zero``, or ``never``.
        extra: for each step, the replicas (modulo 2) that use what is only sometimes used.
        hook: name of a communication hook of torch's.
        tolerance: relative, of gradients.
    """

    model: Callable[[], nn.Module] = Layers
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    samples: int = 8
    synced: tuple[bool, ...] = (True, True, True, True)
    contexts: bool = True
    zeroed: str = "none"
    extra: tuple[tuple[int, ...], ...] = ((0, 1), (), (1,), (0, 1))
    hook: str = ""
    tolerance: float = 1e-9


def make(case: Case, seed: int) -> nn.Module:
    """The module, the same on all ranks."""
    torch.manual_seed(seed)
    model = case.model()
    return model if isinstance(model, Complex) else model.to(case.dtype)


def batch(case: Case, seed: int, step: int, replica: int) -> tuple[Tensor, Tensor]:
    """One replica's inputs and targets, ``[samples, WIDTH]``."""
    generator = torch.Generator().manual_seed(seed + 1000 * step + replica)
    x, y = torch.randn(2, case.samples, WIDTH, dtype=torch.float64, generator=generator).to(
        torch.float64 if case.model is Complex else case.dtype
    )
    return x, y


def train_both(case: Case, seed: int) -> dict[str, int]:
    """Train with smpar and with DistributedDataParallel; asserts equal gradients, parameters, buffers in each step.

    Returns:
        how much was compared.
    """
    import smpar as smp

    smp.init(case.config)
    replica, group = smp.dp_rank(), smp.get_dp_process_group()
    reference = DistributedDataParallel(
        make(case, seed),
        process_group=group,
        find_unused_parameters=case.model is Sometimes,
        broadcast_buffers=case.options.get("broadcast_buffers", True),
    )
    ours = smp.DistributedModel(make(case, seed + replica), **case.options)  # the first replica's parameters count
    if case.hook:
        hook = getattr(default_hooks, case.hook)
        if hook is not default_hooks.bf16_compress_hook:  # which DistributedDataParallel has on GPUs only
            reference.register_comm_hook(group, hook)
        ours.register_comm_hook(group, hook)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, extra: bool) -> Tensor:
        loss = F.mse_loss(model(x, extra), y)
        model.backward(loss)
        return loss

    wanted = {n: p for n, p in reference.module.named_parameters()}
    compared = {"gradients": 0, "none": 0, "buffers": 0}
    for step, synced in enumerate(case.synced):
        x, y = batch(case, seed, step, replica)
        extra = replica % 2 in case.extra[step % len(case.extra)]
        with ours.no_sync() if case.contexts and not synced else contextlib.nullcontext():
            train(ours, x, y, extra)
        accumulate(case, reference, x, y, extra, synced, case.config.get("microbatches", 1))
        for name, p in ours.local_named_parameters():
            where = f"step {step}, {name}"
            right = wanted[name].grad
            assert (p.grad is None) == (right is None), f"{where}: {p.grad}, not {right}"
            if p.grad is None or right is None:
                compared["none"] += 1
                continue
            assert p.grad.dtype == p.dtype and p.grad.shape == p.shape
            compared["gradients"] += 1
            close(p.grad, right, case.tolerance, where)
        for name, buffer in ours.local_named_buffers():
            close(buffer, dict(reference.module.named_buffers())[name], case.tolerance, f"step {step}, {name}")
            compared["buffers"] += 1
        if synced:
            optimizer.step()
            theirs.step()
            if case.zeroed != "never":
                optimizer.zero_grad(set_to_none=case.zeroed == "none")
                theirs.zero_grad(set_to_none=case.zeroed == "none")
        for name, p in ours.local_named_parameters():
            close(p, wanted[name], case.tolerance, f"step {step}, parameter {name}")
    return compared


def accumulate(
    case: Case, model: DistributedDataParallel, x: Tensor, y: Tensor, extra: bool, synced: bool, microbatches: int
) -> None:
    """The step as DistributedDataParallel's users write it."""
    xs, ys = x.tensor_split(microbatches), y.tensor_split(microbatches)
    for i, (part, target) in enumerate(zip(xs, ys, strict=True)):
        with contextlib.nullcontext() if synced and i + 1 == microbatches else model.no_sync():
            (F.mse_loss(model(part, extra), target) * (len(part) / len(x))).backward()


def close(got: Tensor, want: Tensor, tolerance: float, where: str) -> None:
    """Assert that two tensors are alike, relative to the wanted one's largest element."""
    got, want = got.detach().clone(), want.detach()
    if not got.is_floating_point() and not got.is_complex():
        assert torch.equal(got, want), where
        return
    difference = float((got - want).abs().max()) if got.numel() else 0.0
    scale = max(1e-3, float(want.abs().max())) if got.numel() else 1.0
    assert difference <= tolerance * scale, f"{where}: off by {difference / scale:.3g} of {scale:.3g}"
