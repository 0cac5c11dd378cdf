"""Features: side channels, randomness, unusual calls."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.parity.features import W, feature, regression, sequences
from tests.parity.features_glue import Block
from tests.parity.features_values import Layers, linear


class Collects(Block):
    """Hooks keep outputs of parts in a dict, and the step's loss uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        for name in "ac":
            getattr(self, name).register_forward_hook(functools.partial(self._keep, name))

    def _keep(self, name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept[name] = out


def uses_kept(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss = loss + sum(h.square().mean() for h in model.module.kept.values())
    model.backward(loss)
    return loss


feature("a b c d", degrees=(2, 4), step=uses_kept, name="HooksThatKeepOutputs")(Collects)


class Auxiliary(nn.Module):
    """Leaves a tensor of its own in an attribute (an auxiliary loss), as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.aux = linear(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.w(x)
        self.aux = h.square().mean()
        return torch.tanh(h)


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = Auxiliary(), Auxiliary(), Auxiliary(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


def uses_aux(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    for m in model.module.modules():
        if isinstance(m, Auxiliary):
            loss = loss + 0.1 * m.aux
    model.backward(loss)
    return loss


feature("a b c d", degrees=(2, 4), step=uses_aux, name="AuxiliaryLossInAttributes")(WithAuxiliary)
feature("", degrees=(2, 3), step=uses_aux, name="AuxiliaryLossInAttributesAuto")(WithAuxiliary)


class TakesList(nn.Module):
    """Appends to a list that it is given, and fills a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor, all_states: list[Tensor], cache: dict[str, Tensor]) -> Tensor:
        h = self.w(x)
        all_states.append(h)
        if "k" in cache:
            h = h + cache["k"]
        cache["k"] = h.tanh()
        return h


@feature("a b c d", degrees=(2, 4))
class MutatedArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = TakesList(), TakesList(), TakesList(), TakesList()

    def forward(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        cache: dict[str, Tensor] = {}
        for layer in (self.a, self.b, self.c, self.d):
            x = layer(x, states, cache)
        return x + torch.stack(states).sum(0) + cache["k"]


@feature("", degrees=(2, 3), name="MutatedArgumentsAuto")
class _MutatedAuto(MutatedArguments):
    pass


class Pushes(nn.Module):
    """Calls a function of its parent, that glue made."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor, act: Any) -> Tensor:
        return act(self.w(x))


@feature("a b c", degrees=(2, 3))
class ClosuresAsArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Pushes(), Pushes(), Pushes()

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate((self.a, self.b, self.c)):
            x = layer(x, lambda h, i=i: h * (i + 1))
        for i, layer in enumerate((self.a, self.b, self.c)):
            x = layer(x, functools.partial(torch.clamp, min=-i - 1))
        return x


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor, options: Any) -> Tensor:
        h = self.w(x)
        return h if options.keep else x


class Options:
    def __init__(self, keep: bool) -> None:
        self.keep = keep


@feature("a b c", degrees=(2, 3))
class ObjectsAsArguments(nn.Module):
    """Objects that smpar knows nothing of decide what a module does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Configured(), Configured(), Configured()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x, Options(False))
        x = self.b(x, Options(True))
        return self.c(self.a(x, Options(True)), Options(False)) * 2


@feature("a b c d", degrees=(2, 4))
class FunctionalCall(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = F.layer_norm(h, (W,), self.b.bias, self.c.bias)
        h = F.linear(self.b(h), self.c.weight, self.a.bias)
        return self.d(self.c(h))


@feature("a b c d", degrees=(2, 4))
class SubclassesOfTensor(Layers):
    """torch.nn.Parameter made in forward, and UserDict-like outputs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        fixed = nn.Parameter(torch.ones(W, dtype=x.dtype), requires_grad=False)
        return self.d(self.c(h * fixed))


@feature("a b c d", degrees=(2, 4))
class UnusedResults(Layers):
    """Modules that run in vain, whose results nobody reads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.c(h)
        _ = self.b(h).sum()
        return self.d(h)


@feature("a b c d", degrees=(2, 4))
class GradientOfNothing(Layers):
    """A part that is multiplied by zero keeps zero gradients, another without use keeps none."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.b(h)
        return self.d(h) + 0.0 * self.c(k) + k.detach()


class ExceptionInside(Layers):
    """Control flow by exceptions."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            h = h.view(3, 1, 7, 11)
        except RuntimeError:
            h = self.b(h)
        return self.d(self.c(h))


feature("a b c d", degrees=(2, 4))(ExceptionInside)


def generator_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    net = model.module

    def hidden() -> Any:
        h = x
        for layer in net.children():
            h = torch.tanh(layer(h))
            yield h

    loss = sum(F.mse_loss(h, y) for h in hidden())
    model.backward(loss)
    return loss


feature("a b c d", degrees=(2, 4), step=generator_step, name="Generators")(Block)


def contrastive(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two towers through one model, compared with one another."""
    a, b = F.normalize(model(x), dim=1), F.normalize(model(y), dim=1)
    logits = a @ b.T / 0.1
    loss = F.cross_entropy(logits, torch.arange(len(x))) + F.cross_entropy(logits.t(), torch.arange(len(x)))
    model.backward(loss)
    return loss


feature("a b c d", degrees=(2, 4), step=contrastive, name="Contrastive")(Block)


def scaled_backward(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    (loss * 1024.0).div(4).backward() if not hasattr(model, "share") else (loss * 256.0 * model.share).backward()
    return loss


feature("a b c d", degrees=(1, 2, 4), step=scaled_backward, name="LossBackward")(Block)


def twice_through_one_graph(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    loss = F.mse_loss(h, y)
    model.backward(loss)
    model.backward(loss * 2)
    return loss


feature("a b c d", degrees=(2, 4), step=twice_through_one_graph, name="TwoBackwardsOfOneLoss")(Block)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.ModuleList([linear(), linear()]), nn.ModuleDict({"x": linear(), "y": linear()})])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.inner
        for layer in first:
            x = torch.tanh(layer(x))
        return second["y"](torch.tanh(second["x"](x)))


feature("", degrees=(2, 4))(Deep)


class CallsMethods(nn.Module):
    """Other methods than forward: encode and decode, used from a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def decode(self, h: Tensor) -> Tensor:
        return self.down(h) + F.linear(h, self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.mid = CallsMethods(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.code.decode(self.mid(self.code.encode(x)))


feature("", degrees=(2, 3), name="MethodsBesidesForward", most=3)(Autoencoder)
feature("code mid", degrees=(2,), name="MethodsBesidesForwardByHand")(Autoencoder)

__all__ = ["regression", "sequences"]


class TellsFlags(nn.Module):
    """Computes by what it sees of the process's settings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        k = 2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0
        return torch.tanh(self.layer(x) * k + torch.finfo(torch.get_default_dtype()).eps ** 0.25)


@feature("a b c d", degrees=(2, 4), microbatches=4)
class FlagsOfTheProcess(nn.Module):
    """Set around modules of several stages, and put back behind them: microbatches take turns in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (TellsFlags() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                x = self.d(self.c(self.b(self.a(x))))
        finally:
            torch.set_default_dtype(before)
        k = 2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0
        return x * k * (1 + torch.finfo(torch.get_default_dtype()).eps)
