"""Gradients of half-precision parameters, summed over microbatches in float32.

backward of a microbatch ──▶ p.grad (bfloat16) ──▶ sum (float32) ──▶ reduced in float32 ──▶ p.grad (bfloat16)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of this type are summed."""
    return WIDE.get(dtype, dtype)


class Wide:
    """The float32 sums of one step's gradients; between steps the gradients are in ``p.grad``, in their own type."""

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = ()
        self._memory: list[Tensor | None] = []  # where a parameter's sum lies; None where it is not half precision
        self.sums: list[Tensor | None] = []  # by parameter; None where nothing came yet

    @torch.no_grad()
    def begin(self, parameters: Sequence[nn.Parameter], given: Sequence[Tensor | None]) -> None:
        """Open the step's sums with what the gradients hold from earlier steps.

        Args:
            given: memory (a bucket's) for the sum of each parameter; where there is none, there will be new memory.
        """
        if parameters is not self._parameters:
            self._parameters, self._memory = parameters, [None] * len(parameters)
        self.sums = [None] * len(parameters)
        for index, (p, memory) in enumerate(zip(parameters, given, strict=True)):
            if p.dtype in WIDE:
                own = self._memory[index]
                if memory is not None or own is None:
                    self._memory[index] = memory if memory is not None else torch.empty_like(p, dtype=WIDE[p.dtype])
                if p.grad is not None:
                    self.take(index)

    def take(self, index: int) -> None:
        """Add a parameter's gradient to its sum."""
        memory, p = self._memory[index], self._parameters[index]
        if memory is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            grad = p.grad
            assert grad is not None
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            before = self.sums[index]
            self.sums[index] = memory.copy_(grad) if before is None else before.add_(grad)
            p.grad = None

    def is_wide(self, index: int) -> bool:
        """Whether this parameter's gradients are summed here."""
        return self._memory[index] is not None

    def give_back(self, index: int, total: Tensor | None) -> None:
        """End a parameter's sum: its gradient is ``total``, in the parameter's type."""
        p = self._parameters[index]
        p.grad = None if total is None else total.to(p.dtype)
        self.sums[index] = None

    @torch.no_grad()
    def end(self) -> None:
        """Give back the sums that are left."""
        for index, total in enumerate(self.sums):
            if total is not None:
                self.give_back(index, total)
