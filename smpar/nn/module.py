"""Twins: modules that hold slices of a module's parameters, and take its place.

The user's module itself becomes one: its class is replaced by a subclass, its parameters by slices. Its code, its
submodules and the names in its state stay.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from smpar.nn.group import TensorGroup, partial
from smpar.slices import Slicing, sliced, slicing_of

T = TypeVar("T", bound="DistributedModule")


class DistributedModule(nn.Module):
    """Base of all modules that a tensor-parallel group runs together.

    Attributes:
        tensor_group: that group.
        replaces: a twin of one class of torch's derives from that class: subclasses call it as they called that.
    """

    tensor_group: TensorGroup
    replaces: ClassVar[type[nn.Module] | None] = None

    @property
    def distributed(self) -> bool:
        """Whether there is more than one rank to divide among."""
        return self.tensor_group.size > 1


_classes: dict[tuple[type, type], type] = {}


def become(module: nn.Module, twin: type[T], group: TensorGroup, **attributes: Any) -> T:
    """Make a module a twin: of class ``twin`` before its own.

    Args:
        attributes: of the twin, besides its group.
    """
    cls = type(module)
    made = _classes.get((twin, cls))
    if made is None:
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        below = twin.replaces is not None and cls is not twin.replaces
        bases = (cls, twin) if below else (twin, cls)
        made = _classes[twin, cls] = type(cls.__name__, bases, body)
    module.__class__ = made
    for name, value in {"tensor_group": group, **attributes}.items():
        setattr(module, name, value)
    return module  # type: ignore[return-value]


def slice_parameter(parameter: nn.Parameter, slicing: Slicing, group: TensorGroup) -> None:
    """Let a parameter be this rank's slice of what it was: the same object, so that ties and optimizers keep it."""
    before = slicing_of(parameter)
    if before is not None:
        if before != slicing:
            raise ValueError(f"a parameter that two modules share would be sliced in two ways: {before}, {slicing}")
        return
    gradient, parameter.grad = parameter.grad, None
    parameter.data = slicing.take(parameter.detach(), group.rank).clone(memory_format=torch.contiguous_format)
    if gradient is not None:
        parameter.grad = slicing.take(gradient, group.rank).clone(memory_format=torch.contiguous_format)
    sliced(parameter, slicing)


def partial_rest(module: nn.Module, group: TensorGroup) -> None:
    """Of each whole parameter in the module, ranks compute parts of the gradient."""
    for parameter in module.parameters():
        if slicing_of(parameter) is None:
            partial(parameter, group)
