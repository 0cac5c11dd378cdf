"""Features: what travels between modules, and how modules are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.features import Feature, W, feature, regression, sequences


def linear() -> nn.Linear:
    return nn.Linear(W, W)


class Layers(nn.Module):
    """Four layers a, b, c, d."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()


@dataclass
class Box:
    h: Tensor
    extra: Any = None
    name: str = "box"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class ToDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.w(x)
        return {"h": h, "none": None, "flag": True, "name": "relu", "n": 3, "deep": [(h * 2, {"k": h.tanh()})]}


class ToBox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, d: dict[str, Any]) -> Box:
        assert d["none"] is None and d["flag"] is True and d["n"] == 3
        act = getattr(torch, d["name"])
        return Box(act(self.w(d["h"])), extra={"x": d["deep"][0][0] + d["deep"][0][1]["k"]})


class ToPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, box: Box) -> Pair:
        assert box.name == "box"
        return Pair(self.w(box.h) + box.extra["x"], None)


class FromPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, pair: Pair) -> Tensor:
        assert pair.second is None
        return self.w(pair.first)


@feature("a b c d", degrees=(2, 3, 4))
class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = ToDict(), ToBox(), ToPair(), FromPair()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


class Odd(nn.Module):
    """Tensors of every layout and type."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.w(x)
        return {
            "transposed": h.t(),
            "expanded": h[:, :1].expand(-1, W),
            "strided": h[:, ::2],
            "offset": h[:, 3:],
            "scalar": h.sum(),
            "empty": h[:, :0],
            "int": h.argmax(1),
            "int32": h.argmax(1).int(),
            "uint8": (h > 0).to(torch.uint8),
            "bool": h > 0,
            "complex": torch.complex(h, h * 2).conj(),
            "imag": torch.complex(h, h * 2).conj().imag,
            "bf16": h.bfloat16(),
            "half": h.half(),
            "image": h.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
            "flipped": h.flip(1),
            "diagonal": h[:, :, None].expand(-1, -1, W).diagonal(dim1=1, dim2=2),
            "broadcast": torch.ones((), dtype=h.dtype).expand(h.shape[0], W),
        }


class UseOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, d: dict[str, Tensor]) -> Tensor:
        h = d["transposed"].t() + d["expanded"] * 0.5
        h = h + F.pad(d["strided"], (0, W - 4)) + F.pad(d["offset"], (3, 0)) + d["scalar"] * 0.1
        h = h + F.pad(d["empty"], (0, W)) + F.one_hot(d["int"], W) + d["int32"][:, None]
        h = torch.where(d["bool"], h, -h) + d["uint8"]
        h = h + d["complex"].abs() + d["imag"] + d["bf16"].double() + d["half"].double()
        h = h + d["image"].flatten(1) + d["flipped"] + d["diagonal"] + d["broadcast"]
        return self.w(h)


@feature("a b", tolerance=1e-9)
class OddTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Odd(), UseOdd()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@feature("a mid b", degrees=(3,), tolerance=1e-9)
class OddTensorsOverThree(nn.Module):
    """A stage in between makes some of them anew."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mid, self.b = Odd(), linear(), UseOdd()

    def forward(self, x: Tensor) -> Tensor:
        d = self.a(x)
        d["transposed"] = self.mid(d["transposed"].t()).t()
        d["strided"] = self.mid(x)[:, ::2]
        return self.b(d)


@feature("a b c d")
class OddTensorsInGlue(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        parts = [h.t(), h[:, :1].expand(-1, W), h[:, ::2], h.sum(), h[:, :0], h.argmax(1), h > 0, h.bfloat16()]
        c = torch.complex(h, h + 1).conj()
        h = self.b(h)
        h = self.c(parts[0].t() + parts[1]) + F.pad(parts[2], (0, 4)) + parts[3] + F.pad(parts[4], (0, W))
        h = torch.where(parts[6], h, h * 2) + F.one_hot(parts[5], W) + parts[7].double() + c.real + c.abs()
        return self.d(h)


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(
        self, h: Tensor, *, scale: float = 1.0, act: Callable[[Tensor], Tensor] | None = None, mode: str = "x",
        cols: slice = slice(None), extra: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        h = self.w(h) * scale
        if act is not None:
            h = act(h)
        if extra is not None:
            h = h + extra[:, cols].sum(1, keepdim=True)
        return h if mode == "x" else -h


@feature("a b c", degrees=(2, 3))
class KeywordArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = KeywordOnly(), KeywordOnly(), KeywordOnly()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x, scale=0.5, act=F.relu)
        h = self.b(h, mode="y", extra=x, cols=slice(0, 3), act=lambda t: t.sin())
        return self.c(h=h, act=torch.tanh, scale=2)


class PassesOn(nn.Module):
    """Returns its arguments and something new."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, h: Tensor, mask: Tensor, tag: str) -> tuple[Tensor, Tensor, Tensor, str]:
        return self.w(h) * mask, mask, h, tag


@feature("a i b c", degrees=(2, 4))
class PassedThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.i, self.b, self.c = PassesOn(), nn.Identity(), PassesOn(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h, mask, first, tag = self.a(x, torch.linspace(0, 1, W, dtype=x.dtype), "t")
        same = self.i(h)
        assert tag == "t"
        h, mask, second, _ = self.b(same, mask, tag)
        return self.c(h + mask + first + second)


@feature("a b c", degrees=(2, 3))
class SameTensorTwice(nn.Module):
    """A module returns one tensor under two names and a view of it; glue writes into it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = linear()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.w(x)
            return h, h, h[:, :4]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = self.Twice(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h, same, view = self.a(x)
        h.mul_(2)
        out = self.b(same)
        return self.c(out) + F.pad(view, (0, 4))


@feature("layers.5 layers.4 layers.3 layers.2 layers.1 layers.0", degrees=(2, 3))
class BackwardsList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(6))
        self.never = linear()

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


@feature("", name="BackwardsListAuto", degrees=(2, 3))
class _BackwardsAuto(BackwardsList):
    pass


@feature("body.0 body.1.0 body.1.2 body.2", degrees=(2, 4))
class SequentialOfSequentials(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(linear(), nn.ReLU(inplace=True)),
            nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), nn.ReLU(inplace=True), linear())),
            nn.Sequential(nn.ReLU(inplace=True), linear()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@feature("", name="SequentialOfSequentialsAuto", degrees=(2, 3))
class _SeqAuto(SequentialOfSequentials):
    pass


@feature("d.up d.mid d.down", degrees=(2, 3))
class ModuleDictByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.ModuleDict({"up": linear(), "mid": linear(), "down": linear()})

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.d.items():
            x = layer(x) if name != "mid" else x + layer(x)
        return x


@feature("a b c d", "0 1 0 1")
class Alternate(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


@feature("a b c d", "1 0 1 0")
class ReversedStages(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


@feature("a b c d", "3 2 1 0", degrees=(4,))
class LastStageFirst(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


@feature("a b c d", "2 0 1 1", degrees=(3,))
class MixedStages(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.b(x)
        return self.d(self.c(h + k) + self.a(k))


@feature("a b", degrees=(2,))
class ReUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.b(torch.tanh(self.a(x)))) + x
        return x


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else self.b(self(torch.tanh(self.a(x)), depth - 1))


@feature("r.a r.b")
class Recursion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r = Recursive()

    def forward(self, x: Tensor) -> Tensor:
        return self.r(x, 3)


@feature("r after")
class RecursionInUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r, self.after = Recursive(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.r(x, 2))


class Parent(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = linear(), shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(self.own(x)))


@feature("p q", degrees=(2,))
class SharedChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = linear()
        self.p, self.q = Parent(shared), Parent(shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(self.p(x))


@feature("p.own q.own p.shared", degrees=(2, 3), name="SharedChildSplit")
class _SharedChildSplit(SharedChild):
    pass


@feature("", degrees=(2, 3), name="SharedChildAuto", most=3)
class _SharedChildAuto(SharedChild):
    pass


@feature("a b c", degrees=(2, 3))
class TiedThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.b.weight = self.a.weight
        self.c.weight = self.a.weight
        self.c.bias = self.b.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))), self.a.weight.t())


@feature("a b c d", degrees=(2, 4))
class Diamond(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        left, right = self.b(h), self.c(h)
        return self.d(left * right + h) + h + left


class Parameterless(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, -1).view(-1, len(parts), W).mean(1)


@feature("a m b n", degrees=(2, 4))
class ParameterlessModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.m, self.b, self.n = linear(), Parameterless(), linear(), Parameterless()

    def forward(self, x: Tensor) -> Tensor:
        h = self.m(self.a(x), x)
        return self.n(self.b(h), h, x)


def sixty_layers() -> nn.Module:
    return nn.Sequential(*(m for _ in range(60) for m in (linear(), nn.Tanh())))


feature("", degrees=(2, 4), name="SixtyLayers")(sixty_layers)


@feature("a b c d", degrees=(4,), microbatches=1, name="OneMicrobatchOnFour")
class _One(Diamond):
    pass


@feature("a b c d", microbatches=7, degrees=(2, 3), name="MicrobatchesOfOne")
class _Each(Diamond):
    pass


@feature("a b c d", degrees=(2,), microbatches=16, name="SixteenMicrobatches",
         batch=lambda s, g: tuple(torch.randn(33, W, dtype=torch.float64, generator=g) for _ in range(2)))  # fmt: skip
class _Sixteen(Diamond):
    pass


class NestedBatch(NamedTuple):
    x: Tensor
    extra: Any


def nested_batch(step: int, g: torch.Generator) -> tuple[Any, ...]:
    x, y, z = (torch.randn(7, W, dtype=torch.float64, generator=g) for _ in range(3))
    return NestedBatch(x, {"z": z, "s": "text", "n": None, "l": [z * 2, (z * 3,)]}), y


@feature("a b c d", degrees=(2, 3), batch=nested_batch)
class NestedInputs(Layers):
    def forward(self, batch: NestedBatch) -> Tensor:
        e = batch.extra
        assert e["s"] == "text" and e["n"] is None
        h = self.b(self.a(batch.x) + e["z"])
        return self.d(self.c(h * e["l"][0]) + e["l"][1][0])


__all__ = ["Feature", "regression", "sequences"]


# -- modules that look equal and are not ----------------------------------------------------------


class Apply(nn.Module):
    """Any function as a module."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class View(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], *self.shape)


class Select(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[self.index]


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.w(x)
        return h, h * 2, x


@feature("a s b t u c", degrees=(2, 3))
class LookAlikes(nn.Module):
    """Equal classes and sizes, other functions, shapes and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Three(), Three(), linear()
        self.s, self.t = Select(1), Select(0)
        self.u, self.v, self.w, self.x = Apply(lambda h: h), Apply(torch.sin), Apply(lambda h: h * 3), Apply(F.relu_)
        self.p, self.q = View(2, 4), View(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.t(self.b(self.s(self.a(x))))
        h = self.q(self.p(self.w(self.v(self.u(h)))))
        k = h * 1
        self.x(k)
        return self.c(h + k)


@feature("", degrees=(2, 3), name="LookAlikesAuto")
class _LookAlikesAuto(LookAlikes):
    pass


class Gate(nn.Module):
    """Skips itself until it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.w = False, linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w(x)) if self.on else x


@feature("a g b h", degrees=(2, 4), steps=3, batch=lambda s, g: (
    torch.randn(7, W, dtype=torch.float64, generator=g), torch.randn(7, W, dtype=torch.float64, generator=g), s == 2),
    step=lambda model, x, y, on: _switched(model, x, y, on))  # fmt: skip
class SwitchedOnLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.g, self.h = linear(), linear(), Gate(), Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.b(self.g(self.a(x))))


def _switched(model: Any, x: Tensor, y: Tensor, on: bool) -> Tensor:
    model.module.g.on = model.module.h.on = on
    return regression(model, x, y)


def _teacher(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        target = model(x)
    model.train()
    loss = F.mse_loss(model(y), target)
    model.backward(loss)
    return loss


@feature("a n b m c", degrees=(2, 3), microbatches=2, step=_teacher)
class ModesInOneStep(nn.Module):
    """Evaluation and training of one model within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.n, self.m = nn.BatchNorm1d(W), Gate()

    def forward(self, x: Tensor) -> Tensor:
        self.m.on = self.training
        return self.c(self.m(torch.tanh(self.b(self.n(self.a(x))))))
