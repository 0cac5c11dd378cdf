"""The most bytes of tensors that were alive at once.

The profiler reports each allocation and release of torch's CPU allocator; their running sum, from the moment at which
it starts, is what is alive of what was made since. That is neither the resident memory, which holds what the C
library keeps and the interpreter's own, nor an estimate: buffers of transfers, saved activations and temporary results
all count, whoever made them. Releases by other threads would be missed, so nothing that runs in one may be measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak of the bytes that ``function`` has alive, beyond those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def check_peak_bytes() -> None:
    """A known peak must come out: two tensors at once, then one.

    Raises:
        RuntimeError: it does not, with this version of torch.
    """

    def allocate() -> None:
        first = torch.empty(3 << 20, dtype=torch.uint8)
        second = torch.empty(2 << 20, dtype=torch.uint8)
        del first, second
        torch.empty(4 << 20, dtype=torch.uint8)

    if (found := peak_bytes(allocate)) != 5 << 20:
        raise RuntimeError(f"the profiler of torch {torch.__version__} gives {found} bytes for a peak of {5 << 20}")
