"""Nested values with tensors inside: take them apart, key them, put them together again.

Containers are lists, tuples, named tuples, dicts, dataclasses and whatever is registered with
``torch.utils._pytree`` (among them the output classes of transformers). Anything else is a
constant and travels as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch.utils import _pytree

Tensor = torch.Tensor
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, type)


class Const:
    """A leaf that is no tensor; equal to another when type and value are, or just the type if it is opaque."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        if isinstance(value, _PLAIN):
            self.key: Any = (type(value), value)
        elif isinstance(value, (slice, range)):
            self.key = (type(value), value.start, value.stop, value.step)
        elif isinstance(value, (torch.Size, frozenset)):
            self.key = (type(value), value)
        elif callable(value) and not isinstance(value, torch.nn.Module):
            self.key = _code_key(value)
        else:
            self.key = type(value)

    @property
    def opaque(self) -> bool:
        return isinstance(self.key, type)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Const({self.value!r})"


def _code_key(value: Any) -> Any:
    """Functions are equal if they run the same code with the same plain values bound in."""
    if isinstance(value, functools.partial):
        bound = (*value.args, *(item for pair in sorted(value.keywords.items()) for item in pair))
        return functools.partial, _code_key(value.func), tuple(_bound_key(v) for v in bound)
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return value.__code__, tuple(_bound_key(v) for v in (*cells, *(value.__defaults__ or ())))
    if isinstance(value, types.MethodType):
        return _code_key(value.__func__), _bound_key(value.__self__)
    return type(value), getattr(value, "__module__", None), getattr(value, "__qualname__", None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _bound_key(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.nn.Module):
        return id(value)
    return type(value), getattr(value, "__qualname__", None)


class _Leaf:
    """Marks a tensor's place in a spec."""

    def __repr__(self) -> str:
        return "*"


LEAF = _Leaf()


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """An inner node of a spec. ``aux`` is what the container needs to be made again."""

    cls: type
    aux: Any
    children: tuple[Any, ...]
    template: Any = dataclasses.field(default=None, compare=False)


Spec = Any  # LEAF | Const | Node


def _parts(value: Any) -> tuple[Any, list[Any], Any] | None:
    """(aux, children, template) of a container, or None for a leaf."""
    cls = type(value)
    if cls is tuple or cls is list:
        return None, list(value), None
    if cls is dict:
        return tuple(value), list(value.values()), None
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return None, list(value), None
    entry = _pytree.SUPPORTED_NODES.get(cls)
    if entry is not None:
        children, context = entry.flatten_fn(value)
        return _HashableContext(context), list(children), None
    if cls is set or isinstance(value, (torch.Size, frozenset)):
        return None
    if isinstance(value, dict):
        return tuple(value), list(value.values()), value
    if isinstance(value, (tuple, list)):
        return None, list(value), None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        return names, [getattr(value, name) for name in names], value
    return None


class _HashableContext:
    """A pytree context, compared by value where it can be; contexts are short lists of keys."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashableContext) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


def _build(cls: type, aux: Any, children: list[Any], template: Any) -> Any:
    if cls is tuple or cls is list:
        return cls(children)
    if cls is dict:
        return dict(zip(aux, children, strict=True))
    if hasattr(cls, "_fields") and issubclass(cls, tuple):
        return cls(*children)
    if isinstance(aux, _HashableContext):
        return _pytree.SUPPORTED_NODES[cls].unflatten_fn(children, aux.value)
    if issubclass(cls, dict):
        made = copy.copy(template)
        for key, child in zip(aux, children, strict=True):
            dict.__setitem__(made, key, child)
        return made
    if issubclass(cls, (tuple, list)):
        return cls(children)
    made = copy.copy(template)
    for name, child in zip(aux, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def _hollow(aux: Any, children: list[Any], template: Any) -> Any:
    """A copy without its contents: specs are kept for long, tensors must not be."""
    return _build(type(template), aux, [None] * len(children), template)


def flatten(value: Any, leaves: list[Tensor]) -> Spec:
    """Append the tensors of ``value`` to ``leaves``, left to right; return its hashable spec."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return LEAF
    parts = _parts(value)
    if parts is None:
        return Const(value)
    aux, children, template = parts
    spec = tuple(flatten(child, leaves) for child in children)
    return Node(type(value), aux, spec, None if template is None else _hollow(aux, children, template))


def unflatten(spec: Spec, leaves: list[Any]) -> Any:
    """Inverse of ``flatten``: consumes ``leaves`` from the front."""
    return _unflatten(spec, iter(leaves))


def _unflatten(spec: Spec, leaves: Any) -> Any:
    if spec is LEAF:
        return next(leaves)
    if isinstance(spec, Const):
        return spec.value
    return _build(spec.cls, spec.aux, [_unflatten(child, leaves) for child in spec.children], spec.template)


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a nested value, left to right."""
    leaves: list[Tensor] = []
    flatten(value, leaves)
    return leaves


def constants(spec: Spec) -> list[Const]:
    """All constants of a spec, left to right."""
    if isinstance(spec, Const):
        return [spec]
    return [c for child in spec.children for c in constants(child)] if isinstance(spec, Node) else []


def plain_constants(spec: Spec) -> list[Any]:
    """The values of a spec's constants, left to right; ``LEAF`` for those that are no numbers, strings or the like."""
    plain = (int, float, complex, str, bytes, type(None))
    return [c.value if isinstance(c.value, plain) else LEAF for c in constants(spec)]


def with_constants(spec: Spec, values: Iterator[Any]) -> Spec:
    """The spec with its constants replaced, left to right, where the value is not ``LEAF``."""
    if isinstance(spec, Const):
        value = next(values)
        return spec if value is LEAF else Const(value)
    if isinstance(spec, Node):
        return dataclasses.replace(spec, children=tuple(with_constants(child, values) for child in spec.children))
    return spec


def adopt(old: Any, new: Any) -> Any:
    """Put the contents of ``new`` into the containers of ``old``, as a call did with copies of them.

    Returns:
        ``old`` if it is a container that can be changed, else ``new``.
    """
    if old is new or type(old) is not type(new):
        return new
    if isinstance(old, list):
        old[:] = [adopt(old[i], v) if i < len(old) else v for i, v in enumerate(new)]
        return old
    if isinstance(old, dict):
        items = [(k, adopt(old[k], v) if k in old else v) for k, v in new.items()]
        for key in [k for k in old if k not in new]:
            del old[key]
        for key, value in items:
            old[key] = value
        return old
    if isinstance(old, tuple):
        for a, b in zip(old, new, strict=False):
            adopt(a, b)
        return old
    if dataclasses.is_dataclass(old) and not isinstance(old, type):
        for f in dataclasses.fields(old):
            if hasattr(new, f.name):
                value = getattr(new, f.name)
                object.__setattr__(old, f.name, adopt(getattr(old, f.name, None), value))
        return old
    return new


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nesting with ``fn`` applied to every tensor; what holds no tensor is returned as it is."""
    if isinstance(value, Tensor):
        return fn(value)
    parts = _parts(value)
    if parts is None:
        return value
    aux, children, template = parts
    mapped = [map_tensors(fn, child) for child in children]
    if all(new is old for new, old in zip(mapped, children, strict=True)):
        return value
    return _build(type(value), aux, mapped, template)


class Snapshot:
    """Remembers the Python attributes of objects, so that a trial run leaves no traces in them.

    Attributes, and the contents of lists, dicts and sets among them, are put back by ``restore``;
    tensors themselves are not copied (a trial run works on fake ones).
    """

    def __init__(self, depth: int = 4) -> None:
        self._depth = depth
        self._saved: dict[int, tuple[Any, Any]] = {}

    def add(self, obj: Any, depth: int | None = None) -> None:
        depth = self._depth if depth is None else depth
        if depth < 0 or isinstance(obj, (Tensor, *_PLAIN)) or (callable(obj) and not hasattr(obj, "__dict__")):
            return
        if id(obj) in self._saved:
            return
        if type(obj) in (list, set) or isinstance(obj, dict):
            self._saved[id(obj)] = (obj, obj.copy())
            for item in list(obj.values() if isinstance(obj, dict) else obj):
                self.add(item, depth - 1)
        elif isinstance(obj, torch.nn.Module) or (hasattr(obj, "__dict__") and not isinstance(obj, type)):
            attributes = obj.__dict__
            self._saved[id(obj)] = (obj, dict(attributes))
            for name, item in list(attributes.items()):
                if name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "config"):
                    continue
                if type(item) in (list, set) or isinstance(item, dict):
                    self.add(item, 1 if isinstance(obj, torch.nn.Module) else depth - 1)
                elif not isinstance(obj, torch.nn.Module):
                    self.add(item, depth - 1)

    def gained(self, kind: type, aside: set[int]) -> bool:
        """Whether a list or dict among the objects' attributes got a value of this type that it had not before.

        Args:
            aside: ids of lists and dicts that do not count.
        """
        for key, (obj, saved) in self._saved.items():
            if key not in aside and type(obj) in (list, dict):
                now = obj.values() if isinstance(obj, dict) else obj
                fresh = [v for v in now if isinstance(v, kind)]
                if fresh:
                    before = {id(v) for v in (saved.values() if isinstance(saved, dict) else saved)}
                    if any(id(v) not in before for v in fresh):
                        return True
        return False

    def differs(self, aside: Set[int] = frozenset()) -> bool:
        """Whether an attribute, or a list, dict or set among the attributes, is not what it was.

        Args:
            aside: ids of lists and dicts that do not count.
        """
        return any(key not in aside and _unlike(obj, saved) for key, (obj, saved) in self._saved.items())

    def restore(self) -> None:
        for obj, saved in self._saved.values():
            if type(obj) is list:
                obj[:] = saved
            elif isinstance(obj, dict):
                if len(obj) != len(saved) or any(obj.get(k, LEAF) is not v for k, v in saved.items()):
                    obj.clear()
                    obj.update(saved)
            elif type(obj) is set:
                obj.clear()
                obj.update(saved)
            else:
                _restore_attributes(obj.__dict__, saved, flags=not isinstance(obj, torch.nn.Module))


def _unlike(obj: Any, saved: Any) -> bool:
    if type(obj) is set:
        return bool(obj != saved)
    if type(obj) is list:
        return len(obj) != len(saved) or any(a is not b for a, b in zip(obj, saved, strict=True))
    now = obj if isinstance(obj, dict) else obj.__dict__
    return len(now) != len(saved) or any(saved.get(name, LEAF) is not value for name, value in now.items())


def _restore_attributes(attributes: dict[str, Any], saved: dict[str, Any], flags: bool) -> None:
    for name in [n for n, value in attributes.items() if saved.get(n, LEAF) is not value]:
        if isinstance(attributes[name], bool) and not flags:
            continue  # a module's flag of something done once, such as hooks installed, which has been done indeed
        if name in saved:
            attributes[name] = saved[name]
        else:
            del attributes[name]
    for name in saved.keys() - attributes.keys():
        attributes[name] = saved[name]
