"""A byte-level GPT that learns Python from the standard library's own source text.

    python examples/train_gpt.py --quickstart                                            # one process
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --quickstart          # a pipeline of two stages
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --pipeline-degree 2   # two such pipelines
    sbatch examples/slurm/train_gpt.sbatch                                               # several nodes

As a plan says that was made for your machines (``smpar plan --help``):

    smpar plan examples/train_gpt.py:build --cluster cluster.yaml --global-batch 16 -o plan.json
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --quickstart --plan plan.json

The model and the loop are plain PyTorch. Five lines know smpar: ``init``, ``DistributedModel``,
``DistributedOptimizer``, ``@smp.step`` and ``clip_grad_norm_``.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp

QUICKSTART = {
    "layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 16, "microbatches": 4,
    "steps": 800, "lr": 4e-3, "log_every": 50,
}  # fmt: skip


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both with pre-normalisation; ``[N, T, width]`` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Byte ids ``[N, T]`` to next-byte logits ``[N, T, 256]``."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library() -> tuple[Tensor, Tensor]:
    """The library's top-level sources as bytes, uint8 ``[n]``: training text, and every tenth file for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = set(files[9::10])
    train = bytearray().join(f.read_bytes() for f in files if f not in held_out)
    validation = bytearray().join(f.read_bytes() for f in files if f in held_out)
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def draw_batch(text: Tensor, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """``size`` random windows of the text and the same windows one byte later, each int64 ``[size, context]``.

    The seed alone decides: all ranks of a pipeline must see the same batch.
    """
    start = torch.randint(len(text) - context, (size, 1), generator=torch.Generator().manual_seed(seed))
    windows = text[start + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def generate(model: GPT, prompt: str, length: int, temperature: float = 0.7) -> str:
    """Continue ``prompt`` by ``length`` bytes, on one process and without smpar."""
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(ids[:, -model.context :])[:, -1] / temperature
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


@smp.step
def train_step(model: smp.DistributedModel, ids: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


@smp.step
def evaluate_step(model: smp.DistributedModel, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def build() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """The quickstart's model, a batch, and the loss: what ``smpar plan`` and ``smpar profile`` look at."""
    model = GPT(*(QUICKSTART[name] for name in ("layers", "width", "heads", "context")))
    ids = torch.zeros(QUICKSTART["batch"], QUICKSTART["context"], dtype=torch.int64)
    return model, (ids, ids), lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quickstart", action="store_true", help="sizes for about two minutes on two cores")
    parser.add_argument(
        "--pipeline-degree", type=int, default=int(os.environ.get("WORLD_SIZE", 1)), help="ranks of a pipeline"
    )
    parser.add_argument("--plan", type=Path, help="a plan of `smpar plan`, instead of degree, schedule, microbatches")
    parser.add_argument("--schedule", default="interleaved", help="simple, 1f1b, interleaved_1f1b, zb, zbv")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="samples per step and replica")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--svg", type=Path, help="write the timetable of a step as a drawing")
    parser.add_argument("--save", type=Path, help="write the trained model's state dict")
    if parser.parse_known_args()[0].quickstart:
        parser.set_defaults(**QUICKSTART)  # as defaults, so that other arguments still win
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    smp.init(args.plan or {
        "pipeline_parallel_degree": args.pipeline_degree,
        "microbatches": args.microbatches,
        "pipeline": args.schedule,
        "ddp": True,
    })  # fmt: skip
    first = smp.rank() == 0
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    text, held_out = standard_library()
    torch.manual_seed(args.seed)
    sizes = {"layers": args.layers, "width": args.width, "heads": args.heads, "context": args.context}
    model = smp.DistributedModel(GPT(**sizes))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95)))
    warmup = max(1, args.steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # rise in a straight line, fall as a cosine to a tenth
        optimizer, lambda i: min((i + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * i / args.steps))
    )

    def batch_of(source: Tensor, index: int) -> tuple[Tensor, Tensor]:
        seed = (args.seed + index) * smp.dp_size() + smp.dp_rank()  # replicas differ, a pipeline's ranks do not
        ids, targets = draw_batch(source, args.batch, args.context, seed)
        return ids.to(device), targets.to(device)

    if first:
        count = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"a GPT of {count:.1f} M parameters reads {len(text) / 1e6:.1f} MB of Python on {smp.size()} processes")
    since, samples, recent = time.perf_counter(), 0, []
    for step in range(args.steps):
        loss = train_step(model, *batch_of(text, step)).reduce_mean()
        smp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        samples += args.batch * smp.dp_size()
        recent.append(loss)
        if step == 0:  # the model is partitioned by its first step
            smp.report()
            if first:
                print(smp.timetable(), flush=True)
            if first and args.svg:
                args.svg.write_text(smp.timetable(svg=True))
        if first and (step % args.log_every == 0 or step == args.steps - 1):
            elapsed = time.perf_counter() - since
            mean = torch.stack(recent).mean().item()
            print(f"step {step:5d}   loss {mean:.3f}   {samples / elapsed:7.1f} samples/s", flush=True)
            since, samples, recent = time.perf_counter(), 0, []

    model.eval()
    with torch.no_grad():
        losses = [evaluate_step(model, *batch_of(held_out, i)).reduce_mean().item() for i in range(10)]
    mean = sum(smp.allgather(sum(losses) / len(losses), smp.DP_GROUP)) / smp.dp_size()
    state = model.state_dict()  # the whole model; every rank takes part
    if first:
        print(f"validation loss {mean:.3f} nats per byte, {mean / math.log(2):.2f} bits, on files never trained on")
        if args.save:
            torch.save(state, args.save)
        plain = GPT(**sizes)
        plain.load_state_dict(state)
        print("a sample:\n" + generate(plain.eval(), "class Error(Exception):\n    def ", 240), flush=True)
    smp.barrier()


if __name__ == "__main__":
    main()
