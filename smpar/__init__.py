"""smpar: model-parallel training of any ``nn.Module``.

::

    import smpar as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smpar.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Public names are loaded at their first use, so that the planner's rooms import without torch."""
    if name.startswith("_"):  # as the compiled core, `_native`, which asks here first: it needs no torch
        raise AttributeError(f"module 'smpar' has no attribute {name!r}")
    api = importlib.import_module("smpar.api")
    if name not in api.__all__:
        raise AttributeError(f"module 'smpar' has no attribute {name!r}")
    value = globals()[name] = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("smpar.api").__all__})
