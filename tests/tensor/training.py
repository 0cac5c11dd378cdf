"""Trains a tensor-parallel model for three steps, in one process and under smpar, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, BATCH, MAX_NORM = 3, 8, 0.5


def gpt2(draw: random.Random) -> tuple[nn.Module, int]:
    """A model with random sizes, and the size of its vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    heads, vocabulary = draw.randint(2, 5), draw.randint(40, 70)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=32, n_embd=8 * heads, n_layer=3, n_head=heads, n_inner=draw.randint(30, 50),
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), vocabulary


def llama(draw: random.Random) -> tuple[nn.Module, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    kv, group, vocabulary = draw.randint(2, 3), draw.randint(1, 3), draw.randint(40, 70)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=8 * kv * group, intermediate_size=draw.randint(30, 50), num_hidden_layers=3,
        num_attention_heads=kv * group, num_key_value_heads=kv, tie_word_embeddings=draw.random() < 0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config), vocabulary


def t5(draw: random.Random) -> tuple[nn.Module, int]:
    from transformers import T5Config, T5ForConditionalGeneration

    heads, vocabulary = draw.randint(2, 5), draw.randint(40, 70)
    config = T5Config(
        vocab_size=vocabulary, d_model=24, d_kv=8, d_ff=draw.randint(30, 50), num_layers=2, num_decoder_layers=2,
        num_heads=heads, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        feed_forward_proj=draw.choice(["relu", "gated-gelu"]),
    )  # fmt: skip
    return T5ForConditionalGeneration(config), vocabulary


MODELS: dict[str, Callable[[random.Random], tuple[nn.Module, int]]] = {"gpt2": gpt2, "llama": llama, "t5": t5}


@dataclass
class Trained:
    """What a run gave: losses by step, the norm of all gradients by step, and the parameters in the end."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def made(name: str, seed: int) -> tuple[nn.Module, list[Tensor]]:
    """A model, and a batch of token ids for each step."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, vocabulary = MODELS[name](draw)
    with torch.no_grad():
        for p in model.parameters():  # the small first weights of wide models give narrow ones no gradients to see
            p.add_(torch.randn_like(p) * 0.1)
    length = draw.randint(5, 9)
    return model.train(), [torch.randint(1, vocabulary, (BATCH, length)) for _ in range(STEPS)]


def loss_of(name: str, model: Any, ids: Tensor) -> Tensor:
    """Of the next token; for T5, of four. transformers' own losses are of float32 logits."""
    if name == "t5":
        logits, labels = model(input_ids=ids, decoder_input_ids=ids[:, :4]).logits, ids[:, 1:5]
    else:
        logits, labels = model(input_ids=ids).logits[:, :-1], ids[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)


def train_alone(name: str, seed: int) -> Trained:
    """The whole batch in one process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, batches = made(name, seed)
    finally:
        torch.set_default_dtype(before)
    optimizer = optimizer_of(model.parameters())
    done = Trained([], [], {})
    for ids in batches:
        optimizer.zero_grad()
        loss = loss_of(name, model, ids)
        loss.backward()
        done.losses.append(float(loss.detach()))
        done.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    done.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return done


def train(name: str, seed: int, config: dict[str, Any]) -> Trained:
    """The same under smpar, each rank with its samples. Runs in the worker processes."""
    import smpar as smp

    smp.init({"microbatches": 2, **config})
    torch.set_default_dtype(torch.float64)
    try:
        model, batches = made(name, seed)
    finally:
        torch.set_default_dtype(torch.float32)
    smp.set_tensor_parallelism(model)
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer_of(wrapped.parameters()))
    prescaled = config.get("prescaled_batch", False)
    place, places = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())

    @smp.step
    def step(model: Any, ids: Tensor) -> Tensor:
        loss = loss_of(name, model, ids)
        model.backward(loss)
        return loss

    done = Trained([], [], {})
    for ids in batches:
        optimizer.zero_grad()
        loss = step(wrapped, ids.chunk(places)[place]).reduce_mean()
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        done.losses.append(float(loss) / smp.dp_size())
        done.norms.append(float(smp.clip_grad_norm_(wrapped, MAX_NORM)))
        optimizer.step()
    state = wrapped.state_dict()
    done.state = {k: v.detach().clone() for k, v in state.items()} if smp.rank() == 0 else {}
    return done
