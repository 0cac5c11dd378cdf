"""Classes for which users give a divided one: hooks translate between the two.

::

    Original(*args, **kwargs)      ── init_hook ────▶  (args, kwargs) of Divided, or None: leave it whole
    original(*args, **kwargs)      ── forward_hook ─▶  (args, kwargs) of divided(...)
    what original(...) returns     ◀─ return_hook ──   what divided(...) returns
    original.state_dict()          ── weights ──────▶  the whole state of divided, by its names (beyond SMP)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from smpar.errors import HookMismatch, OtherDtype, RegistrationError, TwinWeights
from smpar.nn.group import TensorGroup
from smpar.nn.marks import default_dtype
from smpar.nn.module import DistributedModule, become
from smpar.slices import slicing_of, whole_shape

log = logging.getLogger("smpar")

Hook = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
C = TypeVar("C", bound=type[nn.Module])


@dataclass(frozen=True)
class Registration:
    """A class, the one that takes its place, and how to translate between them; hooks that are None change nothing."""

    cls: type[nn.Module]
    divided: type[nn.Module]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None
    weights: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        for cls in (self.cls, self.divided):
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise RegistrationError(f"{cls!r:.100}, which is no class of nn.Module")
        for name in ("init_hook", "forward_hook", "return_hook", "weights"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise RegistrationError(f"{name} = {hook!r:.100}, which cannot be called")
        for name, function in {"init_hook": self.cls.__init__, "forward_hook": self.cls.forward}.items():
            hook = getattr(self, name)
            if hook is not None and not _takes(hook, function):
                raise HookMismatch(
                    f"{name}{inspect.signature(hook)} for {self.cls.__name__}, whose "
                    f"{function.__name__} has the signature {inspect.signature(function)}"
                )

    def translated(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """What a hook makes of arguments; None only if ``init_hook`` says so.

        Raises:
            HookMismatch: it does not take them, or returns something else.
        """
        hook: Hook | None = getattr(self, name)
        if hook is None:
            return args, kwargs
        given = self.called(name, hook, args, kwargs)
        if given is None and name == "init_hook":
            return None
        pair = isinstance(given, (tuple, list)) and len(given) == 2
        if not pair or not isinstance(given[0], (tuple, list)) or not isinstance(given[1], Mapping):
            raise HookMismatch(f"{name} of {self.cls.__name__} returns {given!r:.200}, not (args, kwargs)")
        return tuple(given[0]), dict(given[1])

    def called(self, what: str, function: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function's result.

        Raises:
            HookMismatch: it does not take the arguments.
        """
        try:
            return function(*args, **kwargs)
        except TypeError:
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                given = [*(type(a).__name__ for a in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items())]
                raise HookMismatch(
                    f"{what}{signature} is called with ({', '.join(given)}): {error}, as {self.divided.__name__} takes "
                    f"the place of a {self.cls.__name__}"
                ) from None
            raise


def _takes(hook: Hook, function: Hook) -> bool:
    """Whether a hook takes arguments as the method ``function`` does, in some number of those that it allows."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return True
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in places)
    for number in range(least, len(places) + 1):
        with contextlib.suppress(TypeError):
            inspect.signature(hook).bind(*[None] * number, **by_name)
            return True
    return False


_registered: dict[type, Registration] = {}
_arguments: weakref.WeakKeyDictionary[nn.Module, Arguments] = weakref.WeakKeyDictionary()


def tp_register(
    dist_cls: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    weights: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> Callable[[C], C]:
    """Decorate a class of modules, of which those that are to be divided are replaced by a ``dist_cls``.

    The twin is made with the arguments of the original, after which it has the original's weights: those of the same
    names and (whole) shapes, or what ``weights`` makes of them. Else it starts with its own, which the log says.

    Args:
        dist_cls: any class of modules; one that divides is made of ``smpar.nn``'s.
        init_hook: (original's constructor arguments) -> (args, kwargs) for ``dist_cls``, or None: leave this one whole.
        forward_hook: (original's call arguments) -> (args, kwargs) for the twin's call.
        return_hook: the twin's result -> the original's.
        weights: the original's whole state dict -> that of the twin. Beyond SMP.

    Raises:
        RegistrationError: what is given are no classes of modules, or no functions.
    """

    def decorate(cls: C) -> C:
        tp_register_with_module(cls, dist_cls, init_hook, forward_hook, return_hook, weights)
        return cls

    return decorate


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_cls: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    weights: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> None:
    """As `tp_register`, for a class that is defined elsewhere. Its modules that are made from now on can be replaced.

    Raises:
        RegistrationError: what is given are no classes of modules, or no functions.
    """
    registration = Registration(module_cls, dist_cls, init_hook, forward_hook, return_hook, weights)
    if module_cls not in _registered:
        _remember_arguments(module_cls)
    _registered[module_cls] = registration


def _remember_arguments(cls: type[nn.Module]) -> None:
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:  # not what a subclass passes on
            _arguments[self] = args, kwargs
        plain(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign]


def remember_as(copy: nn.Module, original: nn.Module) -> None:
    """Know a copy's modules to be made with the arguments of those that they are copies of."""
    for here, there in zip(copy.modules(), original.modules(), strict=True):
        if there in _arguments:
            _arguments[here] = _arguments[there]


def registration_of(module: nn.Module) -> Registration | None:
    """What is registered for a module's class; None if nothing is."""
    return _registered.get(type(module))


class Translated(DistributedModule):
    """A twin that is called, and answers, as the module whose place it takes."""

    smp_registration: Registration

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        known = self.smp_registration
        inputs = known.translated("forward_hook", args, kwargs)
        assert inputs is not None
        result = known.called(f"forward of {known.divided.__name__}", super().forward, *inputs)
        return result if known.return_hook is None else known.called("return_hook", known.return_hook, (result,), {})


def replacement(module: nn.Module, options: Mapping[str, Any], group: TensorGroup) -> nn.Module | str:
    """The twin of a module whose class is registered, or why there is none.

    Args:
        options: further arguments of the twin, as far as it has them.

    Raises:
        HookMismatch: ``init_hook`` does not fit.
        OtherDtype: the twin is of another dtype than the module.
        TwinWeights: ``weights`` does not fit.
    """
    known, made_with = _registered[type(module)], _arguments.get(module)
    if made_with is None:
        return "it was made before its class was registered, so its arguments are not known"
    translated = known.translated("init_hook", *made_with)
    if translated is None:
        return "its init_hook says so"
    args, kwargs = translated
    takes = inspect.signature(known.divided).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in takes)
    kwargs = {**kwargs, **{k: v for k, v in options.items() if anything or any(p.name == k for p in takes)}}
    first = next(module.parameters(), torch.empty(0))
    dtype = first.dtype if first.is_floating_point() else None
    with default_dtype(dtype), torch.device(first.device):
        twin = known.called(known.divided.__name__, known.divided, args, kwargs)
    _check_dtype(module, twin)
    _take_weights(module, twin, known, group)
    twin.train(module.training)
    return become(twin, Translated, group, smp_registration=known)


def _check_dtype(module: nn.Module, twin: nn.Module) -> None:
    have, made = (sorted({str(p.dtype) for p in m.parameters()}) for m in (module, twin))
    if have and made and have != made:
        raise OtherDtype(
            f"a {type(module).__name__} of {', '.join(have)}, its twin {type(twin).__name__} of {', '.join(made)}"
        )


def _take_weights(module: nn.Module, twin: nn.Module, known: Registration, group: TensorGroup) -> None:
    given: Mapping[str, Any] = module.state_dict()
    if known.weights is not None:
        given = known.weights(dict(given))
    own = twin.state_dict(keep_vars=True)
    wanted = {name: whole_shape(tensor) for name, tensor in own.items() if isinstance(tensor, Tensor)}
    other = [
        f"{name}: {list(shape)}, given: {list(given[name].shape) if name in given else 'nothing'}"
        for name, shape in wanted.items()
        if name not in given or tuple(given[name].shape) != shape
    ]
    if other:
        if known.weights is not None:
            raise TwinWeights(f"weights of {known.cls.__name__} for {known.divided.__name__}: {'; '.join(other)}")
        log.warning(
            "smpar: a %s takes the place of a %s with weights of its own, as theirs differ (%s, ...); give "
            "smpar.tp_register(..., weights=...) to keep them",
            known.divided.__name__, known.cls.__name__, other[0],
        )  # fmt: skip
        return
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    with torch.no_grad():
        for name in wanted:
            slicing, target = slicing_of(own[name]), own[name]
            if not target.is_meta:
                target.copy_(given[name] if slicing is None else slicing.take(given[name], group.rank))
            if name in trained and isinstance(target, nn.Parameter):
                target.requires_grad_(trained[name])
