"""What this rank computes on: its name, memory, and speed at training's precision."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from smpar.planner.cluster import DeviceType

_RUNS = 7  # after one to warm up; the median counts


def device_name(device: torch.device) -> str:
    """The device type's name in cluster files and profiles: ``cpu``, or the GPU's without its maker."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ").removeprefix("Tesla ")


def measure_device(device: torch.device, dtype: torch.dtype, sharing: int) -> DeviceType:
    """Measure the present device.

    Args:
        dtype: of training: its matrix products count.
        sharing: ranks on this machine, which share the memory of a CPU.
    """
    large = device.type == "cuda"
    side, length = (8192, 1 << 28) if large else (768, 1 << 23)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = _median(lambda: torch.mm(left, right), device)
    source = torch.ones(length, device=device)
    target = torch.empty_like(source)
    copy = _median(lambda: target.copy_(source), device)
    memory = torch.cuda.get_device_properties(device).total_memory if large else psutil.virtual_memory().total / sharing
    return DeviceType(
        device_name(device), float(memory), 2.0 * side**3 / seconds, 2.0 * source.nbytes / copy
    )  # fmt: skip


def _median(work: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(1 + _RUNS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
