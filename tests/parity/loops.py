"""Training loops as people write them, for one process (degree 0) and for a pipeline; models of random numbers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smpar as smp
from tests.parity.features import FEATURES, Plain, W, feature, place
from tests.parity.features_glue import Block
from tests.parity.features_steps import BatchNorm
from tests.parity.features_values import Layers, linear

# -- randomness -----------------------------------------------------------------------------------


class RandomUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.drop = linear(), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(W, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rrelu(self.drop(self.w(x)), training=self.training)
        h = h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]
        h = h + torch.randn_like(h) * 0.1 + F.gumbel_softmax(h, hard=True)
        return checkpoint(lambda t: F.alpha_dropout(torch.tanh(t), 0.1, self.training), h, use_reentrant=False)


@feature("a u b v c w d", name="RandomNumbers", steps=3, apart=True)
class RandomNumbers(Layers):
    """Draws in modules, in glue on stage tensors, and in glue on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.w = RandomUnit(), RandomUnit(), RandomUnit()

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.u(self.a(x)), 0.2, self.training)
        h = self.b(h) * torch.rand(W, dtype=x.dtype) + torch.empty_like(h).normal_() * 0.1
        h = self.v(h) * torch.bernoulli(torch.full_like(h, 0.7))
        h = checkpoint(lambda t: F.dropout(self.c(t), 0.5), h, use_reentrant=True)
        h = h + torch.multinomial(h.detach().exp(), 3).sum(1, keepdim=True)
        return self.d(self.w(h)[torch.randperm(len(x))]) + torch.randint(0, 3, (1,))


class Checkpointed(Layers):
    """Dropout in a module and in glue, kept or run again in backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def _maybe(self, fn: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        return fn(h) if self.reentrant is None else checkpoint(fn, h, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        h = self._maybe(lambda t: F.dropout(self.b(t), 0.5), self.a(x))
        return self.d(self._maybe(lambda t: F.dropout(self.c(t), 0.5), h))


for _kind in (None, True, False):
    feature("a b c d", name=f"Checkpointed{_kind}", apart=True)(functools.partial(Checkpointed, _kind))

# -- loops ----------------------------------------------------------------------------------------

STEP_COUNT, COUNT = 5, 3


class Trainer:
    """The same calls for a plain model (degree 0) and one of smpar's."""

    def __init__(self, degree: int, build: Callable[[], nn.Module], parts: str, optimizer: Callable[..., Any]) -> None:
        torch.manual_seed(3)
        module = build().double()
        self.degree, self.module = degree, module
        if degree:
            smp.init({"pipeline_parallel_degree": degree, "microbatches": COUNT, "auto_partition": False,
                      "default_partition": 0})  # fmt: skip
            if degree > 1:
                place(module, FEATURES[parts], degree)
            self.model: Any = smp.DistributedModel(module)
            self.optimizer: Any = smp.DistributedOptimizer(optimizer(self.model))
        else:
            self.model = Plain(module)
            self.optimizer = optimizer(self.model)

    def step(self, fn: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        if self.degree:
            return smp.step(fn)(self.model, x, y).reduce_mean()
        total = torch.zeros((), dtype=x.dtype)
        for a, b in zip(x.tensor_split(COUNT), y.tensor_split(COUNT), strict=True):
            self.model.share = len(a) / len(x)
            total += fn(self.model, a, b).detach() * self.model.share
        return total

    def clip(self, limit: float, kind: float) -> Tensor:
        if self.degree:
            return smp.clip_grad_norm_(self.model, limit, kind)
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit, kind)

    def state(self) -> dict[str, Tensor]:
        whole = self.model.state_dict() if self.degree else self.module.state_dict()
        return {n: v.detach().clone() for n, v in whole.items()}


def learn(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def judge(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def data(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEP_COUNT):
        yield (
            torch.randn(7, W, dtype=torch.float64, generator=generator),
            torch.randn(7, W, dtype=torch.float64, generator=generator),
        )


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def block(degree: int, optimizer: Callable[..., Any] = momentum) -> Trainer:
    return Trainer(degree, Block, "SeveralLosses", optimizer)


Log = list[Any]


def accumulation(degree: int, seed: int) -> Log:
    """Gradients add up over three steps, kept as zeros in between."""
    t, log = block(degree), []
    for i, (x, y) in enumerate(data(seed)):
        log.append(t.step(learn, x, y))
        if i % 3 == 2:
            t.optimizer.step()
            t.optimizer.zero_grad(set_to_none=False)
    return [*log, t.state()]


def clipping(degree: int, seed: int) -> Log:
    t, log = block(degree), []
    for i, (x, y) in enumerate(data(seed)):
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        log.append(t.clip(0.05, (2.0, float("inf"), 1.0)[i % 3]).detach().double())
        t.optimizer.step()
    return [*log, t.state()]


def schedulers(degree: int, seed: int) -> Log:
    t, log = block(degree), []
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, 5)
    cycle = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, patience=0)
    for x, y in data(seed):
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
        cosine.step()
        cycle.step(log[-1])
        log.append(t.optimizer.param_groups[0]["lr"])
    return [*log, t.state()]


def modes(degree: int, seed: int) -> Log:
    """Training and evaluation in turn, under no_grad and inference_mode, with batch norm."""
    t, log = Trainer(degree, BatchNorm, "BatchNorm", momentum), []
    for x, y in data(seed):
        t.model.train()
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
        t.model.eval()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                log.append(t.step(judge, x, y))
        log.append(t.step(judge, x, y))
    return [*log, t.state()]


def inference_first(degree: int, seed: int) -> Log:
    """The first steps run under inference_mode, and partition the model; writing in place, too."""
    t, log = block(degree), []

    def judge_in_place(model: Any, x: Tensor, y: Tensor) -> Tensor:
        h = model(x)
        h[:, 0] += 1
        return F.mse_loss(h.mul_(2), y)

    for x, y in data(seed):
        with torch.inference_mode():
            log += [t.step(judge, x, y), t.step(judge_in_place, x, y)]
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
    return [*log, t.state()]


def thawing(degree: int, seed: int) -> Log:
    """Parameters are frozen and thawed between steps, and get a group of their own."""
    t, log = block(degree, lambda m: torch.optim.SGD([m.module.d.weight, m.module.d.bias], lr=0.1)), []
    m = t.module
    for layer in (m.a, m.b, m.c):
        layer.requires_grad_(False)
    later = list(data(seed))
    t.optimizer.add_param_group({"params": [*m.b.parameters(), *m.c.parameters()], "lr": 0.3})
    for i, (x, y) in enumerate(later):
        if i == 1:
            m.c.requires_grad_(True)
        if i == 2:
            m.b.requires_grad_(True)
            m.d.weight.requires_grad_(False)
        if i == 4:
            m.c.requires_grad_(False)
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
    return [*log, t.state()]


class Shifted(nn.Module):
    """Adds a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = linear(), [torch.zeros(W, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + self.shift[0]


class ShiftedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = Shifted(), Shifted(), Shifted(), Shifted()


def thawing_tensors(degree: int, seed: int) -> Log:
    """Tensors that no module knows as parameters come to require gradients, and are trained by hand."""
    t, log = Trainer(degree, ShiftedBlock, "SeveralLosses", momentum), []
    shifts = [layer.shift[0] for layer in t.module.modules() if isinstance(layer, Shifted)]
    for i, (x, y) in enumerate(data(seed)):
        if i == 2:
            for shift in shifts:
                shift.requires_grad_(True)
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
        with torch.no_grad():
            for shift in shifts:
                if shift.grad is not None:
                    shift.sub_(shift.grad)
                    shift.grad = None
    return [*log, t.state()]


def late_group(degree: int, seed: int) -> Log:
    """A group of parameters is added to the optimizer after the first steps."""
    t, log = block(degree, lambda m: torch.optim.Adam(m.module.a.parameters(), lr=0.05, eps=1e-3)), []
    for i, (x, y) in enumerate(data(seed)):
        if i == 2:
            t.optimizer.add_param_group({"params": list(t.module.d.parameters()), "lr": 0.01})
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
    return [*log, t.state()]


def reloading(degree: int, seed: int) -> Log:
    """The state of an earlier step is loaded back, model and optimizer, after the partition."""
    t, log = block(degree), []
    saved: Any = None
    for i, (x, y) in enumerate(data(seed)):
        if i == 2:
            saved = copy.deepcopy((t.state(), t.optimizer.state_dict()))
        if i == 4:
            (t.model if degree else t.module).load_state_dict(saved[0])
            t.optimizer.load_state_dict(saved[1])
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
    return [*log, t.state()]


def edited_weights(degree: int, seed: int) -> Log:
    """The loop itself writes parameters: clamping, weight averaging, gradient noise of none."""
    t, log = block(degree), []
    for x, y in data(seed):
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        for p in t.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        t.optimizer.step()
        with torch.no_grad():
            for p in t.model.local_parameters() if degree else t.model.parameters():
                p.clamp_(-0.2, 0.2)
    return [*log, t.state()]


def attributes(degree: int, seed: int) -> Log:
    """Numbers of modules change between steps, in the model and in a part."""
    t, log = Trainer(degree, lambda: nn.Sequential(linear(), nn.LeakyReLU(0.1), linear(), nn.Dropout(0.0), linear()),
                     "Five", momentum), []  # fmt: skip
    for i, (x, y) in enumerate(data(seed)):
        t.module[1].negative_slope = 0.1 * i
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
    return [*log, t.state()]


feature("0 1 2 3 4", name="Five", apart=True)(Block)


def copies(degree: int, seed: int) -> Log:
    """A copy of the model from before training is a model of its own."""
    t, log = block(degree), []
    twin = copy.deepcopy(t.module)
    for x, y in data(seed):
        t.optimizer.zero_grad()
        log.append(t.step(learn, x, y))
        t.optimizer.step()
        log.append(F.mse_loss(twin(x), y).detach())
    twin.load_state_dict(t.state())
    log.append(F.mse_loss(twin(x), y).detach())
    return [*log, t.state()]


def lbfgs(degree: int, seed: int) -> Log:
    t = block(degree, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4))
    (x, y), *_ = data(seed)

    def closure() -> float:
        t.optimizer.zero_grad()
        return float(t.step(learn, x, y))

    return [t.optimizer.step(closure) for _ in range(2)]


LOOPS = [
    accumulation, clipping, schedulers, modes, inference_first, thawing, thawing_tensors, late_group, reloading,
    edited_weights, attributes, copies,
]  # fmt: skip
