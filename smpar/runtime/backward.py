"""Backward of one segment: whole, or the part of its weights put off.

The backward of inputs runs the segment's graph as the whole backward does, except that products which only give
gradients of weights are left out. Their factors are kept, and multiplied when the schedule has time for it (zero
bubble, arXiv 2401.10241):

    h = x @ w.t() + b        I:  grad of x = g @ w    grad of b = sum of g    keep w, g, x
                             W:  grad of w += g.t() @ x

Everything else (other operations, recomputed ones, weights with hooks on their gradients or several uses) runs in the
first part, once, as always; and where there are custom autograd functions, everything does. So the second part may be
small or empty, never wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from smpar.errors import FactorWritten


class Product(NamedTuple):
    """A weight's gradient that is still to be computed.

    Attributes:
        weight: the parameter.
        factors: what it is made of: their matrix product, if ``compute`` is None.
        compute: gives the gradient, where it is no matrix product.
        versions: of the factors, which nothing may write in place meanwhile.
    """

    weight: nn.Parameter
    factors: tuple[torch.Tensor, torch.Tensor]
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    versions: tuple[int, int]


def whole(edges: Sequence[GradientEdge], starts: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor] = ()) -> None:
    """``torch.autograd.backward`` without its checks of shapes, which the program has settled: 30 us each time.

    Args:
        leaves: those that get their gradients; empty: all.
    """
    _engine_run_backward(
        tuple(edges), tuple(starts), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )  # fmt: skip


def of_inputs(edges: Sequence[GradientEdge], starts: Sequence[torch.Tensor]) -> list[Product]:
    """Backward without the products that can wait; returns them, for `of_weights`."""
    later, leaves = _split(edge.node for edge in edges)
    if not later or not leaves:  # nothing would be left to do afterwards, or now
        whole(edges, starts)
        return []
    products = _put_off(later)
    fresh = [leaf for leaf in leaves if leaf.grad is None]
    whole(edges, starts, leaves)
    _part(fresh, products)
    return products


@torch.no_grad()
def of_weights(products: list[Product]) -> None:
    """Compute what `of_inputs` put off, add it to the gradients of the weights, and let the factors go.

    Raises:
        FactorWritten: a factor is no longer what it was.
    """
    while products:
        weight, factors, compute, versions = products.pop(0)
        if (factors[0]._version, factors[1]._version) != versions:
            shapes = " and ".join(str(list(factor.shape)) for factor in factors)
            raise FactorWritten(f"a write into a factor of the gradient of a weight {list(weight.shape)}: {shapes}")
        grad = weight.grad
        if grad is not None and compute is None and grad.dtype == factors[0].dtype:
            grad.addmm_(*factors)
        else:
            made = (compute or torch.mm)(*factors)
            if grad is None:
                weight.grad = made.to(weight.dtype)
            else:
                grad.add_(made)
        hooks = weight._post_accumulate_grad_hooks
        for hook in list(hooks.values()) if hooks else ():
            hook(weight)


_Make = Callable[[torch.Tensor], Product]  # from the gradient of the result
_Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _put_off(later: Iterable[_Later]) -> list[Product]:
    """A list that the backward, when it comes to these nodes, fills with what their weights need."""
    products: list[Product] = []
    for node, weight, make in later:
        node.register_prehook(functools.partial(_keep, products, make(node, weight)))
    return products


def _keep(products: list[Product], make: _Make, gradients: Any) -> None:
    """Called before a node runs, with the gradients of its results. The node refers to this, so not the other way."""
    if gradients[0] is not None:
        products.append(make(gradients[0]))


def _part(leaves: Iterable[torch.Tensor], products: Iterable[Product]) -> None:
    """Gradients that leaves have just got may be views of kept factors, and the next microbatch's are added in place.

    y = x @ w.t() + p[None]        the gradient of p is the factor g without its first dimension
    """
    kept = {t.untyped_storage()._cdata for product in products for t in product.factors}
    for leaf in leaves:
        grad = leaf.grad
        if grad is not None and grad.layout is torch.strided and grad.untyped_storage()._cdata in kept:
            leaf.grad = grad.clone()


def _addmm(node: Any, weight: nn.Parameter) -> _Make:
    return _matrix(node._saved_mat1, node.next_functions[2][0], weight)


def _mm(node: Any, weight: nn.Parameter) -> _Make:
    return _matrix(node._saved_self, node.next_functions[1][0], weight)


def _matrix(met: torch.Tensor, upper: Node, weight: nn.Parameter) -> _Make:
    met, straight = met.detach(), upper.name() != _TRANSPOSE  # detached: else it would hold the graph behind it
    return lambda gradient: _product(weight, *((met.t(), gradient) if straight else (gradient.t(), met)))


def _product(weight: nn.Parameter, a: torch.Tensor, b: torch.Tensor, compute: _Compute | None = None) -> Product:
    return Product(weight, (a, b), compute, (a._version, b._version))


def _convolution(node: Any, weight: nn.Parameter) -> _Make:
    met, used = node._saved_input.detach(), node._saved_weight.detach()
    settings = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
                node._saved_output_padding, node._saved_groups)  # fmt: skip

    def compute(gradient: torch.Tensor, met: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.convolution_backward(
            gradient, met, used, None, *settings, [False, True, False]
        )[1]
        return made

    return lambda gradient: _product(weight, gradient, met, compute)


_LEAF, _TRANSPOSE, _CAST = "torch::autograd::AccumulateGrad", "TBackward0", "ToCopyBackward0"
# node -> which of its inputs is the weight, its names for the other and for the weight, and how the gradient is made
_KINDS: dict[str, tuple[int, str, str, Callable[[Any, nn.Parameter], _Make]]] = {
    "AddmmBackward0": (2, "mat1", "mat2", _addmm),
    "MmBackward0": (1, "self", "mat2", _mm),
    "ConvolutionBackward0": (1, "input", "weight", _convolution),
}

_Later = tuple[Node, nn.Parameter, Callable[[Any, nn.Parameter], _Make]]


def _split(roots: Iterable[Node]) -> tuple[list[_Later], list[torch.Tensor]]:
    """The nodes whose weight can wait, and the leaves that cannot."""
    uses: dict[Node, int] = {}  # node -> edges that lead to it
    leaves: list[Node] = []
    candidates: list[Node] = []
    stack: list[Any] = []
    for root in roots:
        if root not in uses:
            uses[root] = 1
            stack.append(root)
    while stack:
        node = stack.pop()
        name = node.name()
        if name == _LEAF:
            leaves.append(node)
            continue
        if name in _KINDS:
            candidates.append(node)
        elif isinstance(node, BackwardCFunction):  # it may want to be told whether all gradients are asked for
            return [], []
        for upper, _ in node.next_functions:
            if upper is not None:
                if upper in uses:
                    uses[upper] += 1
                else:
                    uses[upper] = 1
                    stack.append(upper)
    later: list[_Later] = []
    waiting: set[Node] = set()
    for node in candidates:
        at, saved, factor, make = _KINDS[node.name()]
        way = _way_to_leaf(node.next_functions[at][0], uses)
        if way is None or getattr(node, "_saved_alpha", 1) != 1:
            continue
        leaf = way[-1]
        met: Any = node.next_functions[at - 1][0]
        if met is not None and met.name() == _LEAF and isinstance(met.variable, nn.Parameter):
            continue  # a hook may step it as soon as it has its gradient
        if not any(upper for place, (upper, _) in enumerate(node.next_functions) if place != at):
            continue  # only the weight asks for this node: without it, it would not run at all
        if getattr(node, f"_raw_saved_{saved}").unpack_hook is not None:
            continue  # recomputed or fetched: that happens only once
        if _watched(node, factor, way):
            continue
        waiting.add(leaf)
        later.append((node, leaf.variable, make))
    return later, [leaf.variable for leaf in leaves if leaf not in waiting]  # type: ignore[attr-defined]


def _way_to_leaf(node: Any, uses: dict[Node, int]) -> list[Any] | None:
    """The nodes from a product to the leaf of a parameter that only it uses, perhaps cast and then transposed on the
    way; None if it is not so."""
    way: list[Any] = []
    for name in (_TRANSPOSE, _CAST, _LEAF):
        if node is None or uses[node] != 1:
            return None
        if node.name() == name:
            way.append(node)
            if name == _LEAF:
                weight = node.variable
                plain = isinstance(weight, nn.Parameter) and not weight._backward_hooks and not weight.is_complex()
                return way if plain else None
            node = node.next_functions[0][0]
    return None


def _watched(node: Any, factor: str, way: list[Any]) -> bool:
    """Whether hooks wait for the weight's gradient on its way, or may do so: what was not saved is not seen."""
    raw = getattr(node, f"_raw_saved_{factor}")
    if raw.unpack_hook is not None:
        return True
    made = getattr(node, f"_saved_{factor}")
    for maker in way[:-1]:  # first what was saved, then what that views
        if made is None or made.grad_fn is not maker or made._backward_hooks or made.retains_grad:
            return True
        made = made._base
    return _hooked(node.register_hook) or any(_hooked(n.register_hook, n.register_prehook) for n in way)


def _hooked(*registers: Callable[[Callable[..., None]], Any]) -> bool:
    """Whether a node has hooks. It does not tell, but a handle knows what its hook stands beside."""
    for register in registers:
        handle = register(_nothing)
        beside = handle.hooks_dict_ref()
        handle.remove()
        if beside:
            return True
    return False


def _nothing(*gradients: Any) -> None:
    pass
