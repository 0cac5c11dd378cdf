"""Thousands of steps of changing sequence lengths: nothing may grow, and the last steps take what the first took.

A small GPT on two processes learns random tokens; each step's length is drawn anew. Two parts, each of ``--steps``
steps: with ``--few`` lengths, whose programs are all kept, and with ``--many``, more than the 128 that are, so that
steps are planned over and over and old plans go.

``growth_bytes_per_step`` is the slope of resident memory over the later half of a part, the worse rank's and the worse
part's, and ``slowdown`` the median step of the last tenth over that of the first tenth after the settling steps, the
worse part's. More tensors or threads at the end than after the settling steps make the exit status 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp
from benches._common import Usage, finish, judged_on_two_ranks, parser, slope

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 61, 16, 2, 4, 512
OBSERVATIONS = 20


class Block(nn.Module):
    """A transformer layer, ``[N, length, WIDTH]`` in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (t.view(n, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Tokens ``[N, length]`` in, logits ``[N, length, VOCABULARY]`` out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.head.weight)


@smp.step
def train_step(model: smp.DistributedModel, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    model.backward(loss)
    return loss


class Part(NamedTuple):
    """What the steps of a part showed on one rank."""

    growth: float
    slowdown: float
    grown: list[str]
    told: str


def soak(model: smp.DistributedModel, optimizer: smp.DistributedOptimizer, lengths: int, steps: int) -> Part:
    """Train ``steps`` steps of so many lengths, after as many as meet each length twice or fill what is kept."""
    draw = random.Random(lengths)
    generator = torch.Generator().manual_seed(lengths)

    def step(length: int) -> float:
        ids = torch.randint(VOCABULARY, (4, length), generator=generator)
        start = time.perf_counter()
        optimizer.zero_grad()
        train_step(model, ids).reduce_mean()
        optimizer.step()
        return time.perf_counter() - start

    known = [2 + i for i in range(lengths)]
    for length in known * 2:
        step(length)
    between = max(1, steps // OBSERVATIONS)
    usages, seconds = [Usage.now()], []
    for i in range(steps):
        seconds.append(step(draw.choice(known)))
        if (i + 1) % between == 0:
            usages.append(Usage.now())
    before, after = usages[0], usages[-1]
    grown = [
        f"rank {smp.rank()}, {lengths} lengths: {name} grew from {a} to {b} over {steps} steps"
        for name, a, b in (("tensors", before.tensors, after.tensors), ("threads", before.threads, after.threads))
        if b > a + a // 50  # what is kept of a length differs a little from length to length
    ]
    tenth = max(1, steps // 10)
    first, last = (statistics.median(part) for part in (seconds[:tenth], seconds[-tenth:]))
    growth = slope(usages[len(usages) // 2 :], between)
    told = (
        f"rank {smp.rank()}, {lengths} lengths: {first * 1e3:.2f} ms a step at first, {last * 1e3:.2f} ms at last; "
        f"tensors {before.tensors} -> {after.tensors}, threads {before.threads} -> {after.threads}, "
        f"resident {before.resident / 2**20:.1f} -> {after.resident / 2**20:.1f} MiB, {growth:+.0f} bytes a step"
    )
    return Part(growth, last / first, grown, told)


def worker(args: argparse.Namespace) -> None:
    """One of the two ranks; rank 0 writes the figures."""
    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": args.schedule})
    torch.manual_seed(0)
    model = smp.DistributedModel(Gpt())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    parts = [soak(model, optimizer, lengths, args.steps) for lengths in (args.few, args.many) if lengths]
    every: list[list[Part]] = smp.allgather(parts, smp.WORLD)
    if smp.rank() == 0:
        flat = [part for rank in every for part in rank]
        problems = [line for part in flat for line in part.grown]
        print("\n".join([*(part.told for part in flat), *problems]), flush=True)
        finish({
            "growth_bytes_per_step": max(part.growth for part in flat),
            "slowdown": max(part.slowdown for part in flat),
        }, args.json)  # fmt: skip
        Path(args.verdict).write_text("grown" if problems else "")
    smp.barrier()


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=5000, help="of each part")
    arguments.add_argument("--few", type=int, default=20, help="lengths of the first part; 0 leaves it out")
    arguments.add_argument("--many", type=int, default=160, help="lengths of the second part; 0 leaves it out")
    arguments.add_argument("--schedule", default="1f1b")
    arguments.add_argument("--verdict", help=argparse.SUPPRESS)  # given to the workers: where rank 0 says what grew
    args = arguments.parse_args()
    if args.steps < 2 * OBSERVATIONS or not 1 <= max(args.few, args.many) <= LONGEST - 2:
        arguments.error(f"at least {2 * OBSERVATIONS} steps, to see growth, and 1 to {LONGEST - 2} lengths")
    if args.verdict:
        worker(args)
        return 0
    return judged_on_two_ranks("soak")


if __name__ == "__main__":
    raise SystemExit(main())
