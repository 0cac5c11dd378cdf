"""States come out whole, under the names and numbers of the undivided model, and go into any other division of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smpar.slices import Slicing, sliced, slicing_of
from tests.harness import Pool
from tests.replicas.models import close

WIDTH, SAMPLES, STEPS = 6, 8, 4

# ---- training goes on in another division ----------------------------------------------------------------------


class Gated(nn.Module):
    """Divided by channels: of a fused linear each rank holds some gates and, further on, the values they are for."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * channels), nn.Linear(channels, WIDTH)
        self.group: Any = None

    def divide(self, group: Any) -> None:
        self.group, channels = group, self.down.in_features
        rows = Slicing.even(0, 2 * channels, group.size, blocks=2)
        for p, slicing in (
            (self.up.weight, rows),
            (self.up.bias, rows),
            (self.down.weight, Slicing.even(1, channels, group.size)),
        ):
            p.data = slicing.take(p.detach(), group.rank).clone()
            sliced(p, slicing)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is not None:
            from smpar.nn import collectives

            x = collectives.copy(x, self.group)
        gate, value = self.up(x).chunk(2, -1)
        total = F.linear(torch.sigmoid(gate) * value, self.down.weight)
        return self.down.bias + (total if self.group is None else collectives.reduce(total, self.group))


class Blocks(nn.Module):
    """The first and the last linear share their weight; the norms have statistics."""

    def __init__(self, channels: list[int]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in channels)
        self.gated = nn.ModuleList(Gated(n) for n in channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, gated in zip(self.norms, self.gated, strict=True):
            x = x + gated(norm(x))
        return self.last(x)


def blocks(seed: int, others: bool = False) -> Blocks:
    """A model, or one of the same sizes with other values; its channels do not divide by the ranks."""
    torch.manual_seed(seed + others)
    draw = random.Random(seed)
    return Blocks([draw.choice([5, 7, 9, 11]) for _ in range(4)]).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": weights}], lr=0.03, eps=1e-3)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
    return x, y


States = tuple[dict[str, Tensor], dict[str, Any]]


def alone(seed: int) -> Iterator[States]:
    """Model and optimizer state after each step in one process."""
    model = blocks(seed)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        yield {n: t.clone() for n, t in model.state_dict().items()}, clone(optimizer.state_dict())
        train_alone(model, optimizer, seed, step)
    yield model.state_dict(), optimizer.state_dict()


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
    optimizer.zero_grad()
    x, y = batch(seed, step)
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def clone(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {n: {k: torch.clone(v) for k, v in s.items()} for n, s in state["state"].items()}}


def trained(
    settings: dict[str, Any], steps: range, given: States | None, late: bool, seed: int
) -> tuple[States, States, dict[str, tuple[int, ...]]]:
    """Train on from given states; returns the whole states, this rank's part, and the shapes of what it holds.

    Args:
        late: load after a step of no avail, hence after the partition.
    """
    import smpar as smp
    from smpar.nn.group import TensorGroup

    smp.init({"prescaled_batch": True, "microbatches": 1, **settings})
    module = blocks(seed, others=given is not None)
    if smp.tp_size() > 1:
        for gated in module.gated:
            gated.divide(TensorGroup.current())
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(F.mse_loss(model(x), y))

    def run(step: int) -> None:
        optimizer.zero_grad()
        train(model, *batch(seed, step))
        optimizer.step()

    if late:
        run(0)
    if given is not None:
        model.load_state_dict(given[0])
        optimizer.load_state_dict(given[1])
    for step in steps:
        run(step)
    shapes = {n: tuple(p.shape) for n, p in model.local_named_parameters()}
    return (
        (model.state_dict(), optimizer.state_dict()),
        (model.local_state_dict(), optimizer.local_state_dict()),
        shapes,
    )


def same_states(got: States, want: States, where: str) -> None:
    assert list(got[0]) == list(want[0])
    for name, value in want[0].items():
        close(got[0][name], value, 1e-9, f"{where}: {name}")
    assert got[1].keys() == want[1].keys() == {"state", "param_groups"}
    assert [g["params"] for g in got[1]["param_groups"]] == [g["params"] for g in want[1]["param_groups"]]
    assert got[1]["state"].keys() == want[1]["state"].keys()
    for number, entries in want[1]["state"].items():
        for key, value in entries.items():
            close(got[1]["state"][number][key], value, 1e-9, f"{where}: {key} of {number}")


def division(tp: int, pp: int = 1) -> dict[str, Any]:
    return {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp}


def test_a_whole_state_goes_into_any_division_and_training_goes_on(pool: Pool, seed: int) -> None:
    want = list(alone(seed))
    first = pool.run(4, trained, division(2, 2), range(2), None, False, seed)
    for whole, _, shapes in first:
        same_states(whole, want[2], "tp 2, pp 2")
        assert len(shapes) < len(list(blocks(seed).parameters()))
        assert all(whole[0][n].shape != shape for n, shape in shapes.items() if n.endswith("up.weight"))
    states = first[3][0]

    model = blocks(seed, others=True)  # torch alone
    optimizer = optimizer_of(model)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(clone(states[1]))  # torch would go on in what it is given
    for step in range(2, STEPS):
        train_alone(model, optimizer, seed, step)
    same_states((model.state_dict(), optimizer.state_dict()), want[STEPS], "undivided")

    for ranks, tp, pp, late in ((1, 1, 1, False), (4, 4, 1, True), (4, 2, 2, True), (4, 2, 1, False), (2, 1, 2, False)):
        where = f"{ranks} ranks, tp {tp}, pp {pp}"
        for whole, _, _ in pool.run(ranks, trained, division(tp, pp), range(2, STEPS), states, late, seed):
            same_states(whole, want[STEPS], where)


@pytest.mark.parametrize(("tp", "pp", "late"), [(2, 1, False), (2, 2, False), (2, 2, True)])
def test_parts_go_back_to_the_ranks_that_they_are_of(pool: Pool, seed: int, tp: int, pp: int, late: bool) -> None:
    want = list(alone(seed))
    parts = [part for _, part, _ in pool.run(tp * pp, trained, division(tp, pp), range(2), None, False, seed)]
    for model, optimizer in parts:
        assert model["_smp_is_partial"] and optimizer["_smp_is_partial"]
    for whole, _, _ in pool.run(tp * pp, going_on, division(tp, pp), parts, late, seed):
        same_states(whole, want[STEPS], "from parts")


def going_on(settings: dict[str, Any], parts: list[States], late: bool, seed: int) -> Any:
    return trained(settings, range(2, STEPS), parts[int(os.environ["RANK"])], late, seed)


# ---- what is held in slices ------------------------------------------------------------------------------------


class Held(nn.Module):
    """Parameters and buffers of many types, some divided, one shared, one of which the last rank holds nothing."""

    def __init__(self, seed: int, rank: int, size: int, like: int | None = None) -> None:
        super().__init__()
        draw, made = random.Random(seed if like is None else like), torch.Generator().manual_seed(seed)
        for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]):
            dim, blocks, unit = draw.randrange(3), draw.randint(1, 3), draw.randint(1, 2)
            shape = [draw.randint(1, 4) for _ in range(3)]
            shape[dim] = blocks * unit * draw.randint(3, 7)
            slicing = Slicing.even(dim, shape[dim], size, unit, blocks)
            whole = torch.randn(shape, generator=made).to(dtype)
            setattr(self, f"p{number}", sliced(nn.Parameter(slicing.take(whole, rank)), slicing))
        few = Slicing.even(0, 1, size)
        self.few = sliced(nn.Parameter(few.take(torch.randn(1, 3, generator=made), rank)), few)
        self.again = self.p1
        self.whole = nn.Parameter(torch.randn(3, generator=made))
        mask, masked = torch.rand(9, generator=made) < 0.5, Slicing.even(0, 9, size)
        self.register_buffer("mask", sliced(masked.take(mask, rank).clone(), masked))  # type: ignore[arg-type]
        self.register_buffer("count", torch.tensor(draw.randrange(100)))
        self.norm = nn.BatchNorm1d(2)


def held(size: int, pp: int, seed: int) -> dict[str, Any]:
    """The whole state, before any partition, after it went into another model's slices."""
    import smpar as smp

    smp.init({**division(size, pp), "prescaled_batch": True})
    mine = Held(seed, smp.tp_rank(), size)
    whole = smp.DistributedModel(mine).state_dict()
    other = Held(seed + 1, smp.tp_rank(), size, like=seed)
    model = smp.DistributedModel(other)
    assert repr(model.load_state_dict(whole)) == "<All keys matched successfully>"
    nested = nn.ModuleDict({"model": model}).state_dict()
    for (name, t), u in zip(mine.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(t, u), name
        assert torch.equal(nested[f"model.{name}"], whole[name]), name
    assert whole["again"] is whole["p1"] and whole._metadata["norm"] == {"version": 2}
    return dict(whole)


def test_a_whole_state_has_every_element_whatever_its_type_and_the_division(pool: Pool, seed: int) -> None:
    want = Held(seed, 0, 1).state_dict()
    for size, pp in ((2, 1), (3, 1), (2, 2)):
        for whole in pool.run(size * pp, held, size, pp, seed):
            assert list(whole) == list(want)
            for name, tensor in want.items():
                assert whole[name].dtype == tensor.dtype and torch.equal(whole[name], tensor), name


def misfit(tp: int, pp: int, kind: str, seed: int) -> None:
    """Loads what does not fit; what the model holds must not have changed then."""
    import smpar as smp

    smp.init({**division(tp, pp), "prescaled_batch": True})
    model = smp.DistributedModel(Held(seed, smp.tp_rank(), tp))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state, part, steps = model.state_dict(), model.local_state_dict(), optimizer.local_state_dict()
    before = {n: t.clone() for n, t in model.module.state_dict().items()}
    with torch.no_grad():
        state["whole"] += 1
    if kind == "shape":
        state["p0"] = model.module.p0.detach()
    elif kind == "missing":
        del state["p2"]
    elif kind == "unexpected":
        state["surplus"] = state["p2"]
    (part if "part" in kind else steps)["_smp_slice"] = (1 - smp.tp_rank(), 2) if "rank" in kind else (smp.tp_rank(), 4)
    try:
        if kind.startswith("optimizer"):
            optimizer.load_state_dict(steps)
        else:
            model.load_state_dict(part if "part" in kind else state)
    finally:
        if kind not in ("missing", "unexpected"):  # torch loads what it can before it raises
            assert all(torch.equal(t, before[n]) for n, t in model.module.state_dict().items())


@pytest.mark.parametrize(
    ("pp", "kind", "error", "text"),
    [
        (1, "shape", "RuntimeError", "size mismatch for p0: copying a param with shape {part} from checkpoint, the "
         "shape in current model is {whole}."),
        (1, "missing", "RuntimeError", 'Missing key(s) in state_dict: "p2"'),
        (2, "unexpected", "RuntimeError", 'Unexpected key(s) in state_dict: "surplus"'),
        (1, "part of another rank", "OtherSlice", "the state of rank {other} of 2, loaded by rank {rank} of 2"),
        (2, "part of another degree", "OtherSlice", "the state of rank {rank} of 4, loaded by rank {rank} of 2"),
        (1, "optimizer of another degree", "OtherSlice", "the state of rank {rank} of 4, loaded by rank {rank} of 2"),
        (1, "optimizer of another rank", "OtherSlice", "the state of rank {other} of 2, loaded by rank {rank} of 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(pool: Pool, seed: int, pp: int, kind: str, error: str, text: str) -> None:
    whole = Held(seed, 0, 1).p0.shape
    for place, outcome in enumerate(pool.attempt(2 * pp, misfit, 2, pp, kind, seed)):
        rank = place % 2
        words = {"rank": rank, "other": 1 - rank, "part": Held(seed, rank, 2).p0.shape, "whole": whole}
        assert outcome.error == error and text.format(**words) in outcome.text, outcome


# ---- other names -----------------------------------------------------------------------------------------------


class Three(nn.Module):
    """The undivided module."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)


class Fused(nn.Module):
    """Stands in its place: one linear for all three, of which each rank holds a slice of each, and a renamed norm."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        rows = Slicing.even(0, 3 * WIDTH, size, blocks=3)
        self.weight = sliced(nn.Parameter(torch.randn(rows.size(rank), WIDTH)), rows)
        self.bias = sliced(nn.Parameter(torch.randn(rows.size(rank))), rows)
        self.layer_norm = nn.LayerNorm(WIDTH)

    def whole_state(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        made = {}
        for name, tensor in state.items():
            kind = name.removeprefix(prefix)
            if kind in ("weight", "bias"):
                for part, value in zip("qkv", tensor.chunk(3), strict=True):
                    made[f"{prefix}{part}.{kind}"] = value
            else:
                made[name.replace(".layer_norm.", ".norm.")] = tensor
        return made

    def own_state(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        made = {n.replace(".norm.", ".layer_norm."): t for n, t in state.items() if ".norm." in n}
        return made | {prefix + k: torch.cat([state[f"{prefix}{p}.{k}"] for p in "qkv"]) for k in ("weight", "bias")}


def renamed(size: int, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load an undivided model's state, and give it back after noting what was loaded."""
    import smpar as smp

    smp.init({"tensor_parallel_degree": size, "prescaled_batch": True})
    rank = smp.tp_rank()
    fused = Fused(rank, size)
    model = smp.DistributedModel(nn.ModuleDict({"before": nn.Linear(2, 2), "layer": fused, "after": nn.Linear(2, 2)}))
    model.load_state_dict(given)
    slicing = slicing_of(fused.weight)
    assert slicing is not None
    whole = torch.cat([given[f"layer.{part}.weight"] for part in "qkv"])
    assert torch.equal(fused.weight, slicing.take(whole, rank))
    assert {n for n in model.local_state_dict() if n.startswith("layer.")} == {
        "layer.weight", "layer.bias", "layer.layer_norm.weight", "layer.layer_norm.bias",
    }  # fmt: skip
    return dict(model.state_dict())


def test_a_twin_with_other_names_translates_them(pool: Pool, seed: int) -> None:
    torch.manual_seed(seed)
    undivided = nn.ModuleDict({"before": nn.Linear(2, 2), "layer": Three(), "after": nn.Linear(2, 2)})
    want = undivided.state_dict()
    for size in (1, 2):
        for got in pool.run(size, renamed, size, dict(want)):
            assert [n.split(".")[0] for n in got] == [n.split(".")[0] for n in want]
            assert got.keys() == want.keys() and all(torch.equal(got[n], t) for n, t in want.items())
