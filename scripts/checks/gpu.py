"""What one CUDA device can show of smpar: pipelines of virtual stages, all on that device, in one process.

    parity      loss and gradients of every schedule equal the bare model's, which runs the same microbatches
    memory      peak of a step above what was allocated before it, beside the bare model's
    host        a step of known shapes asks for nothing that makes the host wait for the device, and returns while the
                device has not begun
    streams     a step runs on the stream that is current, and on no other
    overhead    time of a step over the bare model's: paired, medians and quartiles

``--device cpu`` runs the same on a CPU, where there are no streams and no peaks to see.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp

NO_DEVICE = 2  # exit status
DEGREE_1_MOST = 1.05  # time of a step of degree 1 over the bare model's, on a GPU
SLEEP = 1.0  # s that the device is kept busy, to see whether the host waits for it

BEYOND = """\
Not checked here, for want of a second device:
  NCCL between devices: its channels (one communicator for each direction of each pair of ranks), reductions over
  replicas, parameters handed from rank to rank. tests/nccl_rules runs that code on CPUs, under a backend that keeps
  NCCL's rules of order; bandwidth, and how transfers overlap with kernels, show on several GPUs only."""


@dataclass(frozen=True)
class Sizes:
    """Of a GPT and its batch."""

    width: int
    layers: int
    length: int
    samples: int
    microbatches: int
    vocabulary: int = 512


SIZES = {"cuda": Sizes(512, 8, 256, 32, 8), "cpu": Sizes(32, 4, 8, 8, 4, 64)}


@dataclass(frozen=True)
class Precision:
    """How a step computes, and how far it may be from the bare model (of the largest gradient's norm)."""

    name: str
    weights: torch.dtype
    autocast: bool
    most: float


PRECISIONS = (
    Precision("float32", torch.float32, False, 1e-4),
    Precision("bf16 autocast", torch.float32, True, 3e-2),
    Precision("bf16 weights", torch.bfloat16, False, 3e-2),
)

PIPELINES: tuple[dict[str, Any], ...] = (
    {},
    *({"pipeline": name, "virtual_stages": 2} for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb", "zbv")),
    *({"pipeline": name, "virtual_stages": 4} for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb")),
)


@dataclass(frozen=True)
class Row:
    """One line of the table. ``verdict`` "-": nothing to judge, or not on this device."""

    check: str
    what: str
    figure: str
    verdict: Literal["ok", "FAILED", "-"]


# -- the model and its two ways of training ----------------------------------------------------------


class Block(nn.Module):
    """Causal attention of heads of 32 (or less), then a multilayer perceptron; ``[N, length, width]`` in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm_2(h))


class Gpt(nn.Module):
    """Token ids ``[N, length]`` to logits ``[N, length, vocabulary]``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@dataclass
class Pair:
    """The bare model and smpar's, with equal parameters and the same batch."""

    bare: nn.Module
    model: smp.DistributedModel
    ids: Tensor
    sizes: Sizes
    precision: Precision

    def bare_step(self) -> Tensor:
        """Forward and backward, microbatch after microbatch; the mean loss, still on the device."""
        parts = self.ids.chunk(self.sizes.microbatches)
        losses = []
        for part in parts:
            with self._computing():
                loss = loss_of(self.bare, part)
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def step(self) -> Any:
        """The same under smpar; what the step returns."""
        with self._computing():
            return train_step(self.model, self.ids)

    def forget(self) -> None:
        """Gradients of both."""
        for p in (*self.bare.parameters(), *self.model.parameters()):
            p.grad = None

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.precision.autocast)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean loss of foretelling each next token, in float32."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@smp.step
def train_step(model: Any, ids: Tensor) -> Tensor:
    loss = loss_of(model, ids)
    model.backward(loss)
    return loss


@contextlib.contextmanager
def training(device: torch.device, sizes: Sizes, precision: Precision, options: dict[str, Any]) -> Iterator[Pair]:
    """smpar, started with these options, and the two models."""
    smp.init({"microbatches": sizes.microbatches, **options})
    try:
        torch.manual_seed(0)
        bare = Gpt(sizes).to(device, precision.weights)
        model = smp.DistributedModel(copy.deepcopy(bare))
        ids = torch.randint(sizes.vocabulary, (sizes.samples, sizes.length), device=device)
        yield Pair(bare, model, ids, sizes, precision)
    finally:
        smp.shutdown()


# -- checks ------------------------------------------------------------------------------------------


def name_of(options: dict[str, Any]) -> str:
    return f"{options['pipeline']}, {options['virtual_stages']} stages" if options else "degree 1, no pipeline"


def distance(pair: Pair) -> float:
    """The largest distance of loss or a gradient from the bare model's, over two steps; infinite for NaN or absence."""
    found: list[float] = []
    for _ in range(2):  # the first plans, the second follows the plan
        pair.forget()
        right, got = float(pair.bare_step()), float(pair.step().reduce_mean())
        found.append(abs(got - right) / abs(right))
        theirs = dict(pair.model.named_parameters())
        largest = max(float(p.grad.float().norm()) for p in pair.bare.parameters() if p.grad is not None)
        for name, p in pair.bare.named_parameters():
            mine, other = p.grad, theirs[name].grad
            if mine is None or other is None:
                return math.inf
            found.append(float((mine.float() - other.float()).norm()) / largest)
    return max(found) if all(map(math.isfinite, found)) else math.inf


def peak(step: Callable[[], object], pair: Pair) -> int:
    """Bytes that one step takes above what was allocated before it, without gradients."""
    pair.forget()
    step()
    pair.forget()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def waits_of_host(step: Callable[[], object]) -> str:
    """The operation of a step that makes the host wait for the device; empty if there is none."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).split("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def check_pipelines(
    device: torch.device, sizes: Sizes, precisions: Sequence[Precision], shown: Callable[[Row], None]
) -> dict[str, Any]:
    """Parity, peaks and host waits of every precision and pipeline."""
    cuda = device.type == "cuda"
    parity: dict[str, float | None] = {}  # None: not a number
    peaks: dict[str, float] = {}
    waits: dict[str, str] = {}
    for precision in precisions:
        for options in PIPELINES:
            what = f"{precision.name}, {name_of(options)}"
            with training(device, sizes, precision, options) as pair:
                far = distance(pair)
                parity[what] = far if math.isfinite(far) else None
                shown(Row("parity", what, f"{far:.1e}", "ok" if far <= precision.most else "FAILED"))
                if not cuda:
                    continue
                if not options:
                    peaks[f"{precision.name}, bare"] = bare = peak(pair.bare_step, pair) / 2**20
                    shown(Row("memory", f"{precision.name}, bare model", f"{bare:.1f} MB", "-"))
                peaks[what] = held = peak(pair.step, pair) / 2**20
                shown(Row("memory", what, f"{held:.1f} MB", "-"))
                pair.forget()
                pair.step()
                pair.forget()
                waits[what] = found = waits_of_host(pair.step)
                shown(Row("host", what, found or "never waits", "FAILED" if found else "ok"))
    if cuda:
        shown(_memory_in_order(peaks))
    return {"parity": parity, "peak_mb": peaks, "host_waits": {k: v for k, v in waits.items() if v}}


def _memory_in_order(peaks: dict[str, float]) -> Row:
    """1F1B keeps fewer microbatches than GPipe; more memory would mean that something is held too long."""
    first, last = ({k: v for k, v in peaks.items() if f", {name}, " in k} for name in ("1f1b", "gpipe"))
    pairs = [(v, last[k.replace(", 1f1b, ", ", gpipe, ")]) for k, v in first.items()]
    most = max(a / b for a, b in pairs)
    return Row("memory", "1f1b over gpipe, the worst", f"{most:.2f}", "ok" if most <= 1.0 else "FAILED")


def check_streams(device: torch.device, sizes: Sizes, shown: Callable[[Row], None]) -> None:
    """While the device sleeps: does the host go on, and does a step elsewhere wait for the default stream?"""
    few = replace(sizes, samples=4, microbatches=2, layers=4)  # the device's queue holds some 1,000 kernels
    options = {"pipeline": "1f1b", "virtual_stages": 2}
    with training(device, few, PRECISIONS[0], options) as pair:
        side = torch.cuda.Stream()
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    pair.forget()
                    pair.step()
        pair.forget()
        torch.cuda.synchronize()
        cycles = int(SLEEP * cycles_per_second())

        done = torch.cuda.Event()
        torch.cuda._sleep(cycles)
        start = time.perf_counter()
        pair.step()
        took = time.perf_counter() - start
        done.record()
        ahead = took < SLEEP / 2 and not done.query()
        torch.cuda.synchronize()
        shown(Row("host", "returns before the device begins", f"{took * 1e3:.1f} ms", "ok" if ahead else "FAILED"))

        pair.forget()
        slept, done = torch.cuda.Event(), torch.cuda.Event()
        torch.cuda._sleep(cycles)
        slept.record()
        with torch.cuda.stream(side):
            result = pair.step()
            done.record()
        done.synchronize()
        apart = not slept.query()
        torch.cuda.synchronize()
        shown(Row("streams", "a step on another stream runs there alone", "", "ok" if apart else "FAILED"))
        right = float(pair.bare_step())
        far = abs(float(result.reduce_mean()) - right) / right
        shown(Row("streams", "and its loss is right", f"{far:.1e}", "ok" if far <= PRECISIONS[0].most else "FAILED"))


def cycles_per_second() -> float:
    """Of the device's clock, as `torch.cuda._sleep` counts, measured."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / (start.elapsed_time(end) / 1e3)


def check_group(device: torch.device, shown: Callable[[Row], None]) -> None:
    """A reduction by the world's group, of one rank: on CUDA NCCL loads and runs."""
    smp.init({})
    try:
        tensor = torch.arange(5.0, device=device)
        torch.distributed.all_reduce(tensor, group=smp.get_world_process_group())
        same = torch.equal(tensor.cpu(), torch.arange(5.0))
    finally:
        smp.shutdown()
    what = "NCCL" if device.type == "cuda" else "gloo"
    shown(Row("groups", f"{what} reduces over a world of one", "", "ok" if same else "FAILED"))


def check_overhead(device: torch.device, sizes: Sizes, pairs: int, shown: Callable[[Row], None]) -> dict[str, float]:
    """Time of a step over the bare model's, alternating."""

    def seconds(step: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    ratios: dict[str, float] = {}
    for options in ({}, {"pipeline": "1f1b", "virtual_stages": 2}):
        with training(device, sizes, PRECISIONS[0], options) as pair:
            taken = []
            for number in range(pairs + 3):
                pair.forget()
                both = seconds(pair.bare_step), seconds(pair.step)
                taken += [both[1] / both[0]] if number >= 3 else []
        low, ratio, high = statistics.quantiles(taken, n=4)
        ratios[name_of(options)] = ratio
        judged = device.type == "cuda" and not options
        verdict: Literal["ok", "FAILED", "-"] = "-" if not judged else "ok" if ratio <= DEGREE_1_MOST else "FAILED"
        shown(Row("overhead", name_of(options), f"{ratio:.3f} ({low:.3f} to {high:.3f}), {pairs} pairs", verdict))
    return ratios


# -- the whole ---------------------------------------------------------------------------------------


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = [precision.name for precision in PRECISIONS]
    parser.add_argument("--precision", choices=names, action="append", help="only this one; may be given several times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--pairs", type=int, default=21, help="of steps, for the overhead; at least 2")
    args = parser.parse_args(given)
    if args.pairs < 2:
        parser.error(f"--pairs must be at least 2; got {args.pairs}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here, so nothing was checked (--device cpu runs it on a CPU)")
        return NO_DEVICE
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"gpu_check on {name}, torch {torch.__version__}\n")
    print(f"{'check':<10}{'what':<48}{'figure':<40}verdict")
    failed: list[str] = []

    def shown(row: Row) -> None:
        print(f"{row.check:<10}{row.what:<48}{row.figure:<40}{row.verdict}", flush=True)
        if row.verdict == "FAILED":
            failed.append(f"{row.check}: {row.what}")

    sizes = SIZES[args.device]
    chosen = [precision for precision in PRECISIONS if precision.name in (args.precision or names)]
    figures = check_pipelines(device, sizes, chosen, shown)
    check_group(device, shown)
    if device.type == "cuda":
        check_streams(device, sizes, shown)
    else:
        for check in ("memory", "host", "streams"):
            shown(Row(check, "not on a CPU", "", "-"))
    figures["overhead"] = check_overhead(device, sizes, args.pairs, shown)
    print(f"\n{BEYOND}\n")
    print(f"{len(failed)} failed" + "".join(f"\n  {what}" for what in failed) if failed else "all ok")
    line = json.dumps({"ok": not failed, "device": name, "failed": failed, **figures})
    if args.json:
        args.json.write_text(line + "\n")
    print(line, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
