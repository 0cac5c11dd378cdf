"""smpar's replicas against torch's DistributedDataParallel with gradient accumulation: the same GPT, step by step.

Two single-threaded processes, each with the whole model and its own batch, cut into microbatches. Both first give the
same gradients. Then steps of smpar, of DistributedDataParallel (with gradients of their own, as is its default, and
with gradients that are views of its buckets) and of the computations alone, without any reduction, alternate, started
by both ranks at one moment; a step lasts until the slower rank has ended. DistributedDataParallel accumulates under
``no_sync`` and reduces in its last microbatch; gradients are dropped before each step, alike for all.

    ratio       DistributedDataParallel's seconds / smpar's, the median over pairs of neighbouring steps; ``views``: the
                same with bucket views
    exposed_s   seconds that smpar still reduces after a step's last backward, the median, at the first number of
                microbatches given

Intervals hold 95 %, by resampling pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import smpar as smp
from benches._chains import Chain, gpt, loss_of, token_batch
from benches._common import finish, on_two_ranks, parser
from benches._paired import Ratio, Spread, alternate, slowest
from smpar.runtime.core import runtime

WARM = 3  # rounds that are not counted
ROUNDS = 6  # of a block: between blocks garbage is collected
CLOSE = 1e-5  # relative distance of gradients
REDUCE = "reduce gradients"


def say(text: str) -> None:
    """Rank 0 says it."""
    if dist.get_rank() == 0:
        print(text, flush=True)


@smp.step
def train_step(model: Any, tokens: Tensor, target: Tensor) -> Tensor:
    loss = loss_of(model(tokens), target)
    model.backward(loss)
    return loss


def accumulate(model: nn.Module, tokens: Tensor, target: Tensor, microbatches: int) -> None:
    """A step of a plain or DistributedDataParallel model."""
    parts = zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True)
    for i, (x, y) in enumerate(parts):
        last = i + 1 == microbatches or not isinstance(model, DistributedDataParallel)
        with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
            (loss_of(model(x), y) / microbatches).backward()


def drop_gradients(models: list[nn.Module]) -> None:
    for model in models:
        for p in model.parameters():
            p.grad = None


def check(ours: nn.Module, theirs: nn.Module) -> None:
    """Gradients agree, as far as sums in another order do."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None, name
        distance = float((mine.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-12))
        assert distance < CLOSE, f"{name}: gradients differ by {distance:.2g}"


def exposed(step: Callable[[], object], times: int, before: Callable[[], object]) -> list[float]:
    """Seconds of this rank in reductions after the last backward, of so many steps."""
    spans = runtime().spans
    spans.tracing = True
    spans.take()
    alternate({"smpar": step}, times, before)
    spans.tracing = False
    return [(span.end - span.start) / 1e9 for span in spans.take() if span.name == REDUCE]


def measure(args: argparse.Namespace, microbatches: int) -> tuple[dict[str, float], float]:
    """One number of microbatches: the ratios, and the exposed part."""
    smp.init({"microbatches": microbatches})
    tokens, target = token_batch(args.samples, args.length, args.vocabulary, seed=dist.get_rank())

    def seeded() -> Chain:
        torch.manual_seed(0)
        return gpt(args.blocks, args.width, args.heads, args.length, args.vocabulary)

    ours, alone = smp.DistributedModel(seeded(), bucket_cap_mb=args.bucket), seeded()
    theirs = {
        "ddp": DistributedDataParallel(seeded(), bucket_cap_mb=args.bucket),
        "views": DistributedDataParallel(seeded(), bucket_cap_mb=args.bucket, gradient_as_bucket_view=True),
    }
    ways: dict[str, Callable[[], object]] = {"smpar": lambda: train_step(ours, tokens, target)}
    for name, model in (*theirs.items(), ("compute", alone)):
        ways[name] = lambda model=model: accumulate(model, tokens, target, microbatches)  # type: ignore[misc]
    models = [ours, alone, *theirs.values()]
    for name, model in theirs.items():
        drop_gradients(models)
        ways["smpar"]()
        ways[name]()
        check(ours, model.module)

    taken: dict[str, list[float]] = {name: [] for name in ways}
    alternate(ways, WARM, lambda: drop_gradients(models))
    done = 0
    while done < args.pairs:
        for name, seconds in alternate(
            ways, min(ROUNDS, args.pairs - done), lambda: drop_gradients(models), done
        ).items():
            taken[name] += slowest(seconds)
        done += ROUNDS
    rest = slowest(exposed(ways["smpar"], min(args.pairs, 10), lambda: drop_gradients(models)))
    ratios = {name: Ratio.of(taken[name], taken["smpar"]) for name in theirs}
    size = sum(p.numel() * p.element_size() for p in alone.parameters()) / 2**20
    say(f"{microbatches} microbatches, {size:.0f} MiB of gradients")
    for name, seconds in taken.items():
        say(f"  {name:<8} {Spread.of(seconds)}" + (f"  {ratios[name]} / smpar" if name in ratios else ""))
    say(f"  smpar reduces {Spread.of(rest)} after the last backward")
    smp.shutdown()
    return {f"{name}_m{microbatches}": ratio.value for name, ratio in ratios.items()}, statistics.median(rest)


def worker(args: argparse.Namespace) -> None:
    """One of the two ranks; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ratio: dict[str, float] = {}
    rest: list[float] = []
    for microbatches in args.microbatches:
        more, seconds = measure(args, microbatches)
        ratio |= more
        rest.append(seconds)
    if dist.get_rank() == 0:
        finish({"ratio": ratio, "exposed_s": rest[0]}, args.json)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--microbatches", type=lambda text: [int(part) for part in text.split(",")], default=[4, 1, 8]
    )
    arguments.add_argument("--pairs", type=int, default=24, help="pairs of steps for a ratio, at least 15 to mean much")
    arguments.add_argument("--blocks", type=int, default=8, help="transformer blocks of the GPT")
    arguments.add_argument("--width", type=int, default=192)
    arguments.add_argument("--heads", type=int, default=6)
    arguments.add_argument("--length", type=int, default=64)
    arguments.add_argument("--vocabulary", type=int, default=256)
    arguments.add_argument("--samples", type=int, default=8, help="of each replica's batch")
    arguments.add_argument("--bucket", type=float, default=25.0, help="MiB of a bucket")
    arguments.add_argument("--is-worker", action="store_true", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if any(count < 1 or args.samples % count for count in args.microbatches):
        arguments.error(f"--samples must be divisible by the numbers of microbatches; got {args.samples}")
    if args.is_worker:
        worker(args)
        return 0
    on_two_ranks("replicas")


if __name__ == "__main__":
    raise SystemExit(main())
