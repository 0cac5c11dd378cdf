"""Features: what Python does between modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.features import W, feature, sequences
from tests.parity.features_values import Layers, linear

# -- parameters outside of their modules ----------------------------------------------------------


@feature("a b c d", degrees=(2, 4))
class TopLevelParameters(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(W))
        self.bias = nn.Parameter(torch.rand(()))
        self.rows = nn.ParameterList(nn.Parameter(torch.rand(W)) for _ in range(4))
        self.named = nn.ParameterDict({"u": nn.Parameter(torch.rand(W)), "v": nn.Parameter(torch.rand(W))})
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale * self.a(x)
        mix = torch.stack(list(self.rows)).softmax(0)
        h = self.b(h + mix[0]) + self.named["u"]
        h = self.c(h * self.scale) * mix[1] + self.bias
        return self.d(h) + self.named["v"] * mix.sum(0) + self.rows[3]


@feature("", degrees=(2, 3), name="TopLevelParametersAuto")
class _TopAuto(TopLevelParameters):
    pass


@feature("a b c d", degrees=(2, 4), batch=sequences)
class ClassToken(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.rand(1, 1, W))
        self.position = nn.Parameter(torch.rand(1, 9, W))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], dim=1)
        h = h + self.position[:, : h.shape[1]]
        h = self.c(torch.tanh(self.b(h)))
        return self.d(h[:, 1:] * h[:, :1]) + self.position[:, -5:]


@feature("", degrees=(2, 3), batch=sequences, name="ClassTokenAuto")
class _ClassTokenAuto(ClassToken):
    pass


def tokens(step: int, g: torch.Generator) -> tuple[Any, ...]:
    return torch.randint(0, 11, (7, 5), generator=g), torch.randn(7, 5, 11, dtype=torch.float64, generator=g)


@feature("emb a b", degrees=(2, 3), batch=tokens)
class WeightReadOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.a, self.b = nn.Embedding(11, W), linear(), linear()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(self.emb(ids))))
        return F.linear(h, self.emb.weight) + (self.emb.weight.norm(dim=1) * 0.1)


@feature("a b c d", degrees=(2, 4))
class WeightNormByHand(Layers):
    """Parameters used by name from other modules, and expressions made of parameters only."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight / self.a.weight.norm(dim=1, keepdim=True)
        h = F.linear(x, w, self.d.bias)
        h = self.c(torch.tanh(self.b(h)))
        penalty = sum(p.square().sum() for p in self.parameters())
        return self.d(h) + penalty * 0.001


@feature("a b c d")
class FrozenAndUnused(Layers):
    def __init__(self) -> None:
        super().__init__()
        for p in (*self.a.parameters(), self.c.weight):
            p.requires_grad_(False)
        self.idle = nn.Parameter(torch.rand(2))
        self.branch = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(torch.tanh(self.b(self.a(x)))))


@feature("a b c d", degrees=(2, 4))
class AllFrozenButLast(Layers):
    def __init__(self) -> None:
        super().__init__()
        for m in (self.a, self.b, self.c):
            m.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(torch.tanh(self.b(self.a(x)))))


@feature("a b c d", degrees=(2, 4))
class BuffersInGlue(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(W))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", None)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.steps += 1
        h = self.b(self.a(x) * self.mask)
        return self.d(self.c(h) + self.count * 0.01 + self.steps)


# -- writing in place -----------------------------------------------------------------------------


@feature("a b c d", degrees=(2, 4))
class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        h.add_(1).mul_(0.5)
        k = self.b(h.clone())
        k[:, 0] = 0.25
        k[:, 1] = h[:, 1]
        k[:, 2:4] += h[:, 2:4]
        k.masked_fill_(x > 1, 0.1)
        k = self.c(k.clone())
        v = k[:, :4]
        v *= 2
        k.clamp_(min=-1).unsqueeze_(1)
        return self.d(k.squeeze(1))


@feature("a b c d", degrees=(2, 4))
class WriteAcrossStages(Layers):
    """What stage 0 made is written with what later stages made, and read again by an earlier stage."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.c(h.tanh())
        s = h.sin()
        s += k
        t = self.a(s)
        s2 = t * 1.0
        s2[:, :3] = self.d(k)[:, :3]
        return self.b(s2) + s + h


@feature("a b c d", degrees=(2, 4))
class ViewsWritten(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        first, rest = h[:, :3], h[:, 3:]
        first.mul_(2)
        k = self.b(h + 0)
        rest.add_(1)
        late = self.c(h * 1)
        h.add_(0.5)
        return self.d(late + k) + F.pad(first, (0, 5)) + F.pad(rest, (3, 0))


@feature("a b c d", degrees=(2, 4))
class ViewsOfWhatArrived(Layers):
    """A tensor of stage 0 is viewed and written beyond."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        k = self.d(h)
        v = h[:, :2]
        h = h + k
        w = h.view(-1, 2, 4)
        w[:, 0] *= 2
        return self.d(h) + F.pad(v, (0, 6))


@feature("a r b s c", degrees=(2, 3, 4))
class InPlaceUnitFirst(nn.Module):
    """A stage begins with an in-place activation; what it wrote is read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b, self.s, self.c = linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(True), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + 0.0
        k = self.r(h)
        m = self.b(h)
        m = m * 1.0
        self.s(m)
        return self.c(m) + h + k


@feature("a b c d", degrees=(2, 4))
class OutputAssembled(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.d(h)
        out = torch.zeros_like(k)
        out[:, :4] = k[:, 4:]
        out[:, 4:] = h[:, :4]
        late = torch.empty_like(h)
        late[:, ::2] = h[:, 1::2]
        late[:, 1::2] = k[:, ::2]
        return self.c(late) + out


@feature("a b c d", degrees=(2, 4), batch=sequences)
class OutputBufferOfZeros(Layers):
    """As in many sequence-to-sequence scripts: a plain tensor is filled with the model's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=x.dtype)
        h = self.b(self.a(x))
        for t in range(x.shape[1]):
            h = torch.tanh(h)
            out[:, t] = self.d(self.c(h[:, t]))
        return out


# -- operations -----------------------------------------------------------------------------------


@feature("a b c d", degrees=(2, 4), batch=sequences)
class Reshaping(Layers):
    def forward(self, x: Tensor) -> Tensor:
        n, s, w = x.shape
        h = self.a(x).view(n, s, 2, w // 2).permute(0, 2, 1, 3).reshape(n * 2, s, -1).unflatten(0, (n, 2))
        h = h.movedim(1, 2).flatten(2)
        q, k = self.b(h).chunk(2, -1)
        p, r = h.split([3, 5], dim=-1)
        h = torch.cat([q, k], -1) + torch.cat([r, p], -1)
        h = torch.stack([row for row in self.c(h)]) + torch.stack(h.unbind(1), 1)
        first, *others = h.transpose(0, 1)
        h = torch.stack([first, *others]).transpose(0, 1)
        h = torch.where(x > 0, h, torch.einsum("nsw,nsv->nsw", h, h))
        index = torch.tensor([4, 3, 2, 1, 0])
        h = h[:, index] + h.index_select(1, index) + h[..., None, :].squeeze(-2) + h[torch.arange(n)[:, None], index]
        h = h.gather(2, x.argsort(2)) + torch.roll(h, 1, 1) + F.pad(h, (0, 0, 1, -1)) + h.flip(1).cumsum(1)
        top = h.topk(3, -1)
        h = h.scatter(2, top.indices, top.values * 2) + (h.max(-1)[0] + h.max(1).values.sum(1, keepdim=True))[..., None]
        return self.d(h.tile(1, 1, 2).narrow(2, 3, w)) + h.mT.shape[0]


@feature("a b c d", degrees=(2,))
class Operators(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = 2 - h / 3 + (1 / (h.abs() + 1)) ** 2 + -h + +h + abs(h) + h % 2 + h.detach() // 1
        k = x @ k.t() @ x + (2 ** (h * 0.1)) + (h > 0) * h + ((h > 0) & (x > 0) | ~(h < 1)).double() + x * h
        k = sum([self.b(k), h, x]) + max(h.shape) + len(h) + h.size(0) + torch.sum(h, dim=1, keepdim=True)
        k = x.add(h) + torch.add(x, h, alpha=2) + x.addmm(x @ x.t(), h) + k + torch.tensor(2.0) * h
        k = torch.atan2(x, h) + x.lerp(h, 0.3) + torch.clamp(h, x - 1, x + 1) + k
        new = h.new_zeros(3) + h.new_tensor([1.0, 2.0, 3.0]) + h.new_full((3,), 2.0)
        k = k + new.sum() + torch.ones_like(h) + h.new_ones(h.shape) + torch.zeros(h.size(), dtype=h.dtype)
        k = k.to(x.dtype).type_as(x).to(h).float().double().contiguous().clone().requires_grad_()
        return self.d(self.c(k)) + h.norm() + h.std() + h.var(0) + F.cosine_similarity(h, x)[:, None]


@feature("a b c d", degrees=(2,))
class NumpyAndConstants(Layers):
    def forward(self, x: Tensor) -> Tensor:
        import numpy as np

        h = self.a(x)
        m = torch.from_numpy(np.arange(W, dtype=np.float64)) * float(np.float64(0.1))
        h = h * m + np.float64(2.0)
        q = x.detach().numpy().mean()
        return self.d(self.c(self.b(h * q)))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, y: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor, x.detach() > 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * 3 + x * 0.01, None, None  # deliberately not the derivative


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class UsesFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> Tensor:
        return ReverseGradient.apply(Double.apply(self.w(x), 0.5, None)[0])


@feature("a u b c d", degrees=(2, 4))
class CustomFunctions(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.u = UsesFunction()

    def forward(self, x: Tensor) -> Tensor:
        h, positive = Double.apply(self.a(x), 2.0, None)
        h = ReverseGradient.apply(self.u(h))
        h = self.c(self.b(h))
        h = ReverseGradient.apply(h)
        return self.d(torch.where(positive, h, Double.apply(h, -1.0, x)[0]))


class Checkpoints(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.w, self.v, self.drop, self.reentrant = linear(), linear(), nn.Dropout(0.0), reentrant

    def inner(self, h: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.v(torch.tanh(self.w(h)))))

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


@feature("a k b l c", degrees=(2, 3))
class CheckpointsInUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.k, self.l = Checkpoints(True), Checkpoints(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.l(self.b(self.k(self.a(x)))))


@feature("a b c d", degrees=(2, 4))
class CheckpointsInGlue(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def block(h: Tensor, skip: Tensor, scale: float = 1.0) -> Tensor:
            return torch.tanh(self.c(torch.tanh(self.b(h) * skip))) * scale

        h = self.a(x)
        h = checkpoint(block, h, x, use_reentrant=True)
        h = checkpoint(block, h, x, scale=0.5, use_reentrant=False)
        return self.d(h)


@feature("k.w k.v l.w l.v c", degrees=(2, 4))
class CheckpointsSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.l, self.c = Checkpoints(True), Checkpoints(False), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.l(self.k(x)))


@torch.jit.script
def scripted(h: Tensor, n: int) -> Tensor:
    for _ in range(n):
        h = torch.tanh(h) * 2
    return h


class UsesScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, h: Tensor) -> Tensor:
        return scripted(self.w(h), 2)


@feature("a b c", degrees=(2, 3))
class ScriptedInUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = UsesScript(), torch.jit.script(linear()), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class ScriptGlue(nn.Module):
    """Its own forward calls a scripted function on what a child made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return scripted(self.b(scripted(self.a(x), 1)), 1)


@feature("", degrees=(2, 3))
class ScriptedInSomeForwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(ScriptGlue() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


# -- reading values, branches ---------------------------------------------------------------------


@feature("a b c d", degrees=(2, 3))
class ReadsValues(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.mean() > 0:
            h = torch.tanh(h)
        n = int((h > 0).sum()) % 3 + 1
        for _ in range(n):
            h = self.b(h)
        scale = h.abs().max().item()
        h = self.c(h / scale)
        if bool(torch.isnan(h).any()) or not torch.isfinite(h).all():
            raise ValueError("nan")
        values = h[0].tolist()
        text = f"{h.mean():.3f} {h.shape}"
        assert len(values) == W and "." in text
        return self.d(h) * float(h.std())


@feature("a b c d", degrees=(2, 3))
class ShapesFromData(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        rows = (h.sum(1) > 0).nonzero().squeeze(1)
        picked = h[rows]
        out = torch.zeros_like(h)
        if len(rows):
            out = out.index_add(0, rows, self.b(picked))
        mask = h > 0.1
        positive = h[mask]
        return self.d(self.c(out + h)) + positive.sum() + h.masked_select(h < 0).mean()


class Experts(nn.Module):
    """Data-dependent shapes inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = linear(), nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x)[:, :3].argmax(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == i)
            if rows.numel():
                out[rows] = expert(x[rows])
        return out


@feature("a e b f", degrees=(2, 4))
class ExpertsInUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.e, self.b, self.f = linear(), Experts(), linear(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.b(self.e(self.a(x)) + x)) + x


@feature("", degrees=(2, 3), name="ExpertsAuto")
class _ExpertsAuto(ExpertsInUnits):
    pass


class Picks(nn.Module):
    """Its result's shape depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.w(x)
        return h[h.sum(1) > 0]


@feature("a p b", degrees=(2, 3))
class UnitOfUnknownShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.p, self.b = linear(), Picks(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(self.p(self.a(x))).sum(0)


@feature("a b c d", degrees=(2, 4))
class BranchesOnInputs(Layers):
    """Every microbatch may go another way, decided by values that all ranks have."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.sum() > 0:
            h = self.b(h)
        if x.shape[0] > 2 and self.training:
            h = h * 2
        if float(x[0, 0]) > 0:
            h = self.c(h)
        return self.d(h)


@feature("a b c d", degrees=(2, 4), steps=4)
class LayerDrop(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_tensor([(x.sum() > 0).item(), True, x[0, 1] < 0, True])
        for i, layer in enumerate((self.a, self.b, self.c, self.d)):
            if torch.rand(1, dtype=x.dtype) < 1.1 and keep[i] > 0:
                x = torch.tanh(layer(x))
        return x


@feature("a b c d", degrees=(2,), steps=4)
class ChangesWithTime(Layers):
    """Program by a counter of the module: other layers in other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x)
        if self.calls > 6:
            h = self.b(h)
        return self.d(self.c(h))


# -- hooks ----------------------------------------------------------------------------------------


def halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(1.0)


class Hooked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda m, args, out: out * 2)
        self.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        self.c.register_forward_pre_hook(lambda m, args, kw: (args, {"input": kw["input"] * 3}), with_kwargs=True)
        self.d.register_forward_hook(lambda m, args, kwargs, out: out + args[0], with_kwargs=True)
        self.b.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 if g is not None else None for g in gi))
        self.c.register_full_backward_pre_hook(lambda m, go: tuple(g * 0.5 for g in go))
        self.a.weight.register_hook(lambda g: g * 10)
        self.d.weight.register_post_accumulate_grad_hook(halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(input=torch.tanh(self.b(self.a(x))))))


feature("a b c d", degrees=(2, 4), name="ModuleHooks")(Hooked)
feature("", degrees=(2, 3), name="ModuleHooksAuto")(Hooked)


class Block(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


@feature("k.a k.b k.c k.d after", degrees=(2, 4))
class HooksOnSplitModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.after = Block(), linear()
        self.k.register_forward_hook(lambda m, args, out: out * 2 + args[0])
        self.k.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        self.register_forward_hook(lambda m, args, out: out + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.k(x))


@feature("", degrees=(2, 4))
class HookOnModuleThatIsSplitLater(nn.Module):
    """Its hook keeps its output for the loss: it first runs in glue beside a unit, which then is too costly."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.after = Block(), linear()
        self.kept: list[Tensor] = []
        self.k.register_forward_hook(lambda m, args, out: self.kept.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        y = self.after(self.k(x))
        return y + sum(h.square() for h in self.kept)


@feature("", degrees=(2, 3), most=3)
class BackwardHooksOnParents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.after, self.first = Block(), linear(), linear()
        self.k.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 if g is not None else None for g in gi))
        self.k.register_full_backward_pre_hook(lambda m, go: tuple(g * 0.5 for g in go))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.k(self.first(x)))


@feature("a b c d", degrees=(2, 4))
class TensorHooks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.register_hook(lambda g: g * 2)
        k = self.c(h)
        k.register_hook(lambda g: g + 0.1)
        m = self.b(h + k)
        handle = m.register_hook(lambda g: g * 100)
        handle.remove()
        if m.requires_grad:
            m.register_hook(lambda g: g.clamp(-0.01, 0.01))
        out = self.d(m) + h
        out.register_hook(lambda g: g * 3)
        return out


@feature("a b c d", degrees=(2, 4))
class HookAfterUse(Layers):
    """A hook set after the tensor was sent on."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.d(self.c(h))
        h.register_hook(lambda g: g * 2)
        return self.b(k) + h


# -- gradient modes -------------------------------------------------------------------------------


@feature("a b c d", degrees=(2, 4))
class NoGradParts(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            f = self.b(self.a(x))
        h = self.c(f)
        with torch.enable_grad():
            h = h * 2
        target = h.detach().sin()
        return self.d(h) + target


@feature("a b c d", degrees=(2, 4))
class DetachedParts(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.b(h.detach())
        m = self.c(k)
        return self.d(m.detach() * k) + h.sum() * 0.1 + (m - m.detach())


@feature("a b c d", degrees=(2, 4))
class RequiresGradInside(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).requires_grad_()
        k = self.a(x).detach().requires_grad_(True)
        return self.d(self.c(self.b(h) * k) + k)


@feature("a b c d", degrees=(2, 4))
class StraightThrough(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        q = h + (h.round() - h).detach()
        onehot = F.one_hot(q.argmax(1), W)
        return self.d(self.c(q) * onehot)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


@feature("a b c", degrees=(2, 3))
class FrozenExtractor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Decorated(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x))))


@feature("a b c d", degrees=(2, 4), tolerance=1e-2, dtype=torch.float32)
class AutocastInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(self.a(x.float()))
            assert h.dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                h = self.c(h.float())
                assert h.dtype == torch.float32
            h = torch.tanh(h)
            k = h @ x.float().t()
            assert k.dtype == torch.bfloat16
        return self.d(h).double()


@feature("a b c d", degrees=(2, 4), batch=sequences)
class BuffersOfManyKinds(Layers):
    """Plain tensors filled from several stages, read in between, written before and after."""

    def forward(self, x: Tensor) -> Tensor:
        n, s, w = x.shape
        flat = torch.zeros(n * s, w, dtype=x.dtype)
        flat += 0.5
        same = flat
        flat.index_add_(0, torch.arange(0, n * s, 2), self.a(x).flatten(0, 1)[::2])
        h = self.b(same.view(n, s, w))
        score = x.new_full((n, s), -1.0)
        score[h.sum(-1) > 0] = 2.0
        copy = x.clone()
        copy[:, 0] = self.c(h)[:, 0]
        copy[:, 1:] += h[:, 1:] * score[:, 1:, None]
        lengths = torch.tensor([1.0, 2.0], dtype=x.dtype)
        lengths *= h.mean()
        return self.d(copy) + flat.view_as(x) + lengths.sum()


@feature("", degrees=(2, 3), batch=sequences, name="BuffersOfManyKindsAuto")
class _BuffersAuto(BuffersOfManyKinds):
    pass


@feature("a b c d", degrees=(2, 4))
class WriteIntoBuffer(Layers):
    """A running mean of activations, used by the next microbatch on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        return self.d(self.c(self.b(h)) + self.mean)


@feature("a b c d", degrees=(2, 4))
class WriteIntoSentTensor(Layers):
    """A tensor is on its way to another stage when its home writes into it; large enough not to be sent at once."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + torch.zeros(60_000 // W, 1, W, dtype=x.dtype)
        there = h + self.c(x)
        for _ in range(4):
            h.mul_(-3)
        return self.d(there + self.b(h)).mean(0)


@feature("a b c d", degrees=(2, 4))
class BatchNormFunction(Layers):
    """Batch norm as a function: it updates buffers of a split module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(W, dtype=torch.float64))
        self.register_buffer("var", torch.ones(W, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = F.batch_norm(layer(x), self.mean, self.var, training=self.training).relu()
        return self.d(x)


# -- refused --------------------------------------------------------------------------------------


@feature("k.a k.b k.c k.d after", refused="NotInGlue")
class BackwardHooksOnSplitModules(BackwardHooksOnParents):
    pass


@feature("a b c d", refused="WriteIntoReplicated")
class WriteIntoInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = self.a(x)[:, 0]
        return self.d(self.c(self.b(x)))


@feature("a b c d", refused="BypassedGlue")
class ScriptInGlue(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(scripted(self.b(self.a(x)), 2)))


@feature("a b c d", refused="OtherMicrobatch")
class TensorKeptOverSteps(Layers):
    """A recurrent state kept in an attribute of a split module: it belongs to another microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(1, W, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        h = h + self.state.mean(0)
        self.state = h.detach()
        return self.d(self.c(h))


@feature("a b c d", refused="OtherMicrobatch", config={"static_mode": False}, name="TensorKeptOverStepsDynamic")
class _Kept(TensorKeptOverSteps):
    pass


def autograd_inside(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    loss = F.mse_loss(h, y)
    (g,) = torch.autograd.grad(loss, h, create_graph=True)
    model.backward(loss + g.square().sum())
    return loss


feature("k.a k.b k.c k.d after", refused="NotInGlue", step=autograd_inside, name="GradInsideAStep")(HooksOnSplitModules)


class Smuggles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()
        self.extra: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x) + (self.extra if self.extra is not None else 0)


@feature("a b", refused="OutsideStep")
class TensorThroughAttribute(nn.Module):
    """A stage tensor reaches a module on another stage behind smpar's back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), Smuggles()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.b.extra = h.tanh()
        return self.b(h)


class Uniques(nn.Module):
    """Operators whose results have as many rows as the data say, inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.w(x)
        values, places = torch.unique(h.argmax(1), return_inverse=True)
        counts = torch.bincount(places, minlength=len(values)).to(h.dtype)
        spread = torch.repeat_interleave(torch.arange(len(values)), counts.long())
        return h * counts[places][:, None] + spread.sum() + values.sum()


@feature("a u b v", degrees=(2, 4))
class UniqueInUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.u, self.b, self.v = linear(), Uniques(), linear(), Uniques()

    def forward(self, x: Tensor) -> Tensor:
        return self.v(self.b(self.u(self.a(x))))


class Values(nn.Module):
    """Reads numbers of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, float, int]:
        h = self.w(x)
        n = int((h > 0).sum().item())
        if n > 3:
            h = h * 2
        return h, float(h.detach().abs().max()), n


@feature("a u b v", degrees=(2, 4))
class NumbersFromUnits(nn.Module):
    """Python numbers that a module computes from data and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.u, self.b, self.v = linear(), Values(), linear(), Values()

    def forward(self, x: Tensor) -> Tensor:
        h, largest, n = self.u(self.a(x))
        h, other, m = self.v(self.b(h / largest) + n)
        return h / other + m
