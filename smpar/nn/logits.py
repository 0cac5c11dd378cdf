"""Logits of which each rank holds its slice of the vocabulary, and their cross-entropy.

``VocabularySlice`` looks like the whole logits. What leaves the vocabulary's dim alone (views, casts, slices of the
sequence) is done to the slices; cross-entropy needs but a few sums over the group; anything else gathers.

    rank 0   [N, S, V0] ─┐ max, sum of exponentials, the target's logit: one number of each per token and rank
    rank 1   [N, S, V1] ─┘

Where ranks bring different samples, a rank holds the logits of *all* ranks' samples for its slice, as one part per rank,
and answers for those of its own. (arXiv 1909.08053, section 3.)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from smpar.nn.linears import padded, whole_features
from smpar.slices import Slicing

log = logging.getLogger("smpar")


class VocabularySlice(torch.Tensor):
    """Logits [..., V, ...] of this rank's samples, held in slices.

    Attributes:
        parts: local logits of each rank's samples; of all, if all ranks have the same ones.
        slicing: of the vocabulary.
        at: the vocabulary's dim.
    """

    parts: tuple[Tensor, ...]
    slicing: Slicing
    group: TensorGroup
    at: int

    @staticmethod
    def __new__(cls, parts: tuple[Tensor, ...], slicing: Slicing, group: TensorGroup, at: int) -> VocabularySlice:
        part = parts[0]
        shape = list(part.shape)
        shape[at] = slicing.length
        self: VocabularySlice = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        self.parts, self.slicing, self.group, self.at = parts, slicing, group, at
        return self

    def __init__(self, parts: tuple[Tensor, ...], slicing: Slicing, group: TensorGroup, at: int) -> None:
        pass

    def smp_whole(self) -> Tensor:
        """The whole logits of this rank's samples, a plain tensor; all ranks of the group call it together."""
        if len(self.parts) == 1:
            return whole_features(self.parts[0], self.slicing, self.group, self.at)
        sizes = [self.slicing.size(rank) for rank in range(self.group.size)]
        even = torch.stack([padded(part, max(sizes), self.at) for part in self.parts])
        mine = collectives.all_to_all(shared(even, self.group), self.group, 0, self.at + 1).squeeze(0)
        if len(set(sizes)) == 1:
            return mine
        return torch.cat([mine.narrow(self.at, r * max(sizes), size) for r, size in enumerate(sizes)], self.at)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _ALONE and args and isinstance(args[0], VocabularySlice):
                made = _ALONE[func](args[0], func, args[1:], kwargs)
                if made is not None:
                    return made
        if func is F.cross_entropy:
            loss = _loss_of(*args, **kwargs)
            if loss is not None:
                return loss
        _say_gathered(getattr(func, "__name__", str(func)))
        whole: dict[int, Tensor] = {}

        def plain(value: Any) -> Any:
            if isinstance(value, VocabularySlice):
                if id(value) not in whole:
                    whole[id(value)] = value.smp_whole()
                return whole[id(value)]
            if type(value) in (list, tuple):
                return type(value)(map(plain, value))
            return value

        return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} on logits in slices of the vocabulary: use logits.float() or logits + 0 first"
        )


@functools.lru_cache(maxsize=16)
def _say_gathered(name: str) -> None:
    log.info("%s of logits in slices of the vocabulary: they are gathered for it", name)


# -- what leaves the vocabulary alone ------------------------------------------------------------------------------


def _mapped(logits: VocabularySlice, change: Callable[[Tensor], Tensor], at: int) -> VocabularySlice:
    return VocabularySlice(tuple(map(change, logits.parts)), logits.slicing, logits.group, at)


def _same(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice:
    return _mapped(logits, lambda part: func(part, *args, **kwargs), logits.at)


def _cast(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return None
    return _same(logits, func, args, kwargs)


def _view(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    """To [..., V], where the vocabulary is the last dim."""
    shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
    if kwargs or not isinstance(shape, (tuple, list)) or not shape or logits.at != logits.dim() - 1:
        return None
    whole = torch.empty(logits.shape, device="meta").reshape(tuple(shape))
    if whole.shape[-1] != logits.slicing.length:
        return None
    local = (*whole.shape[:-1], logits.parts[0].shape[-1])
    return _mapped(logits, lambda part: part.reshape(local), len(local) - 1)


def _flatten(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    start = kwargs.get("start_dim", args[0] if args else 0) % logits.dim()
    end = kwargs.get("end_dim", args[1] if len(args) > 1 else -1) % logits.dim()
    if start <= logits.at <= end and start != end:
        return None
    at = logits.at - (end - start) if logits.at > end else logits.at
    return _mapped(logits, lambda part: func(part, start, end), at)


def _item(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(not isinstance(i, (int, slice, type(None), type(Ellipsis))) or isinstance(i, bool) for i in index):
        return None
    taken = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    fill = index.index(Ellipsis)
    full = (*index[:fill], *[slice(None)] * (logits.dim() - taken), *index[fill + 1 :])
    source, at = 0, 0
    for i in full:
        if i is not None:
            if source == logits.at:
                if i != slice(None):
                    return None
                break
            source += 1
        at += not isinstance(i, int)
    return _mapped(logits, lambda part: part[full], at)


def _transpose(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    if kwargs or len(args) != 2:
        return None
    a, b = (dim % logits.dim() for dim in args)
    return _mapped(logits, lambda part: part.transpose(a, b), {a: b, b: a}.get(logits.at, logits.at))


def _permute(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    if kwargs:
        return None
    dims = [dim % logits.dim() for dim in (args[0] if len(args) == 1 else args)]
    return _mapped(logits, lambda part: part.permute(dims), dims.index(logits.at))


def _arithmetic(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    """With a number, or with a tensor without gradient that has a value for each word, or one for all."""
    if kwargs or len(args) != 1 or isinstance(args[0], VocabularySlice):
        return None
    other = args[0]
    if isinstance(other, Tensor) and other.dim():
        shape = (*[1] * (logits.dim() - other.dim()), *other.shape)
        rest = [size for dim, size in enumerate(shape) if dim != logits.at]
        if other.requires_grad or len(shape) != logits.dim() or any(size != 1 for size in rest):
            return None
        if shape[logits.at] == logits.slicing.length:
            other = dataclasses.replace(logits.slicing, dim=logits.at).take(other.reshape(shape), logits.group.rank)
    return _mapped(logits, lambda part: func(part, other), logits.at)


_T = torch.Tensor
_METADATA: set[Any] = {
    getattr(_T, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta",
                 "is_sparse", "is_nested", "is_quantized", "itemsize", "nbytes")
} | {
    _T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.is_floating_point, _T.is_complex, _T.ndimension, _T.__len__,
    _T.__hash__, torch.is_floating_point, torch.is_complex, torch.numel, _T.is_inference, _T.get_device,
}  # fmt: skip
_ALONE: dict[Any, Callable[[VocabularySlice, Any, Any, Any], VocabularySlice | None]] = {
    **dict.fromkeys((_T.float, _T.double, _T.half, _T.bfloat16, _T.contiguous, _T.clone, _T.detach, torch.clone,
                     torch.detach, _T.tanh, torch.tanh), _same),
    **dict.fromkeys((_T.__add__, _T.add, torch.add, _T.__sub__, _T.sub, torch.sub, _T.__mul__, _T.mul, torch.mul,
                     _T.__truediv__, _T.div, torch.div), _arithmetic),
    **dict.fromkeys((_T.to, _T.type), _cast),
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _view),
    **dict.fromkeys((_T.flatten, torch.flatten), _flatten),
    _T.__getitem__: _item,
    **dict.fromkeys((_T.transpose, torch.transpose), _transpose),
    **dict.fromkeys((_T.permute, torch.permute), _permute),
}  # fmt: skip


# -- cross-entropy -------------------------------------------------------------------------------------------------


def _loss_of(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy``; None where its arguments are such that the logits have to be gathered."""
    plain = isinstance(logits, VocabularySlice) and weight is None and size_average is None and reduce is None
    if not plain or logits.at != min(1, logits.dim() - 1) or target.is_floating_point():
        return None
    local = torch.stack([part.movedim(logits.at, -1).reshape(-1, part.shape[logits.at]) for part in logits.parts])
    group = logits.group
    known = target != ignore_index
    mine = torch.where(known, target, 0).reshape(1, -1)
    targets = mine if len(logits.parts) == 1 else collectives.all_gathered(mine, group, 0)
    losses = _CrossEntropy.apply(local, targets, logits.slicing, group, label_smoothing).view(target.shape)
    losses = torch.where(known, losses, 0.0)
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    total = losses.sum()
    return total if reduction == "sum" else total / known.sum()


class _CrossEntropy(torch.autograd.Function):
    """Of local logits [R, M, V / tp] of R ranks' samples, and targets [R, M], the losses [M] of this rank's samples."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, targets: Tensor, slicing: Slicing, group: TensorGroup, smoothing: float
    ) -> Tensor:
        (start, stop), vocabulary = slicing.runs[group.rank][0], slicing.length
        highest = collectives.all_max(local.amax(-1), group)
        shifted = local - highest.unsqueeze(-1)
        here = (targets >= start) & (targets < stop)
        index = torch.where(here, targets - start, 0).unsqueeze(-1)
        wanted = shifted.gather(-1, index).squeeze(-1).masked_fill(~here, 0.0)
        sums = [wanted, shifted.sum(-1)] if smoothing else [wanted]
        exponentials = shifted.exp_()
        total, wanted, *rest = collectives.all_reduced(torch.stack([exponentials.sum(-1), *sums]), group, own=True)
        losses = total.log() - (1.0 - smoothing) * wanted
        if smoothing:
            losses -= smoothing / vocabulary * rest[0]
        probabilities = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, index, here)
        ctx.group, ctx.smoothing, ctx.vocabulary = group, smoothing, vocabulary
        return losses[group.rank if len(losses) > 1 else 0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, index, here = ctx.saved_tensors
        group, smoothing = ctx.group, ctx.smoothing
        grads = grad.unsqueeze(0)
        if len(probabilities) > 1:  # the mean over the group's losses
            grads = collectives.all_gathered(grads / group.size, group, 0)
        result = probabilities - smoothing / ctx.vocabulary if smoothing else probabilities.clone()
        right = torch.where(here, 1.0 - smoothing, 0.0).to(result.dtype).unsqueeze(-1)
        result.scatter_add_(-1, index, -right)
        return result.mul_(grads.unsqueeze(-1)), None, None, None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


def shared(x: Tensor, group: TensorGroup, entry: bool = False) -> Tensor:
    """Where ranks bring different samples: make what goes back a share in the group's mean, or undo that on entry."""
    return _Shared.apply(x, float(group.size) if entry else 1.0 / group.size)  # type: ignore[no-any-return]
