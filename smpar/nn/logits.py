"""Logits of which each rank holds its slice of the vocabulary, and their cross-entropy.

``VocabularySlice`` looks like the whole logits. What leaves the vocabulary's dim alone (views, casts, slices of the
sequence) is done to the slices; cross-entropy needs but a few sums over the group; anything else gathers.

    rank 0   [N, S, V0] ─┐ max, sum of exponentials, the target's logit: one number of each per token and rank
    rank 1   [N, S, V1] ─┘

Where ranks bring different samples, a rank holds the logits of *all* ranks' samples for its slice, and answers for its
own samples. (arXiv 1909.08053, section 3.)
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from smpar.errors import UnknownWord
from smpar.nn import collectives
from smpar.nn.group import TensorGroup
from smpar.nn.linears import padded
from smpar.slices import Slicing

log = logging.getLogger("smpar")


class VocabularySlice(torch.Tensor):
    """Logits [..., V, ...] of this rank's samples, held in slices.

    Attributes:
        slicing: of the vocabulary; its dim counts without R of ``local``.
        kept: the whole logits, once something waits there for their gradient, or is a view of them.
        loans: the kept ones of these logits and of all that they are a view of, or are viewed by.
    """

    slicing: Slicing
    group: TensorGroup
    kept: Tensor | None
    loans: list[_Loan]
    _local: Tensor

    @staticmethod
    def of(local: Tensor, slicing: Slicing, group: TensorGroup, loans: list[_Loan] | None = None) -> VocabularySlice:
        """Logits of which this rank holds ``local``. A gradient that they are given as a whole reaches it, too."""
        made: VocabularySlice = _Held.apply(local, slicing, group)
        made._local, made.slicing, made.group = local, slicing, group
        made.kept, made.loans = None, [] if loans is None else loans
        return made

    @property
    def local(self) -> Tensor:
        """[R, ..., V / tp, ...], of this rank's slice: the logits of each rank's samples (R = tp), or of all samples if
        all ranks have the same ones (R = 1).
        """
        for loan in self.loans:
            loan.settle()
        return self._local

    def __repr__(self) -> str:  # type: ignore[override]
        """Without communication: a rank may print alone."""
        held = self.slicing.runs[self.group.rank]
        return f"VocabularySlice(shape={list(self.shape)}, dtype={self.dtype}, held={held})"

    def smp_whole(self) -> Tensor:
        """The whole logits of this rank's samples, a plain tensor; all ranks of the group call it together."""
        if self.kept is not None:
            return self.kept
        with torch.inference_mode(False), torch.enable_grad():  # it may be kept for longer than the present mode is
            # the only row, out here: what a custom function gives as a view may not be written into
            return _Whole.apply(self.local, self.slicing, self.group)[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _ALONE and isinstance(args[0], VocabularySlice) and args[0].kept is None:
                made = _ALONE[func](args[0], func, args[1:], kwargs)
                if made is not None:
                    return made
        if func is F.cross_entropy:
            loss = _loss_of(*args, **kwargs)
            if loss is not None:
                return loss
        _say_gathered(getattr(func, "__name__", str(func)))
        lent: dict[int, tuple[VocabularySlice, _Loan]] = {}

        def plain(value: Any) -> Any:
            if isinstance(value, VocabularySlice):
                if id(value) not in lent:
                    lent[id(value)] = value, _Loan.of(value)
                return lent[id(value)][1].whole
            if type(value) in (list, tuple):
                return type(value)(map(plain, value))
            return value

        result = func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
        for logits, loan in lent.values():
            if logits.kept is None and (func in _WAITING or loan.viewed_by(result)):
                logits.kept = loan.whole
                logits.loans.append(loan)
            elif logits.kept is None:
                loan.settle()
            if result is loan.whole:
                return logits
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # what is called below autograd, by a custom function: autograd has the node of the logits that it was given
        def plain(value: Any) -> Any:
            return value.smp_whole() if isinstance(value, VocabularySlice) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@dataclasses.dataclass
class _Loan:
    """Whole logits, to be written into.

    Attributes:
        local, slicing, group: the slices that they were gathered of.
        version: of ``whole``, that the slices have the values of.
    """

    whole: Tensor
    local: Tensor
    slicing: Slicing
    group: TensorGroup
    version: int

    @classmethod
    def of(cls, logits: VocabularySlice) -> _Loan:
        whole = logits.smp_whole()
        return cls(whole, logits._local, logits.slicing, logits.group, whole._version)

    def settle(self) -> None:
        """Let the slices have what was written since; views that were made of them see that."""
        if self.version == self.whole._version:
            return
        self.version = self.whole._version
        with torch.set_grad_enabled(self.whole.requires_grad):
            self.local.copy_(_Divided.apply(self.whole, self.slicing, self.group, len(self.local)))

    def viewed_by(self, result: Any) -> bool:
        """Whether something in a result has the same memory."""
        at = self.whole.untyped_storage().data_ptr()
        return any(
            isinstance(leaf, Tensor)
            and leaf is not self.whole
            and leaf.layout is torch.strided
            and leaf.untyped_storage().data_ptr() == at
            for leaf in tree_leaves(result)
        )


@functools.lru_cache(maxsize=16)
def _say_gathered(name: str) -> None:
    log.info("%s of logits in slices of the vocabulary: they are gathered for it", name)


# -- slices and the whole ------------------------------------------------------------------------------------------


def gathered(local: Tensor, slicing: Slicing, group: TensorGroup) -> Tensor:
    """[R, ..., V / tp, ...] -> the whole logits of this rank's samples [1, ..., V, ...], without gradient."""
    dim, sizes = slicing.dim + 1, [slicing.size(rank) for rank in range(group.size)]
    even = padded(local, max(sizes), dim)
    several = len(local) > 1
    whole = collectives.exchanged(even, group, 0, dim) if several else collectives.all_gathered(even, group, dim)
    if len(set(sizes)) == 1:
        return whole
    return torch.cat([whole.narrow(dim, rank * max(sizes), size) for rank, size in enumerate(sizes)], dim)


def divided(whole: Tensor, slicing: Slicing, group: TensorGroup, samples: int) -> Tensor:
    """[..., V, ...] -> [R, ..., V / tp, ...], without gradient.

    Args:
        samples: R.
    """
    dim, sizes = slicing.dim, [slicing.size(rank) for rank in range(group.size)]
    if samples == 1:
        return slicing.take(whole, group.rank)[None]
    even = torch.cat([padded(part, max(sizes), dim) for part in whole.split(sizes, dim)], dim)
    return collectives.exchanged(even[None], group, dim + 1, 0).narrow(dim + 1, 0, sizes[group.rank])


class _Whole(torch.autograd.Function):
    """Of slices, in whose gradients each rank's loss counts for its share in the mean over the group."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, slicing: Slicing, group: TensorGroup) -> Tensor:
        ctx.slicing, ctx.group, ctx.samples = slicing, group, len(local)
        return gathered(local, slicing, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return divided(grad[0] / ctx.samples, ctx.slicing, ctx.group, ctx.samples), None, None


class _Divided(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, slicing: Slicing, group: TensorGroup, samples: int) -> Tensor:
        ctx.slicing, ctx.group, ctx.samples = slicing, group, samples
        return divided(whole, slicing, group, samples)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gathered(grad * ctx.samples, ctx.slicing, ctx.group)[0], None, None, None


class _Held(torch.autograd.Function):
    """What shows the whole shape; its gradient is that of the whole."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, slicing: Slicing, group: TensorGroup) -> Any:
        ctx.slicing, ctx.group, ctx.samples = slicing, group, len(local)
        shape = slicing.whole_shape(local.shape[1:])
        return torch.Tensor._make_wrapper_subclass(VocabularySlice, shape, dtype=local.dtype, device=local.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return divided(grad / ctx.samples, ctx.slicing, ctx.group, ctx.samples), None, None


# -- what leaves the vocabulary alone ------------------------------------------------------------------------------


def _mapped(logits: VocabularySlice, local: Tensor, dim: int) -> VocabularySlice:
    if local is logits._local:
        return logits
    return VocabularySlice.of(local, dataclasses.replace(logits.slicing, dim=dim), logits.group, logits.loans)


def _same(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    if any(isinstance(value, VocabularySlice) for value in (*args, *kwargs.values())):
        return None
    return _mapped(logits, func(logits.local, *args, **kwargs), logits.slicing.dim)


def _reshaped(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    """Of [..., V] to [..., V]; elements stay in order, so both V are the vocabulary."""
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if logits.slicing.dim != logits.dim() - 1 or not shape or shape[-1] != logits.slicing.length:
        return None
    return _mapped(logits, logits.local.reshape(len(logits.local), *shape[:-1], logits.local.shape[-1]), len(shape) - 1)


def _item(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    """Some of all but the vocabulary. Tensors choose other tokens on each rank, so all must have the same samples."""
    index = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
    dim, chosen = logits.slicing.dim, any(isinstance(i, Tensor) for i in index)
    if any(isinstance(i, bool) or not isinstance(i, (int, slice, type(None), type(Ellipsis), Tensor)) for i in index):
        return None
    if chosen and (len(logits.local) > 1 or dim != logits.dim() - 1):
        return None
    at = next((at for at, i in enumerate(index) if i is Ellipsis), len(index))
    index[at : at + 1] = [slice(None)] * (logits.dim() - sum(map(_taken, index)))
    place = next(k for k in range(len(index)) if sum(map(_taken, index[: k + 1])) > dim)
    if not isinstance(index[place], slice) or index[place] != slice(None):
        return None
    full = (slice(None), *index)
    local = logits.local[0][full[1:]][None] if chosen else logits.local[full]
    behind = sum(not isinstance(i, int) for i in index[place + 1 :])
    return _mapped(logits, local, local.dim() - 2 - behind)


def _taken(item: Any) -> int:
    """How many dims an item of an index takes."""
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.dim()
    return int(item is not None and item is not Ellipsis)


def _transpose(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    if kwargs or len(args) != 2:
        return None
    a, b = (dim % logits.dim() for dim in args)
    dim = logits.slicing.dim
    return _mapped(logits, logits.local.transpose(a + 1, b + 1), {a: b, b: a}.get(dim, dim))


def _permute(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    if kwargs:
        return None
    dims = [dim % logits.dim() for dim in (args[0] if len(args) == 1 else args)]
    local = logits.local.permute(0, *[dim + 1 for dim in dims])
    return _mapped(logits, local, dims.index(logits.slicing.dim))


def _arithmetic(logits: VocabularySlice, func: Any, args: Any, kwargs: Any) -> VocabularySlice | None:
    """With a number, or with a tensor without gradient that has a value for each word, or one for all."""
    if kwargs or len(args) != 1 or isinstance(args[0], VocabularySlice):
        return None
    other, slicing = args[0], logits.slicing
    if isinstance(other, Tensor):
        shape = (*[1] * (logits.dim() - other.dim()), *other.shape)
        if other.requires_grad or len(shape) != logits.dim() or other.numel() != shape[slicing.dim]:
            return None
        if other.numel() == slicing.length:
            other = slicing.take(other.reshape(shape), logits.group.rank)
    return _mapped(logits, func(logits.local, other), slicing.dim)


_T = torch.Tensor
_METADATA: set[Any] = {
    getattr(_T, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu",
                 "is_meta", "is_sparse", "is_nested", "is_quantized", "itemsize", "nbytes", "grad_fn")
} | {
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.__len__, _T.__hash__, _T.get_device,
    _T.is_floating_point, _T.is_complex, _T.is_inference, _T.is_contiguous,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
_DATA = getattr(_T, "data").__get__  # noqa: B009  (unknown to the types of torch)
_ALONE: dict[Any, Callable[[VocabularySlice, Any, Any, Any], VocabularySlice | None]] = {
    **dict.fromkeys((_T.float, _T.double, _T.half, _T.bfloat16, _T.contiguous, _T.clone, _T.detach, _T.to, _T.type_as,
                     _DATA, torch.clone, torch.detach, _T.tanh, torch.tanh, _T.neg, _T.__neg__, torch.neg), _same),
    **dict.fromkeys((_T.add, torch.add, _T.__add__, _T.__radd__, _T.__iadd__, _T.add_,
                     _T.sub, torch.sub, _T.__sub__, _T.__isub__, _T.sub_,
                     _T.mul, torch.mul, _T.__mul__, _T.__rmul__, _T.__imul__, _T.mul_,
                     _T.div, torch.div, _T.__truediv__, _T.__itruediv__, _T.div_), _arithmetic),
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.unflatten, torch.unflatten,
                     _T.squeeze, torch.squeeze, _T.unsqueeze, torch.unsqueeze), _reshaped),
    _T.__getitem__: _item,
    **dict.fromkeys((_T.transpose, torch.transpose), _transpose),
    **dict.fromkeys((_T.permute, torch.permute), _permute),
}  # fmt: skip
_WAITING: set[Any] = {_T.retain_grad, _T.register_hook}


def check_words(words: Tensor, length: int, where: str) -> None:
    """Refuse words outside of the vocabulary, of which no rank has a row.

    Raises:
        UnknownWord: on the CPU. An accelerator is not waited for: it stops by itself.
    """
    known = (words >= 0) & (words < length)
    if words.device.type == "cpu" and not isinstance(words, FakeTensor):
        if not known.all():
            raise UnknownWord(int(words[~known][0]), where, length)
    else:
        torch._assert_async(known.all(), f"{where}: a word is not among the {length} of the vocabulary")


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
    if not isinstance(logits, VocabularySlice) or logits.kept is not None:
        return None
    shape, dim, group = list(logits.shape), logits.slicing.dim, logits.group
    del shape[dim]
    plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    if not plain or dim != min(1, logits.dim() - 1) or list(target.shape) != shape:
        return None
    local = logits.local.movedim(dim + 1, -1).flatten(1, -2) if shape else logits.local[:, None]
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()
    known = target != ignore_index
    mine = torch.where(known, target, 0).long().reshape(1, -1)
    targets = mine if len(local) == 1 else collectives.all_gathered(mine, group, 0)
    check_words(targets, logits.slicing.length, "F.cross_entropy")
    losses = _CrossEntropy.apply(local, targets, logits.slicing, group, label_smoothing).view(target.shape)
    losses = torch.where(known, losses, 0.0)
    if reduction == "none":
        return losses
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
        # half precision is for what is large: all else is found, and summed, in float32
        shifted = local.to(torch.promote_types(local.dtype, torch.float32)) - highest.unsqueeze(-1)
        here = (targets >= start) & (targets < stop)
        index = torch.where(here, targets - start, 0).unsqueeze(-1)
        wanted = shifted.gather(-1, index).squeeze(-1).masked_fill(~here, 0.0)
        sums = [wanted, shifted.sum(-1)] if smoothing else [wanted]
        exponentials = shifted.exp_()
        total, wanted, *rest = collectives.all_reduced(torch.stack([exponentials.sum(-1), *sums]), group, own=True)
        losses = total.log() - (1.0 - smoothing) * wanted
        if smoothing:
            losses -= smoothing / vocabulary * rest[0]
        probabilities = exponentials.div_(total.unsqueeze(-1)).to(local.dtype)
        ctx.save_for_backward(probabilities, index, here)
        ctx.group, ctx.smoothing, ctx.vocabulary = group, smoothing, vocabulary
        return losses[group.rank if len(losses) > 1 else 0].to(local.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, index, here = ctx.saved_tensors
        group, smoothing = ctx.group, ctx.smoothing
        grads = grad.unsqueeze(0)
        if len(probabilities) > 1:  # the mean over the group's losses
            grads = collectives.all_gathered(grads / group.size, group, 0)
        result = probabilities - smoothing / ctx.vocabulary
        right = here.to(result.dtype).mul_(1.0 - smoothing)
        result.scatter_add_(-1, index, -right.unsqueeze(-1))
        return result.mul_(grads.unsqueeze(-1)), None, None, None, None
