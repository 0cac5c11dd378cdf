"""A family of models that smpar has never seen, made tensor-parallel by a table of names.

    torchrun --standalone --nproc-per-node 2 examples/new_family.py
    torchrun --standalone --nproc-per-node 4 examples/new_family.py --pipeline-degree 2

The model is plain PyTorch and knows nothing of smpar. ``ROOK`` says how its modules are divided: ``colwise`` linears by
output features (``*2``: two blocks side by side, each divided), ``rowwise`` ones by input features, whose results are
summed over the ranks. The rest follows from that. It learns rows of numbers, each of which follows from the last one.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp


class RookAttention(nn.Module):
    """Causal attention, ``[N, S, width]`` in and out; keys and values come from one linear."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.query, self.key_value, self.out = (nn.Linear(width, n * width) for n in (1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for t in (self.query(x), *self.key_value(x).chunk(2, -1))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class RookMLP(nn.Module):
    """A gated MLP, ``[N, S, width]`` in and out; gate and value come from one linear."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_value, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_value(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class RookLayer(nn.Module):
    """One layer with pre-normalisation."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = RookAttention(width, heads), RookMLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Rook(nn.Module):
    """Ids ``[N, S]`` to hidden states ``[N, S, width]``."""

    def __init__(self, vocabulary: int, width: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(RookLayer(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class RookForPrediction(nn.Module):
    """Ids ``[N, S]`` to logits ``[N, S, vocabulary]``, by the embedding's own weight."""

    def __init__(self, vocabulary: int, width: int = 48, heads: int = 3, inner: int = 80, layers: int = 2) -> None:
        super().__init__()
        self.model = Rook(vocabulary, width, heads, inner, layers)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.model.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.model(ids))


# All that smpar needs to be told:
ROOK = smp.nn.Family(
    {
        "embed": "embedding_rowwise",
        "layers.*.attention.query": "colwise",
        "layers.*.attention.key_value": "colwise*2",
        "layers.*.attention.out": "rowwise",
        "layers.*.mlp.gate_value": "colwise*2",
        "layers.*.mlp.down": "rowwise",
    },
    counts=("heads",),  # what the attention's forward counts its heads by
)
smp.nn.register_family(Rook, ROOK)


def batch(samples: int, length: int, vocabulary: int, draw: torch.Generator) -> Tensor:
    """Ids ``[samples, length]``: after n comes 3 n + 1, modulo the vocabulary."""
    ids = [torch.randint(vocabulary, (samples,), generator=draw)]
    for _ in range(length - 1):
        ids.append((3 * ids[-1] + 1) % vocabulary)
    return torch.stack(ids, 1)


@smp.step
def train_step(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of each microbatch."""
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    model.backward(loss)
    return loss


def main() -> None:
    """Trains for some steps and prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-degree", type=int, default=2)
    parser.add_argument("--pipeline-degree", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--vocabulary", type=int, default=61)
    args = parser.parse_args()
    smp.init(
        {
            "tensor_parallel_degree": args.tensor_degree,
            "pipeline_parallel_degree": args.pipeline_degree,
            "microbatches": 2,
        }
    )
    with smp.tensor_parallelism():
        module = RookForPrediction(args.vocabulary)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    draw = torch.Generator().manual_seed(smp.dp_rank())  # each rank brings samples of its own
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = train_step(model, batch(8, 16, args.vocabulary, draw)).reduce_mean()
        optimizer.step()
        if smp.rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:3d}  loss {float(loss):.4f}", flush=True)
    if smp.rank() == 0:
        held, names = sum(p.numel() for p in model.local_parameters()), list(model.distributed_modules())
        print(f"rank 0 holds {held} parameters; {len(names)} modules are divided, e.g. {type(names[0]).__name__}")
    smp.barrier()


if __name__ == "__main__":
    main()
