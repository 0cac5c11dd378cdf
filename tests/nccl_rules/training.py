"""Small training runs, one for each kind of program, for one process and for any grid of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp
from smpar.comm.channels import NcclChannels
from smpar.comm.world import World
from tests.parity.reference import first_names

WIDTH, SAMPLES, STEPS = 8, 32, 2
Model = Callable[[], nn.Module]


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Chain(nn.Module):
    def __init__(self, layers: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for one in self.layers:
            x = one(x)
        return x


class Skips(Chain):
    """What the first layers made is used again by the last."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        made = []
        for i, one in enumerate(self.layers):
            x = one(x if i < 5 else x + made[8 - i])
            made.append(x)
        return x * made[0] + made[2]


class EncoderDecoder(nn.Module):
    """Each layer of the decoder looks at the encoder's result, and returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(layer() for _ in range(4))
        self.decoder = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, step: int) -> Tensor:
        memory, y = x, x.flip(-1)
        for one in self.encoder:
            memory = one(memory)
        for two in self.decoder:
            y = y + torch.tanh(two(y, memory))
        return y


class Again(nn.Module):
    """Three layers over and over: the program comes back to stages that it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for _ in range(2):
            for one in self.layers:
                x = one(x) + x
        return x


class Tied(Chain):
    """First, middle and last layer share a weight; a parameter of its own comes in with the second step."""

    def __init__(self) -> None:
        super().__init__()
        for i in (4, 8):
            self.layers[i][0].weight = self.layers[0][0].weight  # type: ignore[index, union-attr]
        self.late = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = super().forward(x * self.late if step else x, step)
        weight = self.layers[1][0].weight.view(-1).view(WIDTH, WIDTH)  # type: ignore[index, union-attr, operator]
        return F.linear(x, weight) * self.late


class Dynamic(Chain):
    """Reads a value, and goes on by it."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i, one in enumerate(self.layers):
            x = one(x)
            if i == 4 and float(x.detach().sum()) > -1e9:
                x = x * 2
        return x


class Strides(Chain):
    """Tensors, and gradients, that lie in memory in other ways than their shape suggests; indices beside them."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        rows = x.argsort(1)
        first = self.layers[0](x)
        negated = torch.view_as_complex(first.view(-1, WIDTH // 2, 2)).conj().imag
        for i, one in enumerate(self.layers):
            x = one(x)
            if i == 3:
                x = torch.gather(x, 1, rows).t().contiguous().t()
        left, right = x.chunk(2, 1)
        return torch.cat([left * first[:, ::2], right + negated], 1)


@dataclass(frozen=True)
class Kind:
    """A kind of program: its model, and what it asks of smpar.init."""

    model: Model
    options: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "chain": Kind(Chain),
    "skips": Kind(Skips),
    "encoder-decoder": Kind(EncoderDecoder),
    "re-use": Kind(Again),
    "tied": Kind(Tied),
    "values read": Kind(Dynamic),
    "program order": Kind(Skips, {"static_mode": False}),
    "program order, tied": Kind(Tied, {"static_mode": False}),
    "strides": Kind(Strides),
}


@dataclass
class Seen:
    """What a run saw: losses of the steps, outputs of evaluations, gradients, norms, the state in the end.

    Attributes:
        channels: the class of this rank's channels to other ranks.
    """

    losses: list[Tensor] = field(default_factory=list)
    evaluated: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    channels: str = ""


def make(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[kind].model().double()


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield (
            torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=draw),
            torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=draw),
        )


def grads_of(named: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def alone(kind: str, seed: int) -> Seen:
    """One process, the whole batch at once."""
    seen, model = Seen(), make(kind, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step, (x, y) in enumerate(batches(seed)):
        seen.evaluated.append(model(y, 0).detach())
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, step), y)
        loss.backward()
        seen.losses.append(loss.detach())
        seen.grads.append(grads_of(model.named_parameters()))
        seen.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
    seen.state = model.state_dict()
    return seen


def on_grid(kind: str, options: dict[str, Any], seed: int) -> Seen:
    """This rank's view of the same run, as a replica's share of the samples in microbatches over a pipeline."""
    smp.init({"microbatches": 4, **KINDS[kind].options, **options})
    module = make(kind, seed + smp.dp_rank())  # replica 0's parameters count
    seen, first, model = Seen(), first_names(module), smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))

    @smp.step(non_split_inputs=["step"])
    def train(model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        loss = F.mse_loss(model(x, step), y)
        model.backward(loss)
        return loss

    @smp.step(non_split_inputs=["step"])
    def judge(model: Any, x: Tensor, step: int) -> Tensor:
        return model(x, step)

    for step, whole in enumerate(batches(seed)):
        x, y = (t.chunk(smp.dp_size())[smp.dp_rank()] for t in whole)
        with torch.no_grad():
            seen.evaluated.append(judge(model, y, 0).concat())
        optimizer.zero_grad()
        seen.losses.append(train(model, x, y, step).reduce_mean())
        seen.grads.append(grads_of((first[name], p) for name, p in model.local_named_parameters()))
        seen.norms.append(smp.clip_grad_norm_(model, 0.01))
        optimizer.step()
    seen.state = {name: value.clone() for name, value in model.state_dict().items()}
    if model.pipeline is not None:
        seen.channels = type(model.pipeline.channels._channels).__name__
    return seen


def differences(ranks: list[Seen], want: Seen, replicas: list[int]) -> list[str]:
    """Where ranks saw something else than one process; ``replicas``: the data-parallel rank of each."""
    found: list[str] = []

    def compare(what: str, got: Tensor, right: Tensor) -> None:
        if got.shape != right.shape or not torch.allclose(got.double(), right.double(), rtol=1e-9, atol=1e-11):
            found.append(what)

    share = SAMPLES // (max(replicas) + 1)
    for step in range(STEPS):
        mean = torch.stack([ranks[replicas.index(r)].losses[step] for r in range(max(replicas) + 1)]).mean()
        compare(f"step {step}: loss", mean, want.losses[step])
        names = {name for rank in ranks for name in rank.grads[step]}
        if names != want.grads[step].keys():
            found.append(f"step {step}: gradients of {sorted(names ^ want.grads[step].keys())}")
        for number, (rank, replica) in enumerate(zip(ranks, replicas, strict=True)):
            for name, grad in rank.grads[step].items():
                compare(f"step {step}: rank {number}'s gradient of {name}", grad, want.grads[step][name])
            compare(f"step {step}: rank {number}'s norm", rank.norms[step], want.norms[step])
            part = want.evaluated[step][share * replica : share * (replica + 1)]
            compare(f"step {step}: rank {number}'s evaluation", rank.evaluated[step], part)
    for number, rank in enumerate(ranks):
        for name, value in want.state.items():
            compare(f"rank {number}'s {name}", rank.state[name], value)
    return found


def with_one_communicator(kind: str, options: dict[str, Any], seed: int) -> Seen:
    """As `on_grid`, but the two directions between two ranks share a communicator, hence a queue."""
    connect = NcclChannels.__init__

    def connected(self: NcclChannels, world: World, device: torch.device, backend: str) -> None:
        connect(self, world, device, backend)
        for peer in self._in:
            (self._in if world.rank < peer else self._out)[peer] = (self._out if world.rank < peer else self._in)[peer]

    with mock.patch.object(NcclChannels, "__init__", connected):
        return on_grid(kind, options, seed)
