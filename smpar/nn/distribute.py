"""Replacing what was asked for by twins."""

from __future__ import annotations

from typing import Any

from torch import nn

from smpar.nn.families import divide_model, family_of, heads_of
from smpar.nn.group import TensorGroup
from smpar.nn.vocabulary import divide_head

MARK = "_smp_tensor_parallelism"


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    for part in module.modules():
        part.__dict__[MARK] = enabled


def distribute(module: nn.Module, group: TensorGroup) -> nn.Module:
    if group.size == 1:
        return module
    for part in list(module.modules()):
        if part.__dict__.get(MARK) and family_of(part) and not any(hasattr(m, "tensor_group") for m in part.modules()):
            inner = getattr(part, "base_model", part)
            if inner is part:
                divide_model(part, group)
    for part in list(module.modules()):
        head = heads_of(part)
        if head is not None and head.__dict__.get(MARK) and not hasattr(head, "tensor_group"):
            divide_head(head, group)
    return module
