"""A model made of smpar.nn's layers, or of torch's, trains alike for every tensor and pipeline degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Pool

STEPS, BATCH = 3, 8


def of_these_layers() -> nn.Module:
    from smpar.nn import DistributedTransformerLMHead

    return DistributedTransformerLMHead(
        num_layers=3, num_attention_heads=3, attention_head_size=4, hidden_size=10, intermediate_size=13,
        vocab_size=21, num_positions=9, causal_mask_size=9, pre_layernorm=True, post_layernorm=False,
        attention_dropout_prob=0.0, hidden_dropout_prob=0.0, embedding_dropout_prob=0.0,
    )  # fmt: skip


class Encoder(nn.Module):
    """Around torch's encoder, which is divided where there are ranks for it."""

    def __init__(self) -> None:
        super().__init__()
        from smpar.nn.group import TensorGroup
        from smpar.nn.leaves import divide_leaf

        self.embedding = nn.Embedding(21, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 13, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(12, 21)
        divide_leaf(self.encoder, TensorGroup.current())

    def forward(self, ids: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(self.embedding(ids), is_causal=True, mask=torch.ones(7, 7, dtype=torch.bool).triu(1))
        logits = self.head(hidden)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


MODELS = {"layers": of_these_layers, "torch": Encoder}


def losses_of(kind: str, seed: int, config: dict[str, Any]) -> list[float]:
    """Of each step, the mean over all samples, in float64."""
    import smpar as smp

    smp.init({"microbatches": 2, **config})
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        module = MODELS[kind]()
        batches = [torch.randint(21, (BATCH, 7)) for _ in range(STEPS)]
    finally:
        torch.set_default_dtype(torch.float32)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.03, eps=1e-3))
    replica, replicas = (
        (smp.rdp_rank(), smp.rdp_size()) if config.get("prescaled_batch") else (smp.dp_rank(), smp.dp_size())
    )

    @smp.step
    def step(model: Any, ids: Tensor) -> Tensor:
        loss, logits = model(ids, None, None, None, ids)
        assert logits.shape == (*ids.shape, 21)
        model.backward(loss)
        return loss

    losses = []
    for ids in batches:
        optimizer.zero_grad()
        loss = step(model, ids.chunk(replicas)[replica]).reduce_mean()
        if smp.dp_size() > 1:
            torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append(float(loss) / smp.dp_size())
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
        (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"}),
        (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "optimize": "memory"}),
        (4, {"tensor_parallel_degree": 2, "optimize": "speed"}),
    ],
    ids=["tp", "tp-pp-prescaled-speed", "tp-pp-joined-memory", "tp-dp-joined-speed"],
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_divided_layers_trains_as_in_one_process(
    pool: Pool, seed: int, kind: str, ranks: int, config: dict[str, Any]
) -> None:
    (want,) = pool.run(1, losses_of, kind, seed, {})
    assert want[-1] != pytest.approx(want[0], rel=1e-3)
    for losses in pool.run(ranks, losses_of, kind, seed, config):
        assert losses == pytest.approx(want, rel=1e-9)
