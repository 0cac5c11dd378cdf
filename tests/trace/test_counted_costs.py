"""Counted costs: what a partition on a CPU must know of a model to balance it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar
from smpar.planner.chain import UnitCost
from smpar.planner.partition import partition
from smpar.runtime.partitioning import Explored, Goal, _cut, unit_costs
from smpar.stage.layout import Layout
from smpar.trace.graph import ModuleGraph, Unit
from smpar.trace.watch import RATES


class Gpt(nn.Module):
    """Embedding, blocks without attention, head, loss."""

    def __init__(self, width: int, blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def goal(microbatches: int, ranks: tuple[int, ...] = (0, 1)) -> Goal:
    return Goal(len(ranks), microbatches, 0.0, True, 0, False, ranks=ranks)


def test_a_head_with_half_of_the_work_costs_half() -> None:
    """Eight blocks of 8 width^2 multiplications per token, and a head of 64 width^2 with a loss behind it."""
    width = 256
    with torch.device("meta"):
        model = Gpt(width, 8, 64 * width)
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    graph = smpar.module_graph(model, tokens, tokens)
    costs = {u.name: u.time for u in unit_costs(graph, goal(8))}
    whole = sum(costs.values())
    assert 0.48 < costs["head"] / whole < 0.56
    blocks = [t for name, t in costs.items() if name.startswith("blocks")]
    assert sum(blocks) / whole > 0.38
    assert 0.01 < costs["embed"] / whole < 0.08  # its gradient is a whole table, written and added up


def test_an_embedding_reads_only_its_rows() -> None:
    """Forward and backward: the rows three times, read and written; the table's gradient once and a half."""
    table = nn.Embedding(100_000, 64, device="meta")
    graph = smpar.module_graph(nn.Sequential(table), torch.zeros(10, dtype=torch.int64))
    (unit,) = graph.units
    rate = RATES["cpu"]
    rows, whole = 10 * 64 * 4, 100_000 * 64 * 4
    assert unit.seconds == pytest.approx(3 * (rate.launch + (2 * rows + whole / 2) / rate.bytes))


@pytest.mark.parametrize(("microbatches", "added"), [(1, 0.0), (4, 0.75)])
def test_each_microbatch_but_the_first_adds_its_gradients(microbatches: int, added: float) -> None:
    graph = ModuleGraph((Unit("a", "Linear", 1, 4000, 0.0, 1e-6, 2e-6, 0, ()),), (), ())
    rate = RATES["cuda" if torch.cuda.is_available() else "cpu"]
    (cost,) = unit_costs(graph, goal(microbatches))
    assert cost.time == pytest.approx(3e-6 + added * 3 * 4000 / (2.5 * rate.bytes))


def test_stages_that_share_a_rank_are_balanced_together() -> None:
    """Loop and V cut at other places than one stage per rank."""
    times = (1.0, 1.0, 3.0, 5.0, 1.0, 5.0)
    modules: list[nn.Module] = [nn.Identity() for _ in times]
    model = nn.Sequential(*modules)
    units = tuple(Unit(str(i), "Identity", 1, 0, 0.0, t / 3, 2 * t / 3, 0, ()) for i, t in enumerate(times))
    layout = Layout.make(model, 1, dict.fromkeys(modules, 0), {}, set())
    seen = Explored(ModuleGraph(units, (), ()), modules, {}, layout)
    stages = {ranks: _cut(seen, goal(8, ranks), {})[1] for ranks in ((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0))}
    assert stages[0, 1, 2, 3] == (0, 0, 0, 1, 2, 3)
    costs = [UnitCost(str(i), t, 0.0) for i, t in enumerate(times)]
    for ranks in ((0, 1, 0, 1), (0, 1, 1, 0)):
        cuts = partition(costs, [], [], 4, 8, ranks=ranks, evenness=0.4).cuts
        assert stages[ranks] == tuple(sum(i >= c for c in cuts) - 1 for i in range(6))
        assert stages[ranks] != stages[0, 1, 2, 3]


def test_goals_of_one_stage_per_rank_and_of_several() -> None:
    """Perfect balance of 8 microbatches: 1 + 7 / 2 of the whole with two ranks; with two stages on each of them the
    pipeline fills in half the time, 1 / 2 + 7.5 / 2."""
    plain, looped = goal(8), goal(8, (0, 1, 0, 1))
    assert (plain.degree, plain.ideal, plain.in_flight, plain.fine) == (2, 4.5, 2, 1 / 8)
    assert (looped.degree, looped.ideal, looped.in_flight, looped.fine) == (2, 4.25, 2.5, 1 / 8)
    assert goal(1, (0, 1, 0, 1)).in_flight == 1
    assert Goal(4, 8, 0.0, True, 0, False).degree == 4
