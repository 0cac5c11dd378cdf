"""What smpar adds to a step: microseconds per microbatch and segment, and what grows over many steps.

A tiny model, cut by hand in two stages, on two processes. The same 1F1B step runs three ways:

    smpar      the whole of ``train_step(...).reduce_mean()``, its checks and the shared loss included
    by hand    the same actions in the same order, written out in plain torch with isend and irecv
    compute    this rank's forwards and backwards alone, without any message

    overhead_us = mean over the ranks of (smpar - by hand) / (microbatches x segments of the rank)

Each rank holds one segment. ``overhead_us`` compares the processor time of the step's thread: the microseconds that
smpar itself takes. The same difference in elapsed time is printed beside it; it also holds what waking up after a wait
takes, and with so little to compute both ranks wait most of the time, which is a matter of the machine (a virtual one
may take 200 us for each). The three ways alternate in blocks, so that a busy machine slows all. Then ``--steps`` steps
with an optimizer must leave no more tensors and threads than before; ``growth_bytes_per_step`` is the slope of resident
memory over these steps, the worse rank's, once the allocators and the interpreter's caches have filled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp
from benches._common import Usage, finish, judged_on_two_ranks, parser, slope

BLOCKS, OBSERVATIONS = 10, 25
SETTLE = 2500  # steps until free lists, arenas and caches have filled; some 2 MB in all


class Layer(nn.Module):
    """A residual layer, ``[N, width]`` in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Halves(nn.Module):
    """Two stages of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with smp.partition(0):
            self.lower = half_model(width)
        with smp.partition(1):
            self.upper = half_model(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x))


def half_model(width: int) -> nn.Sequential:
    return nn.Sequential(Layer(width), Layer(width))


@smp.step
def train_step(model: smp.DistributedModel, x: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), target)
    model.backward(loss)
    return loss


def plain_step(half: nn.Module, last: bool, xs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    """One stage's forward and backward of every microbatch, in plain torch: what the step cannot do without."""
    for x, target in zip(xs, targets, strict=True):
        if last:
            (F.mse_loss(half(x.requires_grad_()), target) / len(xs)).backward()
            x.grad = None
        else:
            half(x).backward(target)


class ByHand:
    """The 1F1B step of two stages, written out for this model."""

    def __init__(self, half: nn.Module, last: bool, xs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        self.half, self.last, self.xs, self.targets = half, last, xs, targets

    def __call__(self) -> None:
        count, peer = len(self.xs), 0 if self.last else 1
        buffers = [torch.empty_like(x) for x in self.xs]
        receives = [dist.irecv(buffer, peer) for buffer in buffers]
        sends, outputs = [], []

        def backward(i: int) -> None:
            receives[i].wait()
            outputs[i].backward(buffers[i])

        for i in range(count):
            if self.last:
                receives[i].wait()
                leaf = buffers[i].requires_grad_()
                (F.mse_loss(self.half(leaf), self.targets[i]) / count).backward()
                sends.append(dist.isend(leaf.grad, peer))
            else:
                outputs.append(self.half(self.xs[i]))
                sends.append(dist.isend(outputs[i].detach(), peer))
                if i:
                    backward(i - 1)
        if not self.last:
            backward(count - 1)
        for send in sends:
            send.wait()


class Times(NamedTuple):
    """Seconds of one call: elapsed, and of this thread's on a processor."""

    elapsed: float
    busy: float


def timed(function: Callable[[], object], times: int) -> list[Times]:
    """What each of ``times`` calls took."""
    taken = []
    for _ in range(times):
        start, busy = time.perf_counter(), time.thread_time()
        function()
        taken.append(Times(time.perf_counter() - start, time.thread_time() - busy))
    return taken


def median(taken: list[Times]) -> Times:
    """Of each kind of time."""
    return Times(statistics.median(t.elapsed for t in taken), statistics.median(t.busy for t in taken))


def worker(args: argparse.Namespace) -> None:
    """One of the two ranks; rank 0 writes the figures."""
    torch.set_num_threads(1)
    smp.init({
        "pipeline_parallel_degree": 2,
        "microbatches": args.microbatches,
        "pipeline": args.schedule,
        "auto_partition": False,
        "default_partition": 0,
    })  # fmt: skip
    torch.manual_seed(0)
    model = smp.DistributedModel(Halves(args.width))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    x, target = torch.randn(2, args.microbatches * args.samples, args.width)

    half, last = half_model(args.width), smp.pp_rank() == 1
    xs, targets = (tuple(part.clone() for part in t.chunk(args.microbatches)) for t in (x, target))

    def with_smpar() -> None:
        train_step(model, x, target).reduce_mean()

    def without() -> None:
        plain_step(half, last, xs, targets)

    ways = {"smpar": with_smpar, "by hand": ByHand(half, last, xs, targets), "compute": without}
    seconds: dict[str, list[Times]] = {name: [] for name in ways}
    for block in range(BLOCKS + 1):
        for name, function in ways.items():
            smp.barrier()
            taken = timed(function, args.steps // BLOCKS)
            seconds[name] += taken if block else []  # the first block warms up
    medians = {name: median(values) for name, values in seconds.items()}

    timed(with_smpar, SETTLE)
    usages = [Usage.now()]
    between = max(1, args.steps // OBSERVATIONS)
    for i in range(args.steps):
        with_smpar()
        optimizer.step()
        optimizer.zero_grad()
        if i == 0 or (i + 1) % between == 0:  # the first step makes what later ones keep, such as gradients
            usages.append(Usage.now())
    before, after = usages[1], usages[-1]
    grown = [
        f"rank {smp.rank()}: {name} grew from {a} to {b} over {args.steps} steps"
        for name, a, b in (("tensors", before.tensors, after.tensors), ("threads", before.threads, after.threads))
        if b > a
    ]

    every = smp.allgather((medians, slope(usages[2:], between), grown), smp.WORLD)
    if smp.rank() == 0:
        for rank, (m, growth, _) in enumerate(every):
            times = ", ".join(f"{n} {t.elapsed * 1e6:.0f} ({t.busy * 1e6:.0f} busy)" for n, t in m.items())
            print(f"rank {rank}: us a step: {times}; {growth:+.0f} bytes a step")
        print(f"tensors {before.tensors} -> {after.tensors}, threads {before.threads} -> {after.threads} on rank 0")
        problems = [line for _, _, lines in every for line in lines]
        print("\n".join(problems), end="\n" if problems else "", flush=True)
        more = [
            tuple(a - b for a, b in zip(m["smpar"], m["by hand"], strict=True)) for m, _, _ in every
        ]  # elapsed, busy
        elapsed, overhead = (statistics.mean(kind) / args.microbatches * 1e6 for kind in zip(*more, strict=True))
        print(f"per microbatch and segment: {overhead:.0f} us of processor time, {elapsed:.0f} us of elapsed time")
        finish({"overhead_us": overhead, "growth_bytes_per_step": max(g for _, g, _ in every)}, args.json)
        Path(args.verdict).write_text("grown" if problems else "")
    smp.barrier()


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--samples", type=int, default=4, help="samples in a microbatch")
    arguments.add_argument("--width", type=int, default=32)
    arguments.add_argument("--schedule", default="1f1b")
    arguments.add_argument("--verdict", help=argparse.SUPPRESS)  # given to the workers: where rank 0 says what grew
    args = arguments.parse_args()
    if args.steps < 2 * OBSERVATIONS:
        arguments.error(f"--steps must be at least {2 * OBSERVATIONS}, to see growth; got {args.steps}")
    if args.verdict:
        worker(args)
        return 0
    return judged_on_two_ranks("overhead")


if __name__ == "__main__":
    raise SystemExit(main())
