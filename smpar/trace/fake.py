"""Run a callable under fake tensors: what comes out, what it depends on, what it costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from smpar.trace import tree
from smpar.trace.draws import CountMode
from smpar.trace.known import KnownValues

aten = torch.ops.aten
NoSubclass = torch._C.DisableTorchFunctionSubclass


class Meta(NamedTuple):
    """All that every rank knows of a tensor; ``stride`` in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        gradient = " with gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{gradient}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def meta_of(tensor: torch.Tensor) -> Meta:
    """The metadata of any tensor, without going through an overridden ``__torch_function__``."""
    with NoSubclass():
        strided = tensor.layout is torch.strided
        return Meta(
            tuple(tensor.shape),
            tuple(tensor.stride()) if strided else (),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Counted cost of one call: floating-point operations and seconds of its forward, bytes kept for its backward."""

    flops: float = 0.0
    seconds: float = 0.0
    saved: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.seconds + other.seconds, self.saved + other.saved)


class Out(NamedTuple):
    """A tensor that a call made (or wrote into): its metadata, and the inputs its gradient reaches."""

    meta: Meta
    reaches: frozenset[int]
    shares: frozenset[int]  # inputs whose storage it views


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a call does, as far as can be known without data.

    ``places`` says for each tensor of the result where it comes from: an ``Out``, or the index of
    the input that it is. The last of them are ``attributes``, tensors that the unit leaves in its modules
    (number of the module in ``unit.modules()``, name). ``written`` are inputs changed in place, each with its
    state afterwards. ``leaks``: the unit hands tensors to the outside, by a forward hook or a list.
    ``guessed``: it read data on its way; ``varies``: the shapes or the numbers of its result depend on them.
    """

    spec: tree.Spec
    places: tuple[Out | int, ...]
    attributes: tuple[tuple[int, str], ...]
    written: tuple[tuple[int, Out], ...]
    draws: int
    random: bool
    guessed: bool
    cost: Cost
    leaks: bool = False
    varies: bool = False
    mutates: bool = False  # it changes lists or dicts among its arguments; the result is (result, (args, kwargs)) then
    borrowed: tuple[torch.nn.Parameter, ...] = ()  # parameters it uses that are neither its own nor arguments


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRate:
    """What a device does per second, for counted costs (roofline): FLOP/s, bytes/s, seconds per launched operator.

    Only ratios between units matter to a partition. A desktop core and a data-centre GPU in half precision.
    """

    flops: float
    bytes: float
    launch: float


RATES = {"cpu": DeviceRate(4e10, 1e10, 2e-6), "cuda": DeviceRate(1.5e14, 1.5e12, 4e-6)}


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


_Cached = type(functools.lru_cache(len))


class _Watch(TorchDispatchMode):
    """Counts costs and random operators; answers what only data could tell with a guess."""

    def __init__(self, guess: bool, follow: bool, fewer: int) -> None:
        super().__init__()
        self._fewer = fewer  # rows taken off each guess of how many there are
        self.flops = self.seconds = 0.0
        self.random = 0
        self.guessed = False
        self.made: list[weakref.ref[torch.Tensor]] | None = [] if follow else None  # every tensor so far
        self.borrowed: dict[int, torch.nn.Parameter] = {}
        self._guess = guess
        self._known = KnownValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for arg in (*args, *kwargs.values()):
            for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor, FakeTensor):
                    self.borrowed[id(tensor)] = tensor
        known = self._known.apply(func, args, kwargs)
        if func in _GUESSED:
            return self._guessed_result(func, args) if known is None else _as_fake(known)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random += 1
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException:
            result = self._guessed_shape(func, args, kwargs) if known is None else _as_fake(known)
        except (RuntimeError, NotImplementedError) as error:
            result = _on_zeros(func, args, kwargs, error)
        self._known.note(result, known)
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
        for arg in args:
            if isinstance(arg, torch.Tensor):
                moved += arg.numel() * arg.element_size()
        rate = RATES.get(out.device.type, RATES["cuda"])
        self.flops += flops
        self.seconds += max(flops / rate.flops, moved / rate.bytes) + rate.launch


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


class FakeRunner:
    """Runs units and glue operations on fake tensors; keeps a fake twin of each parameter.

    Args:
        device: where parameters on the meta device are taken to live.
    """

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self._strides: dict[int, tuple[int, ...]] = {}
        self._twins: dict[tuple[int, bool], torch.Tensor] = {}

    def remember_layout(self, parameter: torch.Tensor) -> None:
        """Note a parameter's strides before its storage is given up."""
        self._strides[id(parameter)] = tuple(parameter.stride())

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same shape, dtype and strides as a parameter or buffer."""
        key = (id(tensor), tensor.requires_grad)
        found = self._twins.get(key)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            stride = self._strides.get(id(tensor), tuple(tensor.stride()))
            device = self.device if tensor.device.type == "meta" else tensor.device
            with self.mode:
                found = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                found = torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
            self._twins[key] = found
        return found

    @contextlib.contextmanager
    def _twinned(
        self, module: torch.nn.Module
    ) -> Iterator[tuple[Callable[[], list[tuple[int, str, torch.Tensor]]], Callable[[], bool]]]:
        """Swap a module's parameters and buffers for fresh fake twins; attributes changed meanwhile are put back.

        Gives two functions: one lists the tensors set as attributes so far, one says whether lists or dicts among
        the attributes got any.
        """
        snapshot = tree.Snapshot()
        modules = list(module.modules())
        native: list[tuple[Any, str, Any]] = []  # scripted modules keep their tensors in C++, out of a snapshot's reach
        for m in modules:
            snapshot.add(m)
            if isinstance(m, torch.jit.ScriptModule):
                native += [(m._parameters, n, p) for n, p in m._parameters.items()]
                native += [(m._buffers, n, b) for n, b in m._buffers.items()]
        fresh: dict[int, torch.Tensor] = {}
        try:
            for m in modules:
                for name, p in m._parameters.items():
                    if p is not None:
                        m._parameters[name] = self.twin(p)  # type: ignore[assignment]
                for name, b in m._buffers.items():
                    if b is not None:
                        if id(b) not in fresh:
                            fresh[id(b)] = self.twin(b).clone()
                        m._buffers[name] = fresh[id(b)]
            before = [{k: v for k, v in m.__dict__.items() if isinstance(v, torch.Tensor)} for m in modules]
            swapped = {id(d) for m in modules for d in (m._parameters, m._buffers)}
            yield (
                lambda: [
                    (i, name, value)
                    for i, (m, old) in enumerate(zip(modules, before, strict=True))
                    for name, value in m.__dict__.items()
                    if isinstance(value, FakeTensor) and old.get(name) is not value
                ],
                lambda: snapshot.gained(FakeTensor, swapped),
            )
        finally:
            for tensors, name, tensor in native:
                tensors[name] = tensor
            snapshot.restore()

    def evaluate(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, module: torch.nn.Module | None = None
    ) -> Outcome:
        """Run ``fn(*args, **kwargs)`` under fake tensors in the present grad and autocast mode.

        Args:
            module: the unit that ``fn`` calls; its parameters are swapped for twins.

        Raises:
            whatever ``fn`` raises on tensors of these shapes.
        """
        if torch.is_inference_mode_enabled():  # its tensors do not count their writes
            with torch.inference_mode(False), torch.no_grad():
                return self.evaluate(fn, args, kwargs, module)
        with _quiet():
            return self._evaluate_or_guess(fn, args, kwargs, module)

    def _evaluate_or_guess(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, module: torch.nn.Module | None
    ) -> Outcome:
        guess = False
        try:
            outcome: Outcome | None = self._evaluate(fn, args, kwargs, module, guess)
        except Exception:
            guess = True
            try:
                outcome = self._evaluate(fn, args, kwargs, module, guess)
            except Exception:
                outcome = None
            if outcome is None or not outcome.guessed:
                raise
        assert outcome is not None
        if outcome.guessed:  # do other guesses give other results?
            for other_guess, fewer in ((guess, 1), (not guess, 0)):
                with contextlib.suppress(Exception):
                    other = self._evaluate(fn, args, kwargs, module, other_guess, fewer)
                    if _result_shapes(other) != _result_shapes(outcome):
                        return dataclasses.replace(outcome, varies=True)
        return outcome

    def _evaluate(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        module: torch.nn.Module | None,
        guess: bool,
        fewer: int = 0,
    ) -> Outcome:
        given: list[torch.Tensor] = []
        spec = tree.flatten((args, kwargs), given)
        snapshot = tree.Snapshot()
        for const in tree.constants(spec):
            if const.opaque and not isinstance(const.value, torch.nn.Module):
                snapshot.add(const.value)
        watch = _Watch(guess, module is not None, fewer)
        count = CountMode(lambda: watch.random)
        saved: dict[int, int] = {}
        kept: set[int] = set()

        boxes: list[list[torch.Tensor]] = []

        def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
            storage = tensor.untyped_storage()
            if storage._cdata not in kept:
                saved[storage._cdata] = storage.nbytes()
            boxes.append([tensor])
            return boxes[-1]

        quiet = logging.getLogger("torch._subclasses.fake_tensor")  # a refused operation is no news here
        was_disabled, quiet.disabled = quiet.disabled, True
        try:
            with contextlib.ExitStack() as stack:
                left: Callable[[], list[tuple[int, str, torch.Tensor]]] = list
                filled: Callable[[], bool] = bool
                if module is not None:
                    left, filled = stack.enter_context(self._twinned(module))
                    kept.update(self.twin(p).untyped_storage()._cdata for p in module.parameters())
                stack.enter_context(self.mode)
                leaves, fakes = self._fakes(given)
                versions = [f._version for f in fakes]
                stack.enter_context(watch)
                stack.enter_context(count)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box[0]))
                a, k = tree.unflatten(spec, fakes)
                result = fn(*a, **k)
                attributes, leaks = left(), filled()
            mutates = _mutated(spec, fakes, (a, k))
            if mutates:
                result = result, (a, k)
            outcome = self._outcome(
                result, attributes, leaves, fakes, versions, watch, count.calls, sum(saved.values())
            )
            outcome = dataclasses.replace(outcome, mutates=mutates)
            del result, attributes, leaves, fakes, a, k, left
            snapshot.restore()
            watch.forget()
            for box in boxes:
                box.clear()
            leaks = (bool(watch.made) and _alive(watch.made)) or leaks
            return dataclasses.replace(outcome, leaks=True) if leaks else outcome
        finally:
            for box in boxes:  # an operation that saves its own result would keep it for ever
                box.clear()
            quiet.disabled = was_disabled
            snapshot.restore()

    def _fakes(self, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Fake leaves and what stands for them in the call (never a leaf, so that it may be written in place)."""
        leaves: list[torch.Tensor] = []
        fakes: list[torch.Tensor] = []
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in given:
            if id(tensor) not in made:
                meta = meta_of(tensor)
                device = self.device if meta.device.type == "meta" else meta.device
                leaf = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
                fake = leaf
                if meta.requires_grad:
                    leaf.requires_grad_(True)
                    with torch.enable_grad():
                        fake = leaf.clone()
                        if fake.stride() != meta.stride:  # a clone fills the gaps of a view
                            leaf = torch.empty(leaf.untyped_storage().nbytes() // leaf.element_size(),
                                               dtype=meta.dtype, device=device, requires_grad=True)  # fmt: skip
                            fake = leaf.clone().as_strided(meta.shape, meta.stride)
                made[id(tensor)] = leaf, fake
            leaf, fake = made[id(tensor)]
            leaves.append(leaf)
            fakes.append(fake)
        return leaves, fakes

    def _outcome(
        self,
        result: Any,
        attributes: list[tuple[int, str, torch.Tensor]],
        leaves: list[Any],
        fakes: list[Any],
        versions: list[int],
        watch: _Watch,
        draws: int,
        saved: int,
    ) -> Outcome:
        outs: list[torch.Tensor] = []
        spec = tree.flatten(result, outs)
        outs += [tensor for _, _, tensor in attributes]
        index = {id(f): i for i, f in reversed(list(enumerate(fakes)))}
        storages: dict[int, list[int]] = {}
        for i, fake in enumerate(fakes):
            storages.setdefault(fake.untyped_storage()._cdata, []).append(i)
        marks = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if leaf.requires_grad}
        written = [i for i, fake in enumerate(fakes) if fake._version != versions[i] and index[id(fake)] == i]

        def out(tensor: torch.Tensor) -> Out:
            if not isinstance(tensor, FakeTensor):
                return Out(meta_of(tensor), frozenset(), frozenset())
            return Out(
                meta_of(tensor),
                frozenset(_reached(tensor, marks)),
                frozenset(storages.get(tensor.untyped_storage()._cdata, ())),
            )

        places = tuple(index[id(t)] if id(t) in index else out(t) for t in outs)
        return Outcome(
            spec=spec,
            places=places,
            attributes=tuple((i, name) for i, name, _ in attributes),
            written=tuple((i, out(fakes[i])) for i in written),
            draws=draws,
            random=watch.random > 0,
            guessed=watch.guessed,
            cost=Cost(watch.flops, watch.seconds, saved),
            borrowed=tuple(watch.borrowed.values()),
        )


def _alive(made: list[weakref.ref[torch.Tensor]]) -> bool:
    """Whether any of these tensors is still held by somebody; caches (``functools.lru_cache``) are made to let go."""
    if not any(ref() is not None for ref in made):
        return False
    gc.collect()
    _uncache([t for ref in made if (t := ref()) is not None])
    return any(ref() is not None for ref in made)


def _uncache(values: list[Any], depth: int = 1) -> None:
    """Empty the function caches that hold values, themselves or in a tuple: they must not meet real data."""
    if not values:
        return
    holders = gc.get_referrers(*values)  # one walk over all objects
    for holder in holders:
        if isinstance(holder, _Cached):
            holder.cache_clear()
    if depth:
        _uncache([h for h in holders if type(h) is tuple], depth - 1)


def _mutated(spec: tree.Spec, given: list[torch.Tensor], arguments: Any) -> bool:
    """Whether a call put other tensors or values into the containers among its arguments."""
    after: list[torch.Tensor] = []
    return tree.flatten(arguments, after) != spec or any(a is not b for a, b in zip(after, given, strict=True))


def _result_shapes(outcome: Outcome) -> Any:
    return outcome.spec, tuple(p.meta.shape if isinstance(p, Out) else p for p in outcome.places)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what an operator raises on fake tensors; it is raised anyway, and may be no more than a try."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _reached(tensor: torch.Tensor, marks: dict[int, int]) -> set[int]:
    """Which marked leaves the gradient of ``tensor`` reaches (by walking its autograd graph)."""
    if tensor.grad_fn is None:
        return {marks[id(tensor)]} if id(tensor) in marks else set()
    seen: set[Any] = set()
    found: set[int] = set()
    todo = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in marks:
                found.add(marks[id(variable)])
        else:
            todo += [following for following, _ in node.next_functions if following is not None]
    return found
