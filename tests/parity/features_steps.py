"""Features: what step functions and training loops do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.parity.features import W, feature, sequences
from tests.parity.features_glue import Block
from tests.parity.features_values import Layers, linear

# -- losses and backwards -------------------------------------------------------------------------


def several_losses(model: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    h = model(x)
    k = model(h.tanh())
    first, second = F.mse_loss(h, y), F.l1_loss(k, y)
    model.backward(first)
    model.backward(second * 0.5)
    pair = [(k, "text"), h.shape[1]]
    return {"first": first, "second": second, "none": None, "n": 3, "pair": pair, "both": first + second}


feature("a b c d", degrees=(2, 4), step=several_losses, name="SeveralLosses")(Block)


def list_of_losses(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    losses = [F.mse_loss(h, y), h.square().mean(), model(y).mean()]
    model.backward(losses)
    return sum(losses)


feature("a b c d", degrees=(2, 4), step=list_of_losses, name="ListOfLosses")(Block)


def with_gradients(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    k = model(y)
    model.backward(h, torch.ones_like(h) * 0.1)
    model.backward([k, k.sum()], [y, None])
    return h


def with_stage_gradients(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    model.backward(h, (h - y).detach() * 2 / h.numel())
    return h


feature("a b c d", degrees=(2, 4), step=with_gradients, name="GradTensors")(Block)
feature("a b c d", degrees=(2, 4), step=with_stage_gradients, name="GradTensorsFromModel")(Block)


class Taps(Block):
    """Outputs of every part."""

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        outs = []
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
            outs.append(x)
        return outs


def deep_supervision(model: Any, x: Tensor, y: Tensor) -> Tensor:
    total = 0
    for out in model(x):
        loss = F.mse_loss(out, y)
        model.backward(loss)
        total = total + loss
    return total


def gradients_of_early_outputs(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b, c, d = model(x)
    model.backward([a.mean(), d.sum()])
    return a, b.detach(), c, d


feature("a b c d", degrees=(2, 4), step=deep_supervision, name="DeepSupervision")(Taps)
feature("a b c d", degrees=(2, 4), step=gradients_of_early_outputs, name="EarlyOutputs")(Taps)


def only_first(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, _, _, d = model(x)
    model.backward(F.mse_loss(a, y))
    return a, d


feature("a b c d", degrees=(2, 4), step=only_first, name="OnlyTheFirstPartLearns")(Taps)


def no_backward(model: Any, x: Tensor, y: Tensor) -> Any:
    return model(x), None, 2.5, "s"


feature("a b c d", degrees=(2, 4), step=no_backward, name="NoBackward")(Block)


def nothing(model: Any, x: Tensor, y: Tensor) -> None:
    model.backward(F.mse_loss(model(x), y))


feature("a b c d", degrees=(2, 4), step=nothing, name="ReturnsNothing")(Block)


def conditional(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    if y.sum() > 0:
        model.backward(loss)
    return loss


feature("a b c d", degrees=(2, 4), step=conditional, name="BackwardOfSomeMicrobatches", steps=3)(Block)


def with_parameters(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Weight decay in the loss; parameters read in the step itself."""
    loss = F.mse_loss(model(x), y)
    decay = sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)
    loss = loss + 0.01 * decay
    model.backward(loss)
    return loss


feature("a b c d", degrees=(2, 4), step=with_parameters, name="DecayInTheLoss")(Block)


def loss_module(model: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, W, dtype=x.dtype)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, weight=weight)(model(x), y.argmax(1))
    extra = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(model(y), 1), F.softmax(x, 1))
    model.backward(loss + extra)
    return loss + extra


feature("a b c d", degrees=(2, 4), step=loss_module, name="LossModules")(Block)


@dataclass
class Output:
    loss: Tensor
    parts: dict[str, Any]


def dataclass_out(model: Any, x: Tensor, y: Tensor) -> Output:
    h = model(x)
    loss = F.mse_loss(h, y)
    model.backward(loss)
    return Output(loss, {"h": h, "views": [h[:, :2], h.t()], "int": h.argmax(1), "bool": h > 0, "y": y, "k": None})


feature("a b c d", degrees=(2, 4), step=dataclass_out, name="DataclassResult")(Block)


def calls_differ(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The model is called with other arguments, shapes and modes in one step."""
    loss = F.mse_loss(model(x), y) + model(x[:1], flag=True).mean()
    with torch.no_grad():
        target = model(y)
    loss = loss + F.mse_loss(model(torch.cat([x, y]))[: len(x)], target)
    model.backward(loss)
    return loss


@feature("a b c d", degrees=(2, 4), step=calls_differ)
class CalledInManyWays(Layers):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        h = self.b(torch.tanh(self.a(x)))
        return self.d(h) if flag else self.d(torch.tanh(self.c(h)))


def submodules(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The step calls parts of the model by name, as generators and discriminators do."""
    net = model.module
    fake = torch.tanh(net.b(torch.tanh(net.a(x))))
    model.backward(F.mse_loss(fake, y))
    score = net.d(net.c(fake.detach())).mean()
    model.backward(score)
    return score


feature("a b c d", degrees=(2, 4), step=submodules, name="PartsCalledByTheStep")(Block)


def metrics(model: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    h = model(x)
    loss = F.mse_loss(h, y)
    model.backward(loss)
    with torch.no_grad():
        accuracy = (h.argmax(1) == y.argmax(1)).double().mean()
    return {"loss": loss.detach(), "accuracy": accuracy, "count": (h > 0).sum(), "max": h.detach().amax()}


feature("a b c d", degrees=(2, 4), step=metrics, name="Metrics")(Block)


def input_gradient(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the input, as for saliency maps and adversarial samples."""
    x = x.clone().requires_grad_()
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss, x


feature("a b c d", degrees=(2, 4), step=input_gradient, name="InputRequiresGrad")(Block)

# -- state ----------------------------------------------------------------------------------------


@feature("a n b m c", degrees=(2, 3), microbatches=2)
class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.n, self.m = nn.BatchNorm1d(W), nn.BatchNorm1d(W, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.m(self.b(torch.relu(self.n(self.a(x)))))))


@feature("", degrees=(2, 3), microbatches=2, name="BatchNormAuto")
class _BatchNormAuto(BatchNorm):
    pass


def evaluates(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = model(x)
    loss = F.mse_loss(model(y), teacher)
    model.backward(loss)
    return loss


feature("a n b m c", degrees=(2, 3), microbatches=2, step=evaluates, name="BatchNormTwoCalls")(BatchNorm)


class Accumulates(nn.Module):
    """A module with a state that is no buffer, and buffers that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()
        self.register_buffer("mean", torch.zeros(W))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.last: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.w(x)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.seen += len(h)
        if self.last is not None:
            h = h + self.last.mean() * 0.1 + self.calls
        self.last = h.detach()
        return h + self.mean


@feature("p q r", degrees=(2, 3))
class StateInUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.r = Accumulates(), Accumulates(), Accumulates()

    def forward(self, x: Tensor) -> Tensor:
        return self.r(torch.tanh(self.q(torch.tanh(self.p(x)))))


@feature("e a b", degrees=(2, 3), batch=lambda s, g: (torch.randint(0, 11, (7, 5), generator=g),
                                                     torch.randn(7, 5, W, dtype=torch.float64, generator=g)),
         optimizer=lambda p: torch.optim.SGD(p, lr=0.1))  # fmt: skip
class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b = nn.Embedding(11, W, sparse=True), linear(), linear()

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.e(ids))))


@feature("e f b", degrees=(2, 3), batch=lambda s, g: (torch.randint(0, 11, (7, 5), generator=g),
                                                     torch.randn(7, 5, W, dtype=torch.float64, generator=g)),
         optimizer=lambda p: torch.optim.SGD(p, lr=0.1))  # fmt: skip
class SparseTiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.f, self.b = nn.Embedding(11, W, sparse=True), nn.Embedding(11, W, sparse=True), linear()
        self.f.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(torch.tanh(self.e(ids)) + self.f(10 - ids))


@feature("a b c d", degrees=(2, 4))
class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parametrizations.weight_norm(linear()), parametrizations.spectral_norm(linear())
        self.c, self.d = parametrizations.orthogonal(linear()), nn.utils.spectral_norm(linear())

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


# -- layers of torch ------------------------------------------------------------------------------


@feature("first second out", degrees=(2, 3), batch=sequences)
class RecurrentStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(W, W, batch_first=True), nn.LSTM(W, W, num_layers=2, batch_first=True)
        self.gru = nn.GRU(W, W, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        h, (hidden, cell) = self.first(x)
        k, state = self.second(h, (hidden.repeat(2, 1, 1), cell.repeat(2, 1, 1)))
        g, last = self.gru(k, torch.cat([state[0][:1], state[1][1:]]))
        return self.out(g) + last.transpose(0, 1).sum(1, keepdim=True)


@feature("cell1 cell2 out", degrees=(2, 3), batch=sequences)
class RecurrentCells(nn.Module):
    """Time runs in glue: as many segments as time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell1, self.cell2, self.out = nn.LSTMCell(W, W), nn.GRUCell(W, W), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], W)
        g = torch.zeros(x.shape[0], W, dtype=x.dtype)
        outs = []
        for t in range(x.shape[1]):
            h, c = self.cell1(x[:, t], (h, c))
            g = self.cell2(h, g)
            outs.append(self.out(g))
        return torch.stack(outs, 1)


@feature("", degrees=(2, 3), batch=sequences, name="RecurrentAuto")
class _RecurrentAuto(RecurrentStates):
    pass


@feature("", degrees=(2, 4), batch=sequences)
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Transformer(W, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        pad = torch.zeros(x.shape[:2], dtype=torch.bool)
        pad[:, -1] = True
        return self.t(x, x.flip(1), tgt_mask=mask, src_key_padding_mask=pad)


@feature("", degrees=(2, 4), batch=sequences)
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(W, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.t = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(W), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.t(x, mask=mask, is_causal=True)


@feature("p m q n", degrees=(2, 4), batch=sequences)
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = linear(), linear()
        self.m, self.n = nn.MultiheadAttention(W, 2, batch_first=True), nn.MultiheadAttention(W, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.p(x)
        h, weights = self.m(h, h, x, key_padding_mask=x[..., 0] > 1.5)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        k, none = self.n(self.q(h), h, h, attn_mask=mask, need_weights=False)
        assert none is None
        return k + weights.mean(1)[..., None]


@feature("", degrees=(2, 3), batch=lambda s, g: (torch.randn(7, 4, 8, 8, dtype=torch.float64, generator=g).to(
    memory_format=torch.channels_last), torch.randn(7, W, dtype=torch.float64, generator=g)))  # fmt: skip
class Convolutions(nn.Module):
    """Channels last, a skip over a pool with indices."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.pool = nn.GroupNorm(2, 8), nn.MaxPool2d(2, return_indices=True)
        self.un, self.up, self.head = nn.MaxUnpool2d(2), nn.ConvTranspose2d(8, 8, 2), nn.Linear(8, W)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.c(x))
        p, where = self.pool(h)
        p = self.norm(self.d(p))
        h = self.un(p, where) + h
        return self.head(self.up(h).flatten(2).mean(2))


# -- batches that change --------------------------------------------------------------------------


def changing(step: int, g: torch.Generator) -> tuple[Any, ...]:
    n, s = [(7, 5), (7, 3), (4, 5), (7, 5), (3, 1), (9, 3)][step]
    return tuple(torch.randn(n, s, W, dtype=torch.float64, generator=g) for _ in range(2))


feature("a b c d", degrees=(2, 4), batch=changing, steps=6, name="ShapesChange")(Block)
feature("", degrees=(2, 3), batch=changing, steps=6, name="ShapesChangeAuto")(Block)


def rows(step: int, g: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(5, 7, W, dtype=torch.float64, generator=g), torch.randn(7, W, dtype=torch.float64, generator=g)


# -- partition and configuration ------------------------------------------------------------------

for _name, _config in {
    "MemoryWeightZero": {"memory_weight": 0.0}, "MemoryWeightOne": {"memory_weight": 1.0},
    "SkipTracing": {"skip_tracing": True}, "Dynamic": {"static_mode": False}, "Simple": {"pipeline": "simple"},
    "OneInFlight": {"active_microbatches": 1}, "Spread": {"placement_strategy": "spread"},
}.items():  # fmt: skip
    feature("", degrees=(2, 3), config=_config, name=_name)(Block)

feature("a b c d", "0 1 0 1", config={"static_mode": False}, name="AlternateDynamic")(Block)
feature("a b c d", "0 1 0 1", config={"active_microbatches": 1}, name="AlternateOneInFlight")(Block)
feature("a b c d", degrees=(2, 4), average=False, name="SummedGradients")(Block)
feature("a b c d", degrees=(2, 4), steps=4, name="Adam", optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
        tolerance=1e-8)(Block)  # fmt: skip
feature("a b c d", degrees=(2, 4), steps=4, name="Adagrad", optimizer=lambda p: torch.optim.Adagrad(p, lr=0.01))(Block)
feature("a b c d", degrees=(2, 4), steps=4, name="AdamWGroups", tolerance=1e-8, optimizer=lambda p: torch.optim.AdamW(
    [{"params": p[:3], "lr": 0.01}, {"params": p[3:], "weight_decay": 0.1}], eps=1e-3))(Block)  # fmt: skip
