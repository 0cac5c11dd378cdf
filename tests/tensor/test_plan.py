"""The planner knows what tensor parallelism divides, keeps and sends; and what it plans with it, runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import smpar as smp
from smpar.describe.plans import plans_text
from smpar.errors import ConfigError, PlanError
from smpar.planner.cluster import Cluster, DeviceType
from smpar.planner.cost import CostModel
from smpar.planner.hardware import GIB, SMPAR
from smpar.planner.profile import Profile
from smpar.planner.strategy import Strategy
from smpar.probe.counted import count_profile
from smpar.probe.model import profile_model
from smpar.runtime.plan_file import with_plan
from tests.harness import Pool

WIDTH, VOCABULARY, POSITIONS = 8, 50, 32


def gpt2(seed: int, layers: int = 3, heads: int = 4, head: bool = True) -> nn.Module:
    """Marked for tensor parallelism, without dropout, in float64."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=WIDTH * heads, n_layer=layers, n_head=heads, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = (GPT2LMHeadModel if head else GPT2Model)(config).double()
    smp.set_tensor_parallelism(model)
    return model


def ids_of(seed: int, samples: int, length: int = 16) -> Tensor:
    return torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def cluster(devices: int, memory: float = 4 * GIB, kind: str = "cpu") -> Cluster:
    """One node with links so fast that tensor parallelism pays."""
    return Cluster.from_dict(
        {
            "devices": {kind: {"memory_gib": memory / GIB, "peak_tflops": 1, "memory_gbytes_per_s": 1000}},
            "nodes": [{"name": "n", "device": kind, "count": devices, "intra_gbit_per_s": 1e4}],
        }
    )


def held_by_hand(tp: int, heads: int) -> int:
    """Parameters of the first of `tp` ranks, of one layer of a GPT-2 as above."""
    width, mine = WIDTH * heads, -(-heads // tp) * WIDTH
    inner = -(-4 * width // tp)
    attention = width * 3 * mine + 3 * mine + mine * width + width
    mlp = width * inner + inner + inner * width + width
    return attention + mlp + 4 * width


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_the_memory_of_a_divided_model_is_that_of_its_slices(seed: int, tp: int) -> None:
    layers, heads = 3, random.Random(seed).randint(4, 7)
    model, width = gpt2(seed, layers, heads), WIDTH * heads
    profile = count_profile(model, [], {"input_ids": ids_of(seed, 4)}, [DeviceType("d", 1, 1e9, 1e9)], degrees=(1, tp))
    embeddings = -(-VOCABULARY // tp) * width + POSITIONS * width
    want = layers * held_by_hand(tp, heads) + embeddings + 2 * width
    costs = CostModel(profile, cluster(tp, kind="d"))
    (memory,) = costs.memory(Strategy(tp, 1, 1, 1, 1, "1f1b", 1, (0,), tuple(range(tp))))
    assert memory.weights == 4 * want
    assert sum(p.numel() for p in model.parameters()) == layers * held_by_hand(1, heads) + width * (
        VOCABULARY + POSITIONS + 2
    ), "the model itself stays whole"


def test_activations_divide_but_between_the_layers(seed: int) -> None:
    """Within layers each rank keeps a half; the masks of dropout and attention are few."""
    profile = counted(gpt2(seed), seed, 2)
    whole, half = profile.at(1), profile.at(2)
    for name, all_, part in zip((x.name for x in profile.layers), whole.saved, half.saved, strict=True):
        if ".h." in name:
            assert part == pytest.approx(all_ / 2, rel=0.01), name
    between = [
        (t.source, a, b) for t, a, b in zip(profile.tensors, whole.elements, half.elements, strict=True) if a != b
    ]
    assert between and all(b == a / 2 for _, a, b in between), "slices of the sequence travel between stages"


def counted(model: nn.Module, seed: int, *degrees: int) -> Profile:
    device = DeviceType("cpu", 1, 1e9, 1e9)
    return count_profile(model, [], {"input_ids": ids_of(seed, 4)}, [device], degrees=(1, *degrees))


def collectives_of(seed: int) -> tuple[dict[str, int], dict[str, int]]:
    """What really runs, forward and backward, on two ranks, with four samples."""
    from smpar.nn import collectives
    from smpar.nn.distribute import distribute
    from smpar.nn.group import TensorGroup

    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": True})
    model = distribute(gpt2(seed, head=False), TensorGroup.current())
    with collectives.counting() as forward:
        loss = model(input_ids=ids_of(seed, 4)).last_hidden_state.square().mean()
    with collectives.counting() as backward:
        loss.backward()
    return dict(forward), dict(backward)


def test_predicted_collectives_are_those_that_run(pool: Pool, seed: int) -> None:
    """Of two ranks, each sends as many bytes as an all-reduce has, and half as many as are gathered or scattered."""
    divided, samples = counted(gpt2(seed, head=False), seed, 2).at(2), 4
    for run in pool.run(2, collectives_of, seed):
        for real, calls, nbytes in zip(
            run,
            (divided.forward_calls, divided.backward_calls),
            (divided.forward_bytes, divided.backward_bytes),
            strict=True,
        ):
            assert sum(n for name, n in real.items() if name != "bytes") == sum(calls)
            assert sum(nbytes) * samples == real["bytes"]


def test_collectives_of_a_layer(seed: int) -> None:
    """Two gathers and two scatters of [N, S, H] forward; backward the same and a gather for each region, again."""
    two, three = (counted(gpt2(seed, layers, head=False), seed, 2).at(2) for layers in (2, 3))
    hidden = 8 * 16 * WIDTH * 4
    for name, calls in (("forward", 4), ("backward", 6)):
        more = [sum(getattr(d, f"{name}_calls")) for d in (two, three)]
        assert more[1] - more[0] == calls
        moved = [sum(getattr(d, f"{name}_bytes")) for d in (two, three)]
        assert moved[1] - moved[0] == calls * hidden / 2


def test_a_measured_profile_divides_as_a_counted_one(seed: int) -> None:
    model = gpt2(seed, layers=1)
    batch = {"input_ids": ids_of(seed, 4)}
    measured = profile_model(model, [], batch, [4], torch.device("cpu"), degrees=(1, 2))
    known, found = counted(model, seed, 2).at(2), measured.at(2)
    assert [t.tp for t in measured.times] == [1, 2]
    assert replace(found, transient=known.transient) == known
    assert Profile.from_dict(measured.to_dict()) == measured


def test_nothing_marked_nothing_divided(seed: int) -> None:
    model = gpt2(seed)
    smp.set_tensor_parallelism(model, False)
    plans = smp.plan(model, {"input_ids": ids_of(seed, 4)}, cluster(4), 8, shown=False)
    assert {plan.strategy.tp for plan in plans} == {1}
    assert "no tensor parallelism: nothing in the model is both marked" in plans_text(plans)
    with pytest.raises(PlanError, match="nothing in the model is both marked"):
        smp.plan(model, {"input_ids": ids_of(seed, 4)}, cluster(4), 8, fix={"tp": 2}, shown=False)


def test_wide_layers_on_fast_links_are_divided() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=4096, n_layer=2, n_head=32, bos_token_id=0, eos_token_id=0))
    smp.set_tensor_parallelism(model)
    best = smp.plan(model, {"input_ids": ids_of(0, 4, 512)}, "8xh100", 2, shown=False).best
    assert best.strategy.tp >= 2


def run_planned(given: dict[str, Any], seed: int, samples: int) -> tuple[float, dict[str, Tensor]]:
    smp.init(given)
    model = smp.DistributedModel(gpt2(seed))

    @smp.step
    def train(model: Any, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    ids = ids_of(seed, samples)
    if not given["prescaled_batch"]:
        ids = ids.chunk(smp.dp_size())[smp.dp_rank()]
    return train(model, ids).reduce_mean().item(), {"sizes": torch.tensor([smp.tp_size(), smp.pp_size()])}


@pytest.mark.parametrize(("ranks", "prescaled"), [(2, True), (4, False)])
def test_a_plan_for_little_memory_divides_and_runs(
    pool: Pool, seed: int, tmp_path: Path, ranks: int, prescaled: bool
) -> None:
    """Half a device's memory too little: the layers are divided, and the loss is that of one process."""
    samples, model, fix = 8, gpt2(seed), {"pp": ranks // 2, "dp": 1, "microbatch": 2}
    ids = ids_of(seed, samples)
    roomy = smp.plan(model, (ids,), cluster(ranks), samples, step=loss_of, fix={"tp": 1, **fix}, keep=50, shown=False)
    least = min(max(plan.prediction.memory) for plan in roomy)
    tight = cluster(ranks, SMPAR.reserve + 0.7 * least)
    with pytest.raises(PlanError):
        smp.plan(model, (ids,), tight, samples, step=loss_of, fix={"tp": 1, **fix}, shown=False)
    best = smp.plan(model, (ids,), tight, samples, step=loss_of, fix=fix, shown=False).best
    assert best.strategy.tp == 2 and best.prediction.fits
    best.save(tmp_path / "plan.json")
    given = {"plan": str(tmp_path / "plan.json"), "prescaled_batch": prescaled}
    losses = []
    for loss, sizes in pool.run(ranks, run_planned, given, seed, samples):
        assert sizes["sizes"].tolist() == [2, ranks // 2]
        losses.append(loss)
    assert sum(losses) / ranks == pytest.approx(loss_of(gpt2(seed), ids).item(), rel=1e-9)


def test_a_sample_has_no_parts(seed: int) -> None:
    """Microbatches of one sample need the same batch on the ranks of a group."""
    plan = smp.plan(
        gpt2(seed), (ids_of(seed, 4),), cluster(2), 4, step=loss_of, fix={"tp": 2, "microbatch": 1}, shown=False
    ).best
    with pytest.raises(ConfigError, match="microbatches of 1 samples for 2 ranks"):
        with_plan({"plan": plan})
    assert with_plan({"plan": plan, "prescaled_batch": True})["tensor_parallel_degree"] == 2
