"""What the benches share: the closing line of JSON, growth of resources, peak memory."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import psutil
import torch


def on_two_ranks(bench: str) -> NoReturn:
    """Become torchrun, with two processes of that bench as its workers, on CPU: they get ``--is-worker``, too."""
    os.execve(sys.executable, [*_launch(bench), "--is-worker"], _environment())


def judged_on_two_ranks(bench: str) -> int:
    """Run two processes of that bench, on CPU, with ``--verdict FILE``: their exit status, or 1 if they wrote there."""
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict"
        code = subprocess.call([*_launch(bench), "--verdict", str(verdict)], env=_environment())
        return code or int(bool(verdict.read_text()))


def _launch(bench: str) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *torchrun, "-m", f"benches.{bench}", *sys.argv[1:]]


def _environment() -> dict[str, str]:
    return dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")  # a core each


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the bench's docstring and knows ``--json``."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return result


Figures: TypeAlias = "float | Mapping[str, Figures]"
"""A figure, or several by name."""


def _rounded(figures: Figures) -> Any:
    if isinstance(figures, Mapping):
        return {name: _rounded(value) for name, value in figures.items()}
    return figures if isinstance(figures, int) else float(f"{figures:.5g}")


def finish(figures: Mapping[str, Figures], path: Path | None) -> None:
    """Print the figures as the bench's last line, and write them to ``path`` if there is one."""
    line = json.dumps(_rounded(figures))
    if path:
        path.write_text(line + "\n")
    print(line, flush=True)


@dataclass(frozen=True)
class Usage:
    """What a process holds at one moment."""

    tensors: int
    threads: int
    resident: int  # bytes

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        process = psutil.Process()
        # type(), not isinstance(): proxies among the objects answer isinstance() by running code.
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        return cls(tensors, process.num_threads(), process.memory_info().rss)


def slope(usages: Sequence[Usage], steps_between: int) -> float:
    """Resident bytes gained per step: the least-squares line through equally spaced observations."""
    steps = np.arange(len(usages)) * steps_between
    return float(np.polyfit(steps, [u.resident for u in usages], 1)[0])


class PeakMemory:
    """``with PeakMemory() as peak: ...``; then ``peak.growth``: bytes that resident memory rose above the start."""

    def __init__(self, interval: float = 0.005) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._process = psutil.Process()

    def _observe(self) -> None:
        self._peak = max(self._peak, self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._observe()

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._start = self._peak = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._observe()

    @property
    def growth(self) -> int:
        return self._peak - self._start
