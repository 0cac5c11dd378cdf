"""A plain module's graph: what a trace must find, without init, data or memory."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor, nn

import smpar as smp
from smpar.runtime import module_graph as module
from tests.observe.models import Block, Tied


def test_units_costs_and_flow(seed: int) -> None:
    torch.manual_seed(seed)
    model = Tied(blocks=20, dim=16)
    graph = smp.module_graph(model, torch.randint(11, (3, 5)))
    names = [u.name for u in graph.units]
    assert names == ["embed", *(f"blocks.{i}" for i in range(20)), "norm", "head"]
    block = graph.units[1]
    assert (block.kind, block.calls, block.output_shapes) == ("Block", 1, ((3, 5, 16),))
    assert block.parameter_bytes == 4 * sum(p.numel() for p in model.blocks[0].parameters())
    assert block.flops == 2 * 2 * 15 * 16 * 32
    assert all(link.source + 1 == link.targets[0] and link.nbytes == 4 * 15 * 16 for link in graph.links)
    assert len(graph.links) == 22
    assert [(s.name, s.units) for s in graph.shared] == [("embed.weight", (0, 22))]


def test_meta_equals_real(seed: int) -> None:
    torch.manual_seed(seed)
    ids = torch.randint(11, (2, 7))
    with torch.device("meta"):
        meta = Tied(blocks=9)
    assert smp.module_graph(meta, ids) == smp.module_graph(Tied(blocks=9), ids)
    assert all(p.is_meta for p in meta.parameters())


def test_large_modules_are_opened_until_none_is(seed: int) -> None:
    torch.manual_seed(seed)
    uneven = nn.Sequential(*(Block(8) for _ in range(40)), Block(8, rounds=30))
    names = [u.name for u in smp.module_graph(uneven, torch.randn(4, 8)).units]
    assert names == [*map(str, range(40)), "40.up", "40.down"]


class ReadsData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y + self.b(y) if y.sum() > 0 else y


def test_a_module_that_reads_data_stays_whole(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(seed)
    graph = smp.module_graph(ReadsData(), torch.randn(2, 4))
    assert [u.kind for u in graph.units] == ["ReadsData"]
    assert "stays whole" in caplog.text


def test_the_model_is_left_as_it_was(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    state = {n: t.clone() for n, t in model.state_dict().items()}
    kinds, random = [type(m) for m in model.modules()], torch.get_rng_state()
    smp.module_graph(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)))
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert [type(m) for m in model.modules()] == kinds and torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def test_changed_modes_are_seen_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x = torch.zeros(6, 4)
    training = smp.module_graph(model, x)
    evaluating = smp.module_graph(model.eval(), x)
    assert training != evaluating and smp.module_graph(model.train(), x) == training


def test_what_is_remembered_goes_with_the_model() -> None:
    model = ReadsData()  # whole, so that the outcomes are those of the model itself
    smp.module_graph(model, torch.zeros(2, 4))
    gone, count = weakref.ref(model), len(module._remembered)
    del model
    gc.collect()
    assert gone() is None and len(module._remembered) < count


def test_twenty_billion_parameters_and_a_second_length() -> None:
    transformers = pytest.importorskip("transformers")
    psutil = pytest.importorskip("psutil")
    config = transformers.GPTNeoXConfig(
        hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576, vocab_size=50432
    )
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    ids = torch.zeros(1, 2048, dtype=torch.int64)
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    graph = smp.module_graph(model, input_ids=ids, labels=ids)
    assert time.perf_counter() - start < 20
    assert psutil.Process().memory_info().rss - before < 2e9
    assert sum(u.name.startswith("gpt_neox.layers.") for u in graph.units) == 44
    count = sum(u.parameter_bytes for u in graph.units) / 4
    assert count == sum(p.numel() for p in model.parameters()) > 20e9
    # A matrix product of 2 FLOPs for each parameter of a layer and each of 2048 tokens, and attention on top.
    layer = next(u for u in graph.units if u.name == "gpt_neox.layers.0")
    products = 2 * 2048 * 12 * 6144**2
    assert products < layer.flops < 1.2 * products
    start = time.perf_counter()
    again = smp.module_graph(model, input_ids=ids[:, :1024], labels=ids[:, :1024])
    assert time.perf_counter() - start < 2  # 0.1 s alone; other tests may run beside this one
    assert len(again.units) == len(graph.units)
