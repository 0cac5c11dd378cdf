"""A backward in two parts gives what the whole one gives, whatever the graph; products of weights wait."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from smpar.errors import FactorWritten
from smpar.runtime import backward

WIDTH = 6


class Doubled(torch.autograd.Function):
    """A custom function; counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Doubled.runs += 1
        return 2 * grad


class Model(nn.Module):
    """Parts to build graphs of."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b2 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.straight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(WIDTH, WIDTH, 3, stride=2)


GRAPHS: dict[str, tuple[Callable[[Model, Tensor], Tensor], int]] = {  # graph, and how many products wait
    "linear with bias": (lambda m, x: m.a(x), 1),
    "linear without bias": (lambda m, x: m.b(x), 1),
    "layers and what is between them": (lambda m, x: x + m.b(F.gelu(m.a(m.norm(x)))), 2),
    "weight used as it is": (lambda m, x: torch.addmm(m.bias, x.flatten(0, -2), m.straight).view_as(x), 1),
    "scaled product": (lambda m, x: torch.addmm(m.bias, x.flatten(0, -2), m.straight, alpha=3.0).view_as(x), 0),
    "convolutions": (lambda m, x: m.up(m.conv(x.transpose(-1, -2)))[..., : x.shape[-2]].transpose(-1, -2), 2),
    "weight used twice": (lambda m, x: m.a(m.a(x)), 0),
    "weight also used otherwise": (lambda m, x: m.a(x) * m.a.weight.sum(), 0),
    "weight made of a parameter": (lambda m, x: F.linear(x, torch.tanh(m.straight)), 0),
    "product of two parameters": (lambda m, x: x @ torch.mm(m.straight, m.b.weight), 0),
    "product of two activations": (lambda m, x: torch.mm(x.flatten(0, -2).t(), x.flatten(0, -2)), 0),
    "custom function": (lambda m, x: Doubled.apply(m.a(Doubled.apply(m.b(x)))), 0),
    "checkpoint": (lambda m, x: m.b(checkpoint(lambda y: F.gelu(m.a(y)), x, use_reentrant=False)), 1),
    "old checkpoint": (lambda m, x: m.b(checkpoint(lambda y: F.gelu(m.a(y)), x, use_reentrant=True)), 0),
    "layers that see data only": (lambda m, x: m.norm(m.b(m.b2(x.detach()))) + m.a(x), 2),
    "no parameter": (lambda m, x: x * 2, 0),
    "frozen weight": (lambda m, x: F.linear(m.b(x), m.a.weight.detach()), 1),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("earlier", [False, True], ids=["first", "accumulated"])
def test_two_parts_give_the_whole(name: str, earlier: bool, seed: int) -> None:
    torch.manual_seed(seed)
    graph, waiting = GRAPHS[name]
    parted = Model().double()
    whole = copy.deepcopy(parted)
    for _ in range(1 + earlier):
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        results = [graph(m, i) for m, i in zip((parted, whole), inputs, strict=True)]
        start = torch.randn_like(results[0])
        Doubled.runs = 0
        products = backward.of_inputs([get_gradient_edge(results[0])], [start])
        assert torch.equal(inputs[0].grad, backward_alone(results[1], start, inputs[1]))  # type: ignore[arg-type]
        assert Doubled.runs in (0, 4)  # each of the two once in either way
        assert len(products) == waiting
        backward.of_weights(products)
        assert not products
        compare(parted, whole)


def backward_alone(result: Tensor, start: Tensor, x: Tensor) -> Tensor:
    result.backward(start)
    assert x.grad is not None
    return x.grad


def compare(parted: nn.Module, whole: nn.Module) -> None:
    for (name, p), q in zip(parted.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_gradients_of_inputs_come_before_those_of_weights(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Model(), torch.randn(3, WIDTH, requires_grad=True)
    y = model.a(x)
    products = backward.of_inputs([get_gradient_edge(y)], [torch.ones_like(y)])
    assert x.grad is not None and model.a.weight.grad is None
    backward.of_weights(products)
    assert model.a.weight.grad is not None


def test_hooks_of_weights_run_once_with_the_same_gradients(seed: int) -> None:
    torch.manual_seed(seed)
    seen: dict[str, list[Tensor]] = {"parted": [], "whole": []}
    models = {"parted": Model()}
    models["whole"] = copy.deepcopy(models["parted"])
    x = torch.randn(3, WIDTH)
    for which, model in models.items():
        model.a.weight.register_hook(lambda g, s=seen[which]: s.append(g.clone()) or 2 * g)  # type: ignore[misc]
        model.b.weight.register_post_accumulate_grad_hook(lambda p, s=seen[which]: s.append(p.grad.clone()))
        y = model.a(model.b(x.clone().requires_grad_()))
        if which == "parted":
            backward.of_weights(backward.of_inputs([get_gradient_edge(y)], [torch.ones_like(y)]))
        else:
            y.backward(torch.ones_like(y))
    assert len(seen["parted"]) == len(seen["whole"]) == 2
    for a, b in zip(seen["parted"], seen["whole"], strict=True):
        torch.testing.assert_close(a, b)
    compare(models["parted"], models["whole"])


@pytest.mark.parametrize("place", ["transposed weight", "its kept gradient", "leaf", "before leaf", "gone"])
def test_hooks_on_the_way_to_a_weight(place: str, seed: int) -> None:
    """They can be on what is made of the weight, or on its node; such a weight does not wait."""
    torch.manual_seed(seed)
    x, start = torch.randn(2, 3, WIDTH)
    noted: dict[bool, list[Tensor]] = {}
    grads: dict[bool, Tensor] = {}
    for parted in (True, False):
        weight = nn.Parameter(torch.ones(WIDTH, WIDTH) / 3)
        turned = weight.t()
        leaf = turned.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        notes = noted[parted] = []
        if place == "transposed weight":
            turned.register_hook(lambda g: 2 * g)
        elif place == "its kept gradient":
            turned.retain_grad()
        elif place == "leaf":
            leaf.register_hook(lambda _, grads, n=notes: n.append(grads[0].clone()))  # type: ignore[union-attr]
        elif place == "before leaf":
            leaf.register_prehook(lambda grads: (3 * grads[0],))  # type: ignore[union-attr]
        else:
            leaf.register_hook(lambda *_, n=notes: n.append(torch.ones(()))).remove()  # type: ignore[union-attr]
        y = x.clone().requires_grad_() @ turned
        if parted:
            products = backward.of_inputs([get_gradient_edge(y)], [start])
            assert len(products) == (place == "gone")
            backward.of_weights(products)
        else:
            y.backward(start)
        if place == "its kept gradient":
            assert turned.grad is not None
            notes.append(turned.grad)
        assert weight.grad is not None
        grads[parted] = weight.grad
    torch.testing.assert_close(grads[True], grads[False])
    torch.testing.assert_close(noted[True], noted[False])


def cast(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A product's right factor made of a weight, and the tensor in between that can be seen."""
    made = weight.to(torch.float32)
    return made.t(), made


def turned_and_cast(weight: Tensor) -> tuple[Tensor, Tensor]:
    turned = weight.t()
    return turned.to(torch.float32), turned


def on_tensor(made: Tensor, result: Tensor, notes: list[Tensor]) -> None:
    made.register_hook(lambda g: notes.append(g.clone()) or 2 * g)  # type: ignore[func-returns-value]


def on_node(made: Tensor, result: Tensor, notes: list[Tensor]) -> None:
    assert made.grad_fn is not None
    made.grad_fn.register_hook(lambda ins, outs: notes.append(outs[0].clone()))


def before_node(made: Tensor, result: Tensor, notes: list[Tensor]) -> None:
    assert made.grad_fn is not None
    made.grad_fn.register_prehook(lambda outs: (3 * outs[0],))


def on_product(made: Tensor, result: Tensor, notes: list[Tensor]) -> None:
    assert result.grad_fn is not None
    result.grad_fn.register_hook(lambda ins, outs: (ins[0], 2 * ins[1]))


def before_product(made: Tensor, result: Tensor, notes: list[Tensor]) -> None:
    assert result.grad_fn is not None
    result.grad_fn.register_prehook(lambda outs: (5 * outs[0],))


def on_several(made: Tensor, result: Tensor, notes: list[Tensor]) -> None:
    def note(grads: Any) -> None:
        notes.extend(g.clone() for g in grads if g is not None)  # torch tells each apart if one is the root

    register_multi_grad_hook([made, result], note)


def nothing(made: Tensor, result: Tensor, notes: list[Tensor]) -> None:
    pass


@pytest.mark.parametrize("make", [cast, turned_and_cast])
@pytest.mark.parametrize("hook", [on_tensor, on_node, before_node, on_product, before_product, on_several, nothing])
def test_hooks_between_a_weight_and_its_product(
    make: Callable[[Tensor], tuple[Tensor, Tensor]], hook: Callable[[Tensor, Tensor, list[Tensor]], None], seed: int
) -> None:
    torch.manual_seed(seed)
    first, start = torch.randn(2, 3, WIDTH)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))] * 2
    weights[1] = nn.Parameter(weights[0].detach().clone())
    noted: tuple[list[Tensor], list[Tensor]] = ([], [])
    inputs = [first.clone().requires_grad_() for _ in range(2)]
    for weight, x, notes in zip(weights, inputs, noted, strict=True):
        factor, made = make(weight)
        y = torch.mm(x, factor)
        hook(made, y, notes)
        if weight is weights[0]:
            products = backward.of_inputs([get_gradient_edge(y)], [start])
            if make is cast:
                assert len(products) == (hook in (nothing, before_product))
            backward.of_weights(products)
        else:
            y.backward(start)
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(noted[0], noted[1])
    assert bool(noted[0]) == (hook in (on_tensor, on_node, on_several))


def scaled(layer: nn.Module) -> None:
    class Scaled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    parametrize.register_parametrization(layer, "weight", Scaled())


def turned(layer: nn.Module) -> None:
    class Turned(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.transpose(0, 1)

    parametrize.register_parametrization(layer, "weight", Turned())


@pytest.mark.parametrize(
    "change",
    [scaled, turned, parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
)
def test_weights_that_are_made_of_others(change: Callable[[nn.Module], Any], seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(WIDTH, WIDTH).double()
    change(layer)
    other = copy.deepcopy(layer)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [m(i) for m, i in zip((layer, other), inputs, strict=True)]
    start = torch.randn_like(x)
    backward.of_weights(backward.of_inputs([get_gradient_edge(results[0])], [start]))
    results[1].backward(start)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    compare(layer, other)


def test_a_gradient_that_is_a_view_of_what_a_product_keeps(seed: int) -> None:
    """Each microbatch adds to it in place, while products of earlier ones still wait."""
    torch.manual_seed(seed)
    parted = Model()
    whole = copy.deepcopy(parted)
    waiting = []
    for _ in range(3):
        x, start = torch.randn(2, 1, WIDTH, WIDTH)
        results = [m.a(x.clone().requires_grad_()) + m.straight[None] for m in (parted, whole)]
        waiting.append(backward.of_inputs([get_gradient_edge(results[0])], [start.clone()]))
        results[1].backward(start.clone())
    for products in waiting:
        assert len(products) == 1
        backward.of_weights(products)
    for p, q in ((parted.a.weight, whole.a.weight), (parted.straight, whole.straight)):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("layer", ["a", "conv"])
@pytest.mark.parametrize("which", ["saved", "gradient"])
def test_a_factor_that_is_written_meanwhile_is_an_error(layer: str, which: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Model()
    h = torch.randn(WIDTH, WIDTH, requires_grad=True) * 1
    y = model.get_submodule(layer)(h)
    start = torch.randn(WIDTH, WIDTH)
    products = backward.of_inputs([get_gradient_edge(y)], [start])
    with torch.no_grad():
        (h if which == "saved" else start).mul_(2)
    with pytest.raises(FactorWritten, match="in place"):
        backward.of_weights(products)


def test_under_autocast(seed: int) -> None:
    torch.manual_seed(seed)
    parted, x = Model(), torch.randn(3, WIDTH)
    whole = copy.deepcopy(parted)
    for model in (parted, whole):
        with torch.autocast("cpu", torch.bfloat16):
            y = model.b(F.gelu(model.a(x.clone().requires_grad_())))
        if model is parted:
            products = backward.of_inputs([get_gradient_edge(y)], [torch.ones_like(y)])
            assert len(products) == 2
            backward.of_weights(products)
        else:
            y.backward(torch.ones_like(y))
    for p, q in zip(parted.parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None and p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-2)


def test_nothing_of_the_graph_is_left(seed: int) -> None:
    """Not even in a cycle of references: collecting garbage would come too late."""
    torch.manual_seed(seed)
    model, x = Model(), torch.randn(2, 5, WIDTH, requires_grad=True)
    y = model.b(F.gelu(model.a(model.norm(x))))
    z = model.conv(y.transpose(-1, -2)).sum()
    alive = [weakref.ref(t) for t in (x, y, z)]
    gc.disable()
    try:
        edges, start = [get_gradient_edge(z)], torch.ones(())
        products = backward.of_inputs(edges, [start])
        assert len(products) == 3
        del x, y, z, edges
        assert [r() for r in alive] == [None] * 3, "before the weights' part is done"
        backward.of_weights(products)
    finally:
        gc.enable()
