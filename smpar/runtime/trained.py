"""What of a module trains, looked up anew in each step at little cost."""

from __future__ import annotations

from torch import Tensor, nn


class Trained:
    """The parameters and buffers of a module, which may gain, lose and freeze them between steps."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._children: list[nn.Module | None] | None = None
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []

    def parameters(self) -> list[nn.Parameter]:
        """Those that require gradients, each once; the same list as long as they are the same."""
        self._look()
        found = dict.fromkeys(
            p for m in self._modules for p in m._parameters.values() if p is not None and p.requires_grad
        )
        if len(found) != len(self._parameters) or any(a is not b for a, b in zip(found, self._parameters, strict=True)):
            self._parameters = list(found)
        return self._parameters

    def buffers(self) -> list[Tensor]:
        """All buffers, each once."""
        self._look()
        return list(dict.fromkeys(b for m in self._modules for b in m._buffers.values() if b is not None))

    def modes(self) -> tuple[bool, ...]:
        """Whether each module trains or evaluates."""
        self._look()
        return tuple(m.training for m in self._modules)

    def _look(self) -> None:
        children = [c for m in self._modules for c in m._modules.values()]
        if children != self._children:
            self._modules = list(self._module.modules())
            self._children = [c for m in self._modules for c in m._modules.values()]
