"""Run a callable under fake tensors: what comes out, what it depends on, what it costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)

from smpar.trace import tree
from smpar.trace.convert import replacing
from smpar.trace.draws import CountMode
from smpar.trace.hidden import objects
from smpar.trace.outcome import Cost, Meta, Out, Outcome, meta_of
from smpar.trace.saved import Saved
from smpar.trace.watch import Watch

_Cached = type(functools.lru_cache(len))


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

    def layout_of(self, parameter: torch.Tensor) -> Meta:
        """The metadata of a parameter as it was before its storage was given up."""
        meta = meta_of(parameter)
        return meta._replace(stride=self._strides.get(id(parameter), meta.stride), requires_grad=False)

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
    ) -> Iterator[tuple[Callable[[], list[tuple[int, str, torch.Tensor]]], Callable[[], bool], Callable[[], bool]]]:
        """Swap a module's parameters and buffers for fresh fake twins; attributes changed meanwhile are put back.

        Gives three functions: one lists the tensors set as attributes so far, one says whether lists or dicts among
        the attributes got any, one whether anything changed at all.
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
            buffers = [(m, name, b, b._version) for m in modules for name, b in m._buffers.items() if b is not None]
            yield (
                lambda: [
                    (i, name, value)
                    for i, (m, old) in enumerate(zip(modules, before, strict=True))
                    for name, value in m.__dict__.items()
                    if isinstance(value, FakeTensor) and old.get(name) is not value
                ],
                lambda: snapshot.gained(FakeTensor, swapped),
                lambda: (
                    any(m._buffers.get(name) is not b or b._version != v for m, name, b, v in buffers)
                    or snapshot.differs(swapped)
                ),
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
        others = objects(spec) if module is not None else []
        held = [dict(other.__dict__) for other in others]
        for const in tree.constants(spec):
            if const.opaque and not isinstance(const.value, torch.nn.Module):
                snapshot.add(const.value)
        saved = Saved()
        watch = Watch(guess, module is not None, fewer, saved.aside)
        count = CountMode(lambda: watch.random)
        quiet = logging.getLogger("torch._subclasses.fake_tensor")  # a refused operation is no news here
        was_disabled, quiet.disabled = quiet.disabled, True
        try:
            with contextlib.ExitStack() as stack:
                left: Callable[[], list[tuple[int, str, torch.Tensor]]] = list
                filled: Callable[[], bool] = bool
                changed: Callable[[], bool] = bool
                if module is not None:
                    left, filled, changed = stack.enter_context(self._twinned(module))
                    stack.enter_context(replacing())
                    saved.aside.update(p.untyped_storage()._cdata for p in module.parameters())  # twins now
                stack.enter_context(self.mode)
                leaves, fakes = self._fakes(given)
                versions = [f._version for f in fakes]
                stack.enter_context(watch)
                stack.enter_context(count)
                stack.enter_context(saved.watching())
                a, k = tree.unflatten(spec, fakes)
                result = fn(*a, **k)
                attributes, leaks, keeps = left(), filled(), changed()
            hidden = tuple(
                (i, name)
                for i, (other, before) in enumerate(zip(others, held, strict=True))
                for name, value in other.__dict__.items()
                if isinstance(value, FakeTensor) and before.get(name) is not value
            )
            mutates = _mutated(spec, fakes, (a, k))
            if mutates:
                result = result, (a, k)
            outcome = self._outcome(result, attributes, leaves, fakes, versions, watch, count.calls, saved.nbytes)
            outcome = dataclasses.replace(outcome, mutates=mutates, keeps=keeps, hidden=hidden)
            del result, attributes, leaves, fakes, a, k, left, filled, changed
            snapshot.restore()
            watch.forget()
            saved.forget()
            leaks = _alive(watch.made or []) or leaks
            return dataclasses.replace(outcome, leaks=True) if leaks else outcome
        finally:
            saved.forget()
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
        watch: Watch,
        draws: int,
        saved: int,
    ) -> Outcome:
        outs: list[torch.Tensor] = []
        spec = tree.flatten(result, outs)
        outs += [tensor for _, _, tensor in attributes]
        index = {id(f): i for i, f in reversed(list(enumerate(fakes)))}
        storages: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for i, fake in enumerate(fakes):
            storages.setdefault(fake.untyped_storage()._cdata, []).append((i, fake))
        marks = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if leaf.requires_grad}
        written = [i for i, fake in enumerate(fakes) if fake._version != versions[i] and index[id(fake)] == i]

        def out(tensor: torch.Tensor) -> Out:
            if not isinstance(tensor, FakeTensor):
                return Out(meta_of(tensor), frozenset())
            near = storages.get(tensor.untyped_storage()._cdata, ())
            return Out(
                meta_of(tensor),
                frozenset(_reached(tensor, marks)),
                frozenset(i for i, _ in near),
                frozenset(i for i, other in near if _viewed(other) is _viewed(tensor)),
                int(tensor.storage_offset()) if tensor.layout is torch.strided else 0,
            )

        written_outs = tuple((i, out(fakes[i])) for i in written)
        places: list[Out | int] = []
        for number, tensor in enumerate(outs, 1):
            places.append(index[id(tensor)] if id(tensor) in index else out(tensor))
            if isinstance(tensor, FakeTensor) and id(tensor) not in index:
                storages.setdefault(tensor.untyped_storage()._cdata, []).append((-number, tensor))
        return Outcome(
            spec=spec,
            places=tuple(places),
            attributes=tuple((i, name) for i, name, _ in attributes),
            written=written_outs,
            draws=draws,
            random=watch.random > 0,
            guessed=watch.guessed,
            cost=Cost(watch.flops, watch.seconds, saved, tuple(watch.work.items())),
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


def _viewed(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd takes the tensor for a view of: itself, if it is none."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


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
