"""smpar's tensor parallelism against torch's DTensor: the same transformer layers and batch on two ranks.

Two single-threaded processes. Outputs and gradients are compared first; then passes, forward and backward, of
torch.distributed.tensor.parallel, of smpar's twins of the same modules (``divided``) and of smpar's own layers
(``layers``) alternate, started by both ranks at one moment; a pass lasts until the slower rank has ended. ``speed``:
hidden states are whole on both ranks; ``memory``: slices of the sequence between the halves of layers (torch's
SequenceParallel).

    ratio              DTensor's seconds / smpar's, the median over pairs of neighbouring passes; the least of both
                       modes and of smpar's two ways. Small: calls and latency; large: products and bandwidth
    bytes_per_layer    that a rank sends in forward and backward of a layer amid others, in each mode
    host_us_per_layer  microseconds of the thread's processor time in a tiny layer's forward and backward, with
                       collectives that do nothing: of smpar's twins, the larger of both modes
    ratios, host_us    each of them; ``plain``: the undivided modules alone

Intervals hold 95 %, by resampling pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # brings a backend that does nothing
from torch.utils._python_dispatch import TorchDispatchMode

import smpar as smp
from benches._common import Figures, finish, on_two_ranks, parser
from benches._layers import WAYS, Pass, Size
from benches._paired import Ratio, Spread, alternate, quiet, slowest
from smpar.nn import collectives
from smpar.nn.group import TensorGroup

MODES = ("speed", "memory")
WARM = 3  # rounds that are not counted
CLOSE = 1e-4  # relative distance of outputs and gradients
TINY = Size(width=16, heads=2, length=4, samples=1, depth=4)


def say(text: str) -> None:
    """Rank 0 says it."""
    if dist.get_rank() == 0:
        print(text, flush=True)


@contextmanager
def mode_of(name: str) -> Iterator[TensorGroup]:
    """smpar in that mode, the same batch on both ranks."""
    smp.init({"tensor_parallel_degree": 2, "optimize": name, "prescaled_batch": True})
    try:
        yield TensorGroup.current()
    finally:
        smp.shutdown()
        gc.collect()


def passes(size: Size, group: TensorGroup) -> dict[str, Pass]:
    """All ways, after one pass each that shows that they do the same.

    Raises:
        RuntimeError: they do not.
    """
    found = {}
    truth = Pass(size.stack(), *size.batch())
    want, first = truth().detach(), truth.x.grad
    assert first is not None
    for way, make in WAYS.items():
        found[way] = tried = Pass(make(size, group), *size.batch())
        got, grad = tried().detach(), tried.x.grad
        assert grad is not None
        for what, here, there in (("outputs", got, want), ("gradients", grad, first)):
            if not (here - there).norm() <= CLOSE * there.norm():
                raise RuntimeError(f"{what} of {way} differ from those of the undivided layers")
    return found


def compare(label: str, size: Size, group: TensorGroup, pairs: int) -> dict[str, Ratio]:
    """DTensor's time over that of each of smpar's ways."""
    ways = passes(size, group)

    def clear() -> None:
        for way in ways.values():
            way.clear()

    alternate(ways, WARM, clear)
    taken = {way: slowest(seconds) for way, seconds in alternate(ways, pairs, clear).items()}
    say(label)
    for way, seconds in taken.items():
        say(f"  {way:<8} {Spread.of(seconds)}")
    ratios = {way: Ratio.of(taken["dtensor"], taken[way]) for way in ways if way != "dtensor"}
    for way, ratio in ratios.items():
        say(f"  ratio dtensor / {way}: {ratio}")
    return ratios


# -- bytes --------------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Counts the bytes that DTensor's collectives make a rank send, as the usual algorithms do."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes, self._ranks = 0, ranks
        functions = torch.ops._c10d_functional
        self._sends = {
            functions.all_reduce.default: 2 * (ranks - 1) / ranks,
            functions.reduce_scatter_tensor.default: (ranks - 1) / ranks,
            functions.all_gather_into_tensor.default: float(ranks - 1),
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come back here
        if func in self._sends:
            self.bytes += round(args[0].nbytes * self._sends[func])
        return func(*args, **(kwargs or {}))


def sent_by(way: str, size: Size, group: TensorGroup) -> tuple[int, Counter[str]]:
    """Bytes that this rank sends in a pass, and smpar's collectives."""
    tried = Pass(WAYS[way](size, group), *size.batch())
    with Sent(group.size) as torchs, collectives.counting() as ours:
        tried()
    return torchs.bytes + ours.pop("bytes", 0), ours


def bytes_per_layer(size: Size, group: TensorGroup) -> dict[str, int]:
    """What one layer more sends, by way."""
    found: dict[str, int] = {}
    for way in WAYS:
        (one, few), (two, more) = (sent_by(way, dataclasses.replace(size, depth=depth), group) for depth in (1, 2))
        found[way] = two - one
        calls = ", ".join(f"{count} {name}" for name, count in (more - few).items())
        say(f"  {way:<8} sends {(two - one) / 1024:.0f} KiB per layer{': ' + calls if calls else ''}")
    return found


# -- the host -----------------------------------------------------------------------------------------------------


def host_us(group: TensorGroup, rounds: int) -> dict[str, float]:
    """Microseconds per layer without the time of collectives, by way; and of the plain modules."""
    ranks = list(range(group.size))
    idle = dataclasses.replace(group, group=dist.new_group(ranks, backend="fake"))
    ways = {way: Pass(make(TINY, idle), *TINY.batch()) for way, make in WAYS.items()}
    ways["plain"] = Pass(TINY.stack(), *TINY.batch())

    taken: dict[str, list[float]] = {way: [] for way in ways}
    with quiet():
        for _ in range(rounds):
            for way, tried in ways.items():
                tried.clear()
                start = time.thread_time()
                tried()
                taken[way].append(time.thread_time() - start)
    return {way: statistics.median(seconds) * 1e6 / TINY.depth for way, seconds in taken.items()}


# -- the bench ----------------------------------------------------------------------------------------------------


def worker(args: argparse.Namespace) -> None:
    """One of the two ranks; rank 0 prints."""
    torch.set_num_threads(1)
    sizes = {
        "small": (Size(width=128, heads=4, length=64, samples=2, depth=2), args.small_pairs),
        "large": (Size(args.width, args.width // 64, args.length, args.samples, depth=1), args.large_pairs),
    }
    ratios: dict[str, dict[str, Ratio]] = {name: {} for name in sizes}
    moved: dict[str, dict[str, int]] = {name: {} for name in sizes}
    host: dict[str, dict[str, float]] = {}
    for mode in MODES:
        with mode_of(mode) as group:
            for name, (size, pairs) in sizes.items():
                found = compare(f"{mode}, {name}: {size}", size, group, pairs)
                ratios[name] |= {f"{mode}_{way}": ratio for way, ratio in found.items()}
                moved[name] |= {f"{mode}_{way}": sent for way, sent in bytes_per_layer(size, group).items()}
            host[mode] = host_us(group, args.host_rounds)
            say("host, us per layer: " + ", ".join(f"{way} {us:.0f}" for way, us in host[mode].items()))
    figures: dict[str, Figures] = {
        "ratio": {name: min(ratio.value for ratio in found.values()) for name, found in ratios.items()},
        "bytes_per_layer": moved,
        "host_us_per_layer": max(us["divided"] for us in host.values()),
        "ratios": {name: {way: ratio.value for way, ratio in found.items()} for name, found in ratios.items()},
        "host_us": host,
    }
    if int(os.environ["RANK"]) == 0:  # smpar is shut down, and torch's groups with it
        finish(figures, args.json)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--small-pairs", type=int, default=200, help="pairs of passes at the small size")
    arguments.add_argument("--large-pairs", type=int, default=16, help="pairs of passes at the large size")
    arguments.add_argument("--host-rounds", type=int, default=300)
    arguments.add_argument("--width", type=int, default=1024, help="of the large size")
    arguments.add_argument("--length", type=int, default=512)
    arguments.add_argument("--samples", type=int, default=4)
    arguments.add_argument("--quick", action="store_true", help="a check in under a minute: the figures mean little")
    arguments.add_argument("--is-worker", action="store_true", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.quick:
        args.small_pairs, args.large_pairs, args.host_rounds, args.width, args.length = 20, 3, 20, 256, 128
    if not args.is_worker:
        on_two_ranks("tensor")
    worker(args)


if __name__ == "__main__":
    main()
