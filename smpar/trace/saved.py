"""What autograd keeps for a backward, counted under fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C import _autograd, _functorch


class Saved:
    """Bytes of the tensors that operations save, each storage once.

    Attributes:
        aside: storages that do not count, by address.
    """

    def __init__(self) -> None:
        self.aside: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._boxes: list[list[torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.aside:
                self._sizes[storage._cdata] = storage.nbytes()
        self._boxes.append([tensor])
        return self._boxes[-1]

    def forget(self) -> None:
        """Let go of the tensors: an operation that saves its own result would keep it for ever."""
        for box in self._boxes:
            box.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is saved inside, also where hooks on saved tensors are not allowed (``torch.func.grad``, or
        ``torch.autograd.graph.disable_saved_tensors_hooks``): these only look on."""
        refused = _autograd._saved_tensors_hooks_get_disabled_error_message()
        disable = _autograd._saved_tensors_hooks_disable
        if refused is not None:
            _autograd._saved_tensors_hooks_enable()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box[0]):
                _autograd._saved_tensors_hooks_disable = lambda *_, **__: None
                try:
                    yield
                finally:
                    _autograd._saved_tensors_hooks_disable = disable
        finally:
            if refused is not None:
                disable(refused)
