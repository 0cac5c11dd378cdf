"""Each rank of a tensor-parallel group holds its share: of parameters, of optimizer state, of activations."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("transformers")

from tests.harness import Pool

RANKS = [2, 4]
WHOLE = {  # what no rank has a slice of: norms, positions, and biases of sums over the group
    "gpt2": re.compile(r"ln_|wpe|c_proj\.bias"),
    "llama": re.compile(r"norm"),
}


@dataclass(frozen=True)
class Size:
    heads: int
    head: int
    length: int
    samples: int
    layers: int

    @classmethod
    def drawn(cls, seed: int, layers: int) -> Size:
        """Widths that four ranks divide evenly."""
        draw = random.Random(seed)
        return cls(4 * draw.randint(1, 2), 8 * draw.randint(2, 3), 8 * draw.randint(4, 8), draw.randint(2, 4), layers)


def gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=size.heads * size.head, n_layer=size.layers, n_head=size.heads,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = size.heads * size.head
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[Size], nn.Module]] = {"gpt2": gpt2, "llama": llama}


# -- parameters and optimizer state -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Bytes of parameters, and of the optimizer's state."""

    parameters: int
    state: int


def train(name: str, ranks: int, seed: int) -> Held:
    """A step of AdamW."""
    import smpar as smp

    smp.init({"tensor_parallel_degree": ranks})
    model = MODELS[name](Size.drawn(seed, 2))
    smp.set_tensor_parallelism(model)
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters()))
    ids = torch.randint(0, 512, (2, 8))

    @smp.step
    def step(model: Any, ids: Tensor) -> None:
        model.backward(model(input_ids=ids, labels=ids).loss)

    step(wrapped, ids)
    optimizer.step()
    state = optimizer.local_state_dict()["state"]
    return Held(_bytes(wrapped.local_parameters()), _bytes(v for entry in state.values() for v in entry.values()))


def _bytes(values: Iterable[object]) -> int:
    """Of the memory behind tensors, each counted once."""
    storages = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values if isinstance(v, Tensor)}
    return sum(storages.values())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_its_share_of_parameters_and_optimizer_state(pool: Pool, seed: int, name: str, ranks: int) -> None:
    model = MODELS[name](Size.drawn(seed, 2))
    whole = sum(p.nbytes for p in model.parameters())
    replicated = sum(p.nbytes for n, p in model.named_parameters() if WHOLE[name].search(n))
    share = (whole - replicated) / ranks + replicated
    for held in pool.run(ranks, train, name, ranks, seed):
        assert held.parameters == pytest.approx(share, rel=0.03)
        assert held.state == pytest.approx(2 * share, rel=0.03)  # two moments


# -- activations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alive:
    """Bytes of tensors made by a forward and still there at its end; and the most at once until its backward's end."""

    kept: int
    peak: int


def alive(model: nn.Module, ids: Tensor) -> Alive:
    """What the profiler says that torch's allocator gave and got back in a forward and backward."""
    for p in model.parameters():  # gradients are not what is asked for
        p.grad = torch.zeros_like(p)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        y = model(input_ids=ids)[0]
        torch.empty(MARK, dtype=torch.uint8)  # the end of the forward
        y.backward(torch.zeros((), dtype=y.dtype).expand_as(y))
    results: Any = profiler.profiler
    events = ((e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]")
    now = peak = kept = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        kept = now if change == MARK else kept
        now += change
        peak = max(peak, now)
    return Alive(kept, peak)


MARK = 12_345  # bytes, of a tensor that nobody else makes


def measure(name: str, ranks: int, seed: int) -> dict[str, list[Alive]]:
    """Of models with one layer and with three, undivided and divided."""
    import smpar as smp
    from smpar.nn.families import divide_model
    from smpar.nn.group import TensorGroup

    smp.init({"tensor_parallel_degree": ranks, "optimize": "memory", "prescaled_batch": True})
    found: dict[str, list[Alive]] = {"undivided": [], "divided": []}
    for layers in (1, 3):
        size = Size.drawn(seed, layers)
        ids = torch.randint(0, 512, (size.samples, size.length))
        for way, measured in found.items():
            model = MODELS[name](size).base_model
            if way == "divided":
                divide_model(model, TensorGroup.current())
            model(input_ids=ids)[0].sum().backward()  # tables that are made once
            measured.append(alive(model, ids))
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_keeps_its_share_of_a_layers_activations_and_peaks_with_that(
    pool: Pool, seed: int, name: str, ranks: int
) -> None:
    for found in pool.run(ranks, measure, name, ranks, seed):
        (one, three), (one_divided, three_divided) = found["undivided"], found["divided"]
        assert three.kept - one.kept > 100_000
        for what in ("kept", "peak"):
            layers, divided = (
                getattr(b, what) - getattr(a, what) for a, b in ((one, three), (one_divided, three_divided))
            )
            assert divided <= 1.1 * layers / ranks, (what, divided * ranks / layers)
