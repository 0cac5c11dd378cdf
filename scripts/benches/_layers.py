"""A stack of transformer layers, and the same divided between two ranks: by torch's DTensor, and by smpar in two ways.

::

    dtensor    torch.distributed.tensor.parallel: ColwiseParallel and RowwiseParallel, in memory mode SequenceParallel
    divided    the same modules, made twins by a plan of names: a user's own model
    layers     smpar.nn.DistributedTransformer: smpar's own layers

In speed mode hidden states are whole everywhere; in memory mode they are slices of the sequence between the halves of
layers. All take and give whole ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import smpar as smp
from smpar.nn.family import Family, divide
from smpar.nn.group import TensorGroup
from smpar.nn.module import DistributedModule
from smpar.slices import slicing_of

FAMILY = Family(
    {"layers.*.attention.query": "colwise", "layers.*.attention.key": "colwise", "layers.*.attention.value": "colwise",
     "layers.*.attention.dense": "rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
)  # fmt: skip
OURS = (  # names in the stack below, and those of smpar's own layers
    (r"^layers\.(\d+)\.attention\.", r"seq_layers.\1.attention."),
    (r"^layers\.(\d+)\.norm1\.", r"seq_layers.\1.attention.pre_layernorm."),
    (r"^layers\.(\d+)\.norm2\.", r"seq_layers.\1.output.pre_layernorm."),
    (r"^layers\.(\d+)\.mlp\.up\.", r"seq_layers.\1.output.dense1."),
    (r"^layers\.(\d+)\.mlp\.down\.", r"seq_layers.\1.output.dense2."),
)


@dataclass(frozen=True)
class Size:
    """Of a stack and its batch, [samples, length, width]."""

    width: int
    heads: int
    length: int
    samples: int
    depth: int

    def batch(self) -> tuple[Tensor, Tensor]:
        """An input, and the gradient of what comes of it: equal on all ranks."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.samples, self.length, self.width)
        x, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        return x.requires_grad_(), gradient

    def stack(self) -> Stack:
        """The undivided layers; the same weights each time."""
        torch.manual_seed(0)
        return Stack(Layer(self.width, self.heads) for _ in range(self.depth))


class Attention(nn.Module):
    """Causal attention with queries, keys and values of separate linears."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            linear(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Layer(nn.Module):
    """A transformer layer with the norm before each half, ``[N, length, width]`` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Stack(nn.Sequential):
    """Layers, under the name that the plan has for them."""

    def __init__(self, layers: object) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(*layers)  # type: ignore[misc]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


def dtensor(size: Size, group: TensorGroup) -> nn.Module:
    """By torch."""
    assert group.group is not None
    mesh, stack = DeviceMesh.from_group(group.group, "cpu"), size.stack()
    columns: dict[str, ParallelStyle] = {
        name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "mlp.up")
    }
    between = Shard(1) if group.memory else Replicate()  # of hidden states
    others: dict[str, ParallelStyle] = {}
    for row in ("attention.dense", "mlp.down"):
        others[row] = RowwiseParallel(output_layouts=between)
        # once for all columns of a half: each would gather its input, or sum its gradient, for itself
        others[row.partition(".")[0]] = PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),)
        )
    if group.memory:
        others |= {norm: SequenceParallel() for norm in ("norm1", "norm2")}
    for layer in stack.layers:
        parallelize_module(layer, mesh, columns | others)
    if group.memory:
        begin = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        end = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
        parallelize_module(stack.layers, mesh, begin)
        parallelize_module(stack.layers, mesh, end)
    return stack


def divided(size: Size, group: TensorGroup) -> nn.Module:
    """By smpar, as it divides users' modules."""
    stack = size.stack()
    divide(stack, FAMILY, group)
    return stack


def layers(size: Size, group: TensorGroup) -> nn.Module:
    """Of smpar's own layers, with the weights of the stack."""
    made = smp.nn.DistributedTransformer(
        num_layers=size.depth, num_attention_heads=size.heads, attention_head_size=size.width // size.heads,
        hidden_size=size.width, intermediate_size=4 * size.width, causal_mask_size=size.length, pre_layernorm=True,
        post_layernorm=False, attention_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    own = dict(made.named_parameters())
    with torch.no_grad():
        for name, whole in size.stack().named_parameters():
            for pattern, there in OURS:
                name = re.sub(pattern, there, name)
            slicing = slicing_of(own[name])
            own[name].copy_(whole if slicing is None else slicing.take(whole, group.rank))
    for module in made.modules():  # another group's than smpar's own, for collectives that take no time
        if isinstance(module, DistributedModule):
            module.tensor_group = dataclasses.replace(module.tensor_group, group=group.group)
    return made


WAYS: dict[str, Callable[[Size, TensorGroup], nn.Module]] = {"dtensor": dtensor, "divided": divided, "layers": layers}


@dataclass(frozen=True)
class Pass:
    """Forward and backward of a model."""

    model: nn.Module
    x: Tensor
    gradient: Tensor

    def __call__(self) -> Tensor:
        y: Tensor = self.model(self.x)
        y.backward(self.gradient)
        return y

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = None
        for p in self.model.parameters():
            p.grad = None
