"""Memory to receive into, used again once nobody holds it: fresh pages cost a fault each while a message arrives.

    take(shape) ── new block A ──▶ received, read, saved for backward ... all let go ─┐
    take(shape) ── block A again ◀─────────────────────────────────── seen by its use count

Who holds a tensor, or a view of it, or a graph that saved it, counts as a user of its block, so that nothing needs to
be given back. On CUDA the caching allocator does this, in stream order; there, and for small messages, which the C
library serves from memory it has at hand, `take` is plain ``torch.empty``.

Measured on CPU over gloo, a receiver that keeps four messages: 8 MB take 3.2 ms for 3.5 ms, 4 MB 1.1 ms for 1.2 ms,
some 200 and 100 faults less; at 1 MB and below there is no difference. A look at a block takes 0.2 us.
"""

from __future__ import annotations

import sys

import torch

LEAST = 1 << 20  # bytes; smaller memory is not kept
_IDLE = 1  # the use count of a block that only the pool holds


class BufferPool:
    """Blocks of memory by size. One thread uses it.

    Attributes:
        held: bytes of all blocks, in use or not.
    """

    def __init__(self) -> None:
        self.held = 0
        self._blocks: dict[int, list[_Block]] = {}

    def take(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """A tensor of elements yet to be written.

        Args:
            shape, stride: elements that fill their memory, in any order of dims.
            dtype, device: its own.
        """
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if size < LEAST or torch.device(device).type != "cpu":
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        blocks = self._blocks.setdefault(size, [])
        block = next((b for b in blocks if b.idle), None)
        if block is None:
            block = _Block(size)
            blocks.append(block)
            self.held += size
        block.used = True
        return torch.empty(0, dtype=dtype).set_(block.storage, 0, shape, stride)

    def trim(self) -> None:
        """Let go of what was not taken since the last trim: at the end of a step, as sizes change from step to step."""
        for size, blocks in list(self._blocks.items()):
            kept = [b for b in blocks if b.used or not b.idle]
            self.held -= size * (len(blocks) - len(kept))
            for block in kept:
                block.used = False
            if kept:
                self._blocks[size] = kept
            else:
                del self._blocks[size]


class _Block:
    """Memory that tensors share one after the other; each has a version counter of its own."""

    __slots__ = ("storage", "used")

    def __init__(self, size: int) -> None:
        self.storage = torch.UntypedStorage(size)
        self.used = True

    @property
    def idle(self) -> bool:
        # Who asks a tensor for its storage gets this very object, which the storage's own count does not show.
        return sys.getrefcount(self.storage) <= 2 and torch._C._storage_Use_Count(self.storage._cdata) <= _IDLE
