"""One microbatch in glue: what happens when Python calls a unit or an operation on stage tensors.

``Run`` finds out where each event runs and what it gives, and executes it if this rank is its home.
Two kinds follow from where that knowledge comes from:

    explorer.Explorer   works it out under fake tensors, and records the program
    replay.Replay       reads it off a recorded program, and errs if the run leaves it
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smpar.errors import (
    BlindView,
    NotThroughModel,
    OtherMicrobatch,
    SmparError,
    UnitMismatch,
    WriteIntoReplicated,
    WrongBackward,
)
from smpar.stage import special
from smpar.stage.layout import Layout
from smpar.stage.mode import GlueMode, Plain
from smpar.stage.record import Event
from smpar.stage.tensor import METADATA, StageTensor, activate, become, link, metadata, rebind, relink
from smpar.stage.units import keep_attribute
from smpar.stage.views import Together, told
from smpar.trace import tree
from smpar.trace.draws import DRAWS, SeedMode, advance, draw, seed_generators
from smpar.trace.outcome import Meta, NoSubclass, Out, Outcome, meta_of

_numbers = itertools.count()


class Wire(Protocol):
    """How a run's tensors reach other ranks."""

    rank: int

    def send(self, rank: int, tensor: torch.Tensor, meta: Meta) -> None: ...

    def receive(self, rank: int, flow: int, meta: Meta) -> torch.Tensor: ...


class Run(abc.ABC):
    """The state of one microbatch.

    Args:
        layout: the partition.
        seed: start of the microbatch's chain of draws, equal on all ranks.
        share: the microbatch's weight in the gradient.
        wire: transfers to other ranks; None plans without executing.
    """

    def __init__(self, layout: Layout, seed: int, share: float, wire: Wire | None) -> None:
        self.layout = layout
        self.seed = seed
        self.share = share
        self.wire = wire
        self.rank = wire.rank if wire is not None else -1
        self.ranks = layout.ranks
        self.mode = GlueMode(self)
        self.number = next(_numbers)
        self.bypassed: Exception | None = None
        self.checkpointing: dict[str, Any] | None = None
        self.attributes: dict[tuple[nn.Module, str], StageTensor] = {}
        self._received: dict[int, torch.Tensor] = {}
        self._parameters: dict[int, StageTensor] = {}
        # what the backward of this rank's segments needs
        self.leaves: dict[tuple[int, int], torch.Tensor] = {}
        self.outputs: dict[int, GradientEdge | None] = {}  # None: its gradient ends here
        self.roots: dict[int, list[tuple[GradientEdge, torch.Tensor]]] = {}
        self.products: dict[int, list[Any]] = {}  # segment -> what its backward of weights has to do

    # -- what a kind of run knows ---------------------------------------------------------------

    @abc.abstractmethod
    def _unit_event(self, unit: nn.Module, args: Any, kwargs: Any, leaves: list[Any], spec: tree.Spec) -> Event: ...

    @abc.abstractmethod
    def _operation_event(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: tree.Spec) -> Event: ...

    @abc.abstractmethod
    def _enter_segment(self, segment: int) -> None: ...

    @abc.abstractmethod
    def _backward_event(self, roots: tuple[int, ...]) -> None: ...

    @abc.abstractmethod
    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a question about the data of stage tensors (``item``, ``bool``, ``print``)."""

    @abc.abstractmethod
    def _meta(self, ident: int) -> Meta: ...

    @abc.abstractmethod
    def _flow(self, index: int) -> Any:
        """Flow ``index`` (tensor, source, producer, target, forward)."""

    @abc.abstractmethod
    def _rank_of(self, segment: int) -> int: ...

    @abc.abstractmethod
    def _confirmed(self, event: Event, result: Any) -> Outcome:
        """The outcome of an event whose shapes may depend on data, agreed with the other ranks."""

    # -- glue -----------------------------------------------------------------------------------

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the step function on this microbatch."""
        before = activate(self)
        try:
            with self.mode:
                return fn(*args, **kwargs)
        except RuntimeError as error:
            if self.bypassed is not None and not isinstance(error, SmparError):
                self.bypassed.__dict__.update(error.__dict__)  # with the module in which it happened
                raise self.bypassed from error
            raise
        finally:
            activate(before)

    def replicated(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An operation on plain tensors: it runs on every rank, with the same result."""
        if func in DRAWS:
            self.seed = advance(self.seed, 1)
            result = draw(self.seed, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if func in special.FACTORIES and type(result) is torch.Tensor:
            result._smpar_made_by = self.number  # type: ignore[attr-defined]
        return result

    def operation(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An operation with at least one stage tensor or model parameter among its arguments."""
        if func in METADATA:
            return metadata(func, args, kwargs)
        handler = special.HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        before = activate(None)
        try:
            leaves, spec = self._apart(args, kwargs)
            leaves = self._operands(func, leaves)
            event = self._operation_event(func, args, kwargs, leaves, spec)
            return self._finish(event, leaves, spec, lambda a, k: func(*a, **k))
        finally:
            activate(before)

    def call_unit(self, unit: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a unit from glue; ``call`` is its own ``__call__``."""
        if unit in self.layout.hooks:
            inner = functools.partial(self._call, unit, call)
            return special.with_hooks(unit, self.layout.hooks[unit], inner, args, kwargs)
        return self._call(unit, call, args, kwargs)

    def _call(self, unit: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.plain():
            leaves, spec = self._apart(args, kwargs)
            leaves = self._operands(unit, leaves)
            event = self._unit_event(unit, args, kwargs, leaves, spec)
            if event.outcome.mutates:
                result, changed = self._finish(event, leaves, spec, lambda a, k: (call(*a, **k), (a, k)))
                tree.adopt(args, changed[0])
                tree.adopt(kwargs, changed[1])
                return result
            options = self.checkpointing
            if options is not None and torch.is_grad_enabled():
                checkpoint = functools.partial(special.plain_checkpoint, call, use_reentrant=False, **options)
                return self._finish(event, leaves, spec, lambda a, k: checkpoint(*a, **k))
            return self._finish(event, leaves, spec, lambda a, k: call(*a, **k))

    def _apart(self, args: Any, kwargs: Any) -> tuple[list[Any], tree.Spec]:
        """The tensors among a call's arguments, and what is needed to put them back."""
        if len(args) == 1 and not kwargs and type(args[0]) is StageTensor:
            return [args[0]], ONE
        leaves: list[Any] = []
        return leaves, tree.flatten((args, kwargs), leaves)

    def _together(self, spec: tree.Spec, leaves: list[Any]) -> Any:
        return tree.unflatten(spec, leaves)

    def _operands(self, target: Any, leaves: list[Any]) -> list[Any]:
        """Tensor arguments as glue sees them: parameters of the model as stage tensors."""
        number, holders = self.number, self.layout.holders
        for i, t in enumerate(leaves):
            if type(t) is StageTensor:
                if t.owner != number:
                    raise OtherMicrobatch(self.layout.name(target))
                if t.spoilt and torch.is_grad_enabled() and type(target) is not Together and target not in _DETACHING:
                    raise BlindView(self.layout.name(target))
            elif type(t) is nn.Parameter and id(t) in holders:
                leaves[i] = self.wrap(t)
        return leaves

    def wrap(self, parameter: nn.Parameter) -> StageTensor:
        """The stage tensor that stands for a model parameter in glue."""
        key = id(parameter)
        found = self._parameters.get(key)
        if found is None or found.requires_grad != parameter.requires_grad:
            meta = meta_of(parameter)
            meta = meta._replace(stride=self.layout.strides.get(key, meta.stride))  # the same on all ranks
            found = StageTensor(meta, self.layout.parameter_home[key], -1, -1, self.number)
            found.parameter = parameter
            self._parameters[key] = found
        return found

    def gather(self, family: list[StageTensor], stage: int) -> None:
        """Bring tensors that share memory into one segment of a stage, where one of them will be written in place."""
        with torch.enable_grad():
            made = self.operation(Together.of(family, stage), (family,), {})
        for tensor, new in zip(family, made, strict=True):
            rebind(tensor, meta_of(new), new.home, new.ident, new.segment, new.value)
        relink(family)

    def backward(self, tensors: Any, grads: Any = None) -> None:
        """Note where the microbatch's backward starts (it runs when the schedule says so)."""
        if grads is not None:
            # a root with a gradient of its own, wherever that is, equals the scalar whose derivative it is
            roots = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
            given = [grads] if isinstance(grads, torch.Tensor) else list(grads)
            given += [None] * (len(roots) - len(given))
            tensors = [
                r if g is None or not isinstance(r, StageTensor) else (r * g.detach()).sum()
                for r, g in zip(roots, given, strict=True)
            ]
        starts = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        with self.plain(), NoSubclass():
            for root in starts:
                if type(root) is not StageTensor or not root.requires_grad:
                    raise NotThroughModel(described(root))
                if root.numel() != 1:
                    raise WrongBackward(f"a tensor of shape {list(root.shape)}")
            self._backward_event(tuple(root.ident for root in starts))
            for root in starts:
                if self.ranks[root.home] == self.rank:
                    assert root.value is not None
                    start = torch.full_like(root.value, self.share, requires_grad=False)
                    self.roots.setdefault(root.segment, []).append((get_gradient_edge(root.value), start))

    def ended(self, result: Any, backward: bool) -> None:
        """The step function has returned: let go of what only its glue could ask for.

        Args:
            result: what it returned.
            backward: whether the microbatch has a backward, so that the graph behind the result is the schedule's.
        """
        for held in (self.attributes, self._received, self._parameters):
            held.clear()
        for tensor in tree.tensors(result):
            if type(tensor) is StageTensor and tensor.value is not None:
                value = whole(tensor.value)
                tensor.value = value.detach() if backward else value

    def release(self) -> None:
        """Let go of all tensors: the microbatch has nothing more to do on this rank."""
        for held in (self.attributes, self._received, self._parameters, self.leaves, self.outputs, self.roots,
                     self.products):  # fmt: skip
            held.clear()

    # -- execution ------------------------------------------------------------------------------

    def _finish(self, event: Event, leaves: list[Any], spec: tree.Spec, fn: Callable[[Any, Any], Any]) -> Any:
        """Move what must move, run the event if this is its home, and wrap the result."""
        for index in event.flows:
            self._move(index, leaves)
        outcome = event.outcome
        values: list[Any] | None = None
        if self.ranks[event.stage] == self.rank:
            self._enter_segment(event.segment)
            outcome, values = self._execute(event, leaves, spec, fn)
        elif outcome.guessed and self.wire is not None:
            outcome = self._confirmed(event, None)
        self.seed = advance(self.seed, outcome.draws)
        return self._wrapped(event, outcome, leaves, values)

    def _move(self, index: int, leaves: list[Any]) -> None:
        """Send a tensor of ours to the rank that needs it, or keep hold of one that a later segment uses."""
        flow = self._flow(index)
        if self._rank_of(flow.producer) != self.rank:
            return
        tensor = next(t for t in leaves if type(t) is StageTensor and t.ident == flow.tensor)
        value = tensor.value = whole(tensor.value)
        assert value is not None
        # a view of a parameter made under no_grad requires gradients, but has no node, and nothing flows back to it
        if value.requires_grad and not tensor.spoilt and (value.grad_fn is not None or torch.is_grad_enabled()):
            self.outputs[flow.tensor] = None if tensor.muted else get_gradient_edge(value)
        target = self._rank_of(flow.target)
        if flow.forward and target != self.rank:
            assert self.wire is not None
            # Sending takes its time; what may be written meanwhile, in glue or as a module's buffer, is copied.
            if self._overwritten(index) or (torch.is_grad_enabled() and not value.requires_grad):
                value = value.detach().clone()
            self.wire.send(target, value, self._meta(flow.tensor))

    @abc.abstractmethod
    def _overwritten(self, flow: int) -> bool:
        """Whether the tensor's memory may be written while it is being sent."""

    def _local(self, tensor: Any, event: Event, written: bool) -> Any:
        """The real tensor behind an argument, in the segment of ``event``."""
        if type(tensor) is not StageTensor:
            return tensor.clone() if written and self._made_here(tensor) else tensor
        if tensor.parameter is not None:
            return tensor.parameter
        if tensor.segment == event.segment:
            return tensor.value
        key = (tensor.ident, event.segment)
        leaf = self.leaves.get(key)
        if leaf is None:
            leaf = self._arrived(tensor, event.segment).detach()
            leaf.requires_grad_(tensor.requires_grad)
            self.leaves[key] = leaf
        if not written:
            return leaf
        with torch.enable_grad():
            return leaf.clone()

    def _made_here(self, tensor: torch.Tensor) -> bool:
        """Whether glue made this plain tensor in this run; others (buffers, inputs) outlive it."""
        return getattr(tensor, "_smpar_made_by", -1) == self.number

    def _arrived(self, tensor: StageTensor, segment: int) -> torch.Tensor:
        home = self.ranks[tensor.home]
        if home == self.rank:
            assert tensor.value is not None
            return tensor.value
        found = self._received.get(tensor.ident)
        if found is None:
            assert self.wire is not None
            flow = self._flow_index(tensor.ident, segment)
            found = self.wire.receive(home, flow, self._meta(tensor.ident))
            self._received[tensor.ident] = found
        return found

    @abc.abstractmethod
    def _flow_index(self, ident: int, segment: int) -> int: ...

    def _execute(
        self, event: Event, leaves: list[Any], spec: tree.Spec, fn: Callable[[Any, Any], Any]
    ) -> tuple[Outcome, list[Any]]:
        outcome = event.outcome
        if spec is ONE and not outcome.written:
            reals = [self._local(leaves[0], event, False)]
            args, kwargs = (reals[0],), {}
        else:
            written = {i for i, _ in outcome.written}
            made: dict[int, Any] = {}
            for i, leaf in enumerate(leaves):
                if id(leaf) not in made:
                    made[id(leaf)] = self._local(leaf, event, i in written)
            reals = [made[id(leaf)] for leaf in leaves]
            args, kwargs = self._together(spec, reals)
        if outcome.random:
            seed_generators(self.seed)
            with SeedMode():
                result = fn(args, kwargs)
        else:
            result = fn(args, kwargs)
        if outcome.guessed:
            outcome = self._confirmed(event, result)
        direct = event.direct
        if (  # as nearly always
            direct is not None
            and type(result) is torch.Tensor
            and outcome is event.outcome
            and (result.shape, result.dtype, result.requires_grad) == (direct.shape, direct.dtype, direct.requires_grad)
        ):
            return outcome, [result]
        values: list[Any] = []
        made_spec = tree.LEAF if type(result) is torch.Tensor else tree.flatten(result, values)
        if made_spec is tree.LEAF:
            values = [result]
        if made_spec is not outcome.spec and made_spec != outcome.spec:
            raise UnitMismatch(self.layout.name(event.target), *_first_difference(outcome.spec, made_spec))
        if outcome.attributes:
            modules = list(event.target.modules())
            values += [modules[i].__dict__[name] for i, name in outcome.attributes]
        self._check(event, outcome, values, reals)
        if outcome.written:
            values += [reals[i] for i, _ in outcome.written]
        return outcome, values

    def _check(self, event: Event, outcome: Outcome, values: list[Any], reals: list[Any]) -> None:
        if len(values) != len(outcome.places):
            raise UnitMismatch(self.layout.name(event.target), f"{len(outcome.places)} tensors", f"{len(values)}")
        for value, place in zip(values, outcome.places, strict=True):
            if isinstance(place, Out):
                meta = place.meta
                if isinstance(value, FakeTensor):
                    raise UnitMismatch(self.layout.name(event.target), "data", "what a cache kept of its trace")
                if value.shape != meta.shape or value.dtype != meta.dtype or value.requires_grad != meta.requires_grad:
                    raise UnitMismatch(self.layout.name(event.target), str(meta), str(meta_of(value)))
            elif value is not reals[place]:
                raise UnitMismatch(self.layout.name(event.target), f"its argument {place}", f"a new {meta_of(value)}")

    def _wrapped(self, event: Event, outcome: Outcome, leaves: list[Any], values: list[Any] | None) -> Any:
        """The event's result as glue sees it: stage tensors, or the very arguments that are passed through."""
        if event.direct is not None and outcome is event.outcome:
            made = StageTensor(event.direct, event.stage, event.outputs[0] or 0, event.segment, self.number)
            if values is not None:
                made.value = values[0]
            return made
        for slot, ((index, out), ident) in enumerate(zip(outcome.written, event.written, strict=True)):
            tensor = leaves[index]
            value = values[len(outcome.places) + slot] if values is not None else None
            if type(tensor) is not StageTensor:
                if not self._made_here(tensor):
                    self._spread(tensor, event.stage)
                    continue
                become(tensor, StageTensor(out.meta, event.stage, ident, event.segment, self.number))
            rebind(tensor, out.meta, event.stage, ident, event.segment, value)
            tensor.offset += out.offset
            if out.meta.requires_grad:
                told(tensor)
        results: list[Any] = []
        for i, place in enumerate(outcome.places):
            if not isinstance(place, Out):
                results.append(leaves[place])
                continue
            number = event.outputs[i]
            assert number is not None
            made = StageTensor(place.meta, event.stage, number, event.segment, self.number)
            if values is not None:
                made.value = values[i]
            for index in place.shares:
                other = leaves[index] if index >= 0 else results[-index - 1]
                if type(other) is StageTensor and other.parameter is None:
                    before = outcome.places[-index - 1].offset if index < 0 else 0  # type: ignore[union-attr]
                    link(made, other, place.offset - before, index in place.views, index < 0)
            results.append(made)
        if outcome.attributes:
            self._keep(event.target, outcome.attributes, results)
        if isinstance(outcome.spec, tree.Const):
            return outcome.spec.value
        return tree.unflatten(outcome.spec, results)

    def _spread(self, tensor: torch.Tensor, stage: int) -> None:
        """``stage`` wrote into a tensor that every rank has: send them the new values."""
        raise WriteIntoReplicated("a plain tensor")

    def _keep(self, unit: nn.Module, attributes: tuple[tuple[int, str], ...], results: list[Any]) -> None:
        """Let glue read the tensors that a unit left in its modules; they are the last of ``results``."""
        modules = list(unit.modules())
        kept = results[len(results) - len(attributes) :]
        del results[len(results) - len(attributes) :]
        for (index, name), tensor in zip(attributes, kept, strict=True):
            self.attributes[modules[index], name] = tensor
            keep_attribute(self.layout, modules[index], name)

    def plain(self) -> Plain:
        """Outside of glue: torch calls and modules behave as usual."""
        return Plain(self.mode)


def whole(value: torch.Tensor | None) -> Any:
    """The plain tensor for one of which this rank holds a slice that looks whole, as logits do; others as they are."""
    become_whole = getattr(value, "smp_whole", None)
    return value if become_whole is None else become_whole()


_DETACHING = (torch.Tensor.detach, torch.detach)
ONE = tree.flatten(((torch.empty(0),), {}), [])  # the commonest arguments: one tensor


def _first_difference(traced: tree.Spec, real: tree.Spec) -> tuple[str, str]:
    """Two specs in words, cut down to the first constant in which they differ, if it is that."""
    for a, b in zip(tree.constants(traced), tree.constants(real), strict=False):
        if a != b:
            return repr(a.value), repr(b.value)
    return _kind(traced), _kind(real)


def _kind(spec: tree.Spec) -> str:
    if isinstance(spec, tree.Const):
        return repr(spec.value)
    return f"a {spec.cls.__name__} of {len(spec.children)}" if isinstance(spec, tree.Node) else "a tensor"


def described(root: Any) -> str:
    """What was given to ``model.backward`` instead of a loss."""
    if not isinstance(root, torch.Tensor):
        return f"a {type(root).__name__}"
    if isinstance(root, StageTensor):
        return f"a tensor of shape {list(root.shape)} without gradient, on stage {root.home}"
    return f"a tensor of shape {list(root.shape)} that no module of the model has a part in"
