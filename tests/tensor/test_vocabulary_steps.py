"""Steps use the logits of a pipeline with a divided vocabulary as those of one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.harness import Pool

ROWS, MICROBATCHES = 4, 2  # of a rank
JOINED, PRESCALED = {"prescaled_batch": False}, {"prescaled_batch": True}
GRIDS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor_parallel_degree": 2, **JOINED}),
    (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, **JOINED}),
    (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, **PRESCALED}),
]


def made(seed: int, own: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, and ids and labels of a rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    draw = random.Random(seed)
    torch.manual_seed(seed)
    words = draw.randint(40, 70)
    config = GPT2Config(
        vocab_size=words, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ids = torch.randint(words, (ROWS, draw.randint(4, 8)), generator=torch.Generator().manual_seed(own))
    return model, ids, ids.masked_fill(ids % 5 == 0, -100)


def used(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """What a step may ask of a microbatch's logits."""
    given = model(input_ids=ids, labels=labels)
    logits = given.logits
    own = F.cross_entropy(logits[..., :-1, :].reshape(-1, logits.shape[-1]), labels[..., 1:].reshape(-1))
    best = logits[:, -1, int(logits[0, 0].argmax())]  # a value is read
    hits = (logits.argmax(-1)[:, :-1] == labels[:, 1:]).float().mean()
    return {"loss": given.loss, "own": own, "logits": logits, "hits": hits, "best": best, "output": given}


def alone(seed: int, own: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """In one process: what microbatches give, and the gradients of their mean losses."""
    model, ids, labels = made(seed, own)
    found = [used(model, i, y) for i, y in zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)]
    sum(one["loss"] + one["own"] for one in found).backward()  # type: ignore[union-attr]
    return found, {k: p.grad / MICROBATCHES for k, p in model.named_parameters() if p.grad is not None}


def steps(seed: int, config: dict[str, Any]) -> None:
    """Runs in the worker processes."""
    import smpar as smp
    from smpar.slices import slicing_of

    smp.init({"microbatches": MICROBATCHES, **config})
    own = seed if config["prescaled_batch"] else seed + smp.tp_rank()
    plain, ids, labels = made(seed, own)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)

    @smp.step
    def train(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        found = used(model, ids, labels)
        model.backward(found["loss"] + found["own"])
        return found

    @smp.step
    def evaluate(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        return used(model, ids, labels)

    want, gradients = alone(seed, own)
    mean = [alone(seed, seed + rank)[1] for rank in range(smp.tp_size())]
    model.train()
    check(train(model, ids, labels), want)
    for name, parameter in model.local_named_parameters():
        grad = gradients[name] if config["prescaled_batch"] else sum(g[name] for g in mean) / len(mean)
        slicing = slicing_of(parameter)
        expected = grad if slicing is None else slicing.take(grad, smp.tp_rank())
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    model.eval()
    with torch.no_grad():
        check(evaluate(model, ids, labels), want)
    check(evaluate(model, ids, labels), want)


def check(found: dict[str, Any], want: list[dict[str, Any]]) -> None:
    for at, wanted in enumerate(want):
        for key in ("loss", "own", "logits", "hits", "best"):
            got = found[key][at]
            assert type(got) is Tensor, (key, type(got))
            torch.testing.assert_close(got, wanted[key].detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["output"]["logits"][at], wanted["logits"].detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["logits"].concat(), torch.cat([one["logits"].detach() for one in want]))


@pytest.mark.parametrize(
    "grid", GRIDS, ids=lambda grid: f"{grid[0]}-{'prescaled' if grid[1]['prescaled_batch'] else 'joined'}"
)
def test_a_step_uses_logits_as_one_process(pool: Pool, seed: int, grid: tuple[int, dict[str, Any]]) -> None:
    pool.run(grid[0], steps, seed, grid[1], timeout=90.0)
