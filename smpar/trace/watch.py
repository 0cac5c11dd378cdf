"""Watching operators under fake tensors: counting their cost, and answering what only data could tell."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from smpar.trace.known import KnownValues
from smpar.trace.outcome import Work

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRate:
    """What a device does per second, for counted costs (roofline): FLOP/s, bytes/s, seconds per launched operator.

    Only ratios between units matter to a partition. One core of a server, where convolutions and products of matrices
    run at about the same rate, and a data-centre GPU in half precision.
    """

    flops: float
    bytes: float
    launch: float


RATES = {"cpu": DeviceRate(7e10, 1e10, 2e-6), "cuda": DeviceRate(1.5e14, 1.5e12, 4e-6)}


def _grouped_mm_flops(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (b.shape[0] if a.dim() == 3 else 1))


_FLOPS = {
    **flop_registry,
    aten._grouped_mm: _grouped_mm_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
}

_GUESSED = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default}
_FREE = {"view", "_unsafe_view", "detach", "alias", "expand", "permute", "transpose", "t", "slice", "select",
         "unsqueeze", "squeeze", "as_strided", "split", "unbind", "empty", "empty_strided", "empty_like"}  # fmt: skip

# From so many bytes on, a tensor on the CPU lives in memory fresh from the system, which fills it with zeros first.
_LARGE = 2**21
# Fused attention runs at two thirds of the rate of plain products, as its scores pass through a softmax and are made
# again in the backward.
_ATTENTION = 1.5
_FUSED = {p for p in _FLOPS if "scaled_dot_product" in p.__name__ and "backward" not in p.__name__}

_UPDATES = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}


def _undropped(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this is attention without dropout, which draws nothing, though its kind is marked as random."""
    if func.overloadpacket not in _FUSED:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False


_watching: list[Watch] = []


def tell(nbytes: float, late: bool) -> None:
    """Count a collective among the operators that are watched, if any are; see `smpar.trace.outcome.Work`."""
    for watch in _watching[-1:]:
        watch.work[Work(0.0, 0.0, False, nbytes, late)] += 1


class Watch(TorchDispatchMode):
    """Counts costs and random operators; answers what only data could tell with a guess.

    Args:
        weights: storages of parameters.
    """

    def __init__(self, guess: bool, follow: bool, fewer: int, weights: Set[int] = frozenset()) -> None:
        super().__init__()
        self._weights = weights
        self.work: Counter[Work] = Counter()
        self._fewer = fewer  # rows taken off each guess of how many there are
        self.flops = self.seconds = 0.0
        self.random = 0
        self.guessed = False
        self.made: list[weakref.ref[torch.Tensor]] | None = [] if follow else None  # every tensor so far
        self.borrowed: dict[int, torch.nn.Parameter] = {}
        self._guess = guess
        self._known = KnownValues()

    def __enter__(self) -> Watch:
        _watching.append(self)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        _watching.remove(self)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for arg in (*args, *kwargs.values()):
            for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor, FakeTensor):
                    self.borrowed[id(tensor)] = tensor
        known = self._known.apply(func, args, kwargs)
        if func in _GUESSED:
            return self._guessed_result(func, args) if known is None else _as_fake(known)
        if torch.Tag.nondeterministic_seeded in func.tags and not _undropped(func, args, kwargs):
            self.random += 1
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException:
            result = self._guessed_shape(func, args, kwargs) if known is None else _as_fake(known)
        except (RuntimeError, NotImplementedError) as error:
            result = _on_zeros(func, args, kwargs, error)
        self._known.note(result, known)
        if func.overloadpacket in _UPDATES and args[5]:  # training: these write, though they do not say so
            for statistics in args[3:5]:
                if statistics is not None:
                    torch.autograd.graph.increment_version(statistics)
        self._count(func, args, kwargs, result)
        if self.made is not None:
            self.made += [weakref.ref(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result

    def forget(self) -> None:
        """Hold on to nothing but weak references."""
        self._known = KnownValues()

    def _guessed_result(self, func: Any, args: Any) -> Any:
        self.guessed = True
        if func is aten.nonzero.default:
            source = args[0]
            return source.new_empty((self._rows(source), source.dim()), dtype=torch.int64)
        if func is aten.equal.default or func is aten.is_nonzero.default:
            return self._guess
        dtype = args[0].dtype
        if dtype is torch.bool:
            return self._guess
        return 1.0 + self._fewer if dtype.is_floating_point else int(self._guess) + self._fewer

    def _rows(self, source: torch.Tensor) -> int:
        """How many elements of a mask are set: known, or as many as there could be."""
        known = self._known.of(source)
        if known is not None and known.dtype is torch.bool:
            with no_dispatch():
                return int(known.sum())
        self.guessed = True
        return max(source.numel() - self._fewer, 0)

    def _guessed_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Boolean indexing: as many rows as there could be."""
        packet = func.overloadpacket
        if packet is not aten.index:
            self.guessed = True
        if packet is aten.masked_select:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0].new_empty(max(shape.numel() - self._fewer, 0))
        if packet is aten.index:
            indices: list[Any] = []
            for i in args[1]:
                rows = i is not None and i.dtype is torch.bool
                indices += [i.new_empty((self._rows(i),), dtype=torch.int64)] * i.dim() if rows else [i]
            return func(args[0], indices, **kwargs)
        if packet in (aten._unique2, aten.unique_consecutive, aten.unique_dim):
            return self._guessed_unique(packet, args[0], args[1:], kwargs)
        if packet is aten.bincount:
            return args[0].new_empty(max(1, *(a for a in args[1:] if isinstance(a, int))) + self._fewer)
        if packet is aten.repeat_interleave:
            return args[0].new_empty(self._rows(args[0]))
        if packet is aten._ctc_loss:  # the losses, and inner states for the longest target
            scores, targets = args[:2]
            longest = targets.shape[-1] if targets.dim() > 1 else targets.numel()
            length, count = scores.shape[:2]
            return scores.new_empty(count), scores.new_empty(count, length, 2 * longest + 1)
        if packet is aten._pack_padded_sequence:  # all sequences are of full length; the longest is so at any rate
            padded, lengths, batch_first = args
            if batch_first:
                padded = padded.transpose(0, 1)
            rows = max(padded.shape[0] * padded.shape[1] - self._fewer, 0)
            return padded.new_empty(rows, *padded.shape[2:]), lengths.new_empty(padded.shape[0])
        return _on_zeros(func, args, kwargs, DynamicOutputShapeException(func))

    def _guessed_unique(self, packet: Any, source: torch.Tensor, rest: Any, kwargs: Any) -> Any:
        """All values differ: (values, inverse, counts)."""
        along = rest[0] if packet is aten.unique_dim else kwargs.get("dim")
        if packet is aten.unique_consecutive and len(rest) > 2:
            along = rest[2]
        shape = list(source.shape)
        if along is None:
            rows = self._rows(source)
            inverse, counts = (source.new_empty(size, dtype=torch.int64) for size in (shape, [rows]))
            return source.new_empty(rows), inverse, counts
        rows = shape[along] = max(shape[along] - self._fewer, 0)
        inverse = source.new_empty(source.shape[along], dtype=torch.int64)
        return source.new_empty(shape), inverse, source.new_empty(rows, dtype=torch.int64)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func.overloadpacket
        if func.namespace != "aten" or packet.__name__ in _FREE:
            return
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, torch.Tensor):
            return
        out = first
        formula = _FLOPS.get(packet)
        flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
        moved = out.numel() * out.element_size()
        weights = False
        for arg in args:
            if isinstance(arg, torch.Tensor):
                moved += arg.numel() * arg.element_size()
                weights |= formula is not None and arg.untyped_storage()._cdata in self._weights
        if packet is aten.embedding:  # reads a few rows; its backward, counted as two forwards, writes a whole table
            moved = 2 * out.numel() * out.element_size() + args[0].numel() * args[0].element_size() // 2
        rate = RATES.get(out.device.type, RATES["cuda"])
        self.flops += flops
        fresh = out.numel() * out.element_size()
        if out.device.type == "cpu" and fresh >= _LARGE:
            self.seconds += fresh / rate.bytes
        slower = _ATTENTION if packet in _FUSED else 1.0
        work = Work(slower * flops, moved, weights)
        self.work[work] += 1
        self.seconds += work.seconds(rate.flops, rate.bytes, rate.launch)


def _as_fake(known: Any) -> Any:
    """Fake tensors shaped as known ones; numbers as they are."""
    return tree_map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
                    if isinstance(t, torch.Tensor) else t, known)  # fmt: skip


def _on_zeros(func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
    """An operator whose kernel takes what its fake one refuses: run it for real, on zeros.

    Raises:
        error: the real kernel refuses it too.
    """

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()

    try:
        with no_dispatch():
            a, k = tree_map(real, (args, kwargs))
            result = func(*a, **k)
    except Exception:
        raise error from None
    return tree_map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                    if isinstance(t, torch.Tensor) else t, result)  # fmt: skip
