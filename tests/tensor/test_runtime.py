"""The runtime knows tensor-parallel groups: who averages what, whose batches fit, who draws alike.

No module is divided here: a tensor-parallel group then trains like so many more replicas ("joined", each rank with
samples of its own), or does the same on each of its ranks ("prescaled").
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from smpar.slices import Slicing, bounds_of, sliced, slicing_of
from tests.harness import Pool
from tests.replicas.models import WIDTH, Layers, Normed, Tied, close

SAMPLES, STEPS, LENGTH = 8, 3, 5  # LENGTH of a divided dim, uneven on two ranks
TINY = {"bucket_cap_mb": 1e-4}
JOINED, PRESCALED = False, True


def config(pp: int, prescaled: bool, **more: Any) -> dict[str, Any]:
    given = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": pp, "prescaled_batch": prescaled}
    return {**given, "microbatches": 2, **more}


def made(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return model().double()


def batch(seed: int, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """One of equal parts of a batch."""
    generator = torch.Generator().manual_seed(seed + step)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def trainer(smp: Any) -> Any:
    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x, True), y)
        model.backward(loss)
        return loss

    return train


# ---- a model without twins -------------------------------------------------------------------------------------


def trained(settings: dict[str, Any], model_class: type, seed: int) -> list[tuple[float, dict[str, Tensor]]]:
    """The gradient norm, and this rank's gradients after clipping by it, in each step."""
    import smpar as smp

    smp.init(settings)
    model = smp.DistributedModel(made(model_class, seed + smp.dp_rank()), **TINY)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    part, parts = smp.dp_rank(), smp.dp_size()
    if settings["prescaled_batch"]:
        part, parts = smp.rdp_rank(), smp.rdp_size()
    train, seen = trainer(smp), []
    for step in range(STEPS):
        optimizer.zero_grad()
        train(model, *batch(seed, step, part, parts))
        norm = float(smp.clip_grad_norm_(model, 0.01))
        seen.append((norm, copy.deepcopy({n: p.grad for n, p in model.local_named_parameters()})))
        optimizer.step()
    return seen


def trained_alone(model_class: type, seed: int) -> list[tuple[float, dict[str, Tensor]]]:
    model = made(model_class, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(seed, step, 0, 1)
        F.mse_loss(model(x, True), y).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        seen.append((norm, copy.deepcopy({n: p.grad for n, p in model.named_parameters()})))
        optimizer.step()
    return seen


@pytest.mark.parametrize("prescaled", [JOINED, PRESCALED], ids=["joined", "prescaled"])
@pytest.mark.parametrize(
    ("ranks", "pp", "more"),
    [(2, 1, {}), (4, 2, {}), (4, 1, {}), (4, 1, {"placement_strategy": "TPD"}), (4, 2, {"pipeline": "zb"})],
    ids=["tp2", "tp2 pp2", "tp2 rdp2", "tp2 rdp2 spread", "tp2 pp2 zb"],
)
def test_a_whole_model_trains_as_in_one_process(
    pool: Pool, seed: int, ranks: int, pp: int, more: dict[str, Any], prescaled: bool
) -> None:
    want = trained_alone(Tied, seed)
    every = pool.run(ranks, trained, config(pp, prescaled, **more), Tied, seed)
    for step, (norm, gradients) in enumerate(want):
        assert {name for rank in every for name in rank[step][1]} == set(gradients)
        for rank in every:
            assert rank[step][0] == pytest.approx(norm, rel=1e-9)
            for name, gradient in rank[step][1].items():
                close(gradient, gradients[name], 1e-9, f"step {step}, {name}")


# ---- distributed parameters ------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Whole layers, and between them factors and linears of which each rank holds a slice of its own.

    It has all that a divided module has, but for the communication: programs with unequal shapes, costs, gradients.
    """

    def __init__(self, tp_rank: int, tp: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inner = nn.ModuleList(nn.Linear(WIDTH, LENGTH) for _ in self.layers)
        self.outer = nn.ModuleList(nn.Linear(LENGTH, WIDTH, bias=False) for _ in self.layers)
        self.scales = nn.ParameterList(torch.randn(LENGTH, WIDTH) for _ in self.layers)
        for p in (*self.inner.parameters(), *self.outer.parameters(), *self.scales):
            slicing = Slicing.even(tuple(p.shape).index(LENGTH), LENGTH, tp)
            p.data = slicing.take(p.data, tp_rank).clone()
            sliced(p, slicing)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for layer, scale, inner, outer in zip(self.layers, self.scales, self.inner, self.outer, strict=True):
            x = torch.tanh(layer(x)) * scale.sum(0)
            x = x + outer(torch.tanh(inner(x)))
        return x


def scaled(seed: int, tp_rank: int) -> Scaled:
    torch.manual_seed(seed)
    return Scaled(tp_rank, 2).double()


def sliced_training(
    settings: dict[str, Any], options: dict[str, Any], hook: bool, seed: int
) -> list[tuple[int, list[float], dict[str, Tensor]]]:
    """Tensor-parallel rank, norms (2 and inf), and gradients of this rank."""
    import smpar as smp

    smp.init(settings)
    model = smp.DistributedModel(scaled(seed + 100 * smp.rdp_rank(), smp.tp_rank()), **options)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(smp.get_dp_process_group(), allreduce_hook)
    local = dict(model.local_named_parameters())
    apart = dict(model.scaled_batch_reducer_named_parameters()), dict(model.default_reducer_named_parameters())
    assert {**apart[0], **apart[1]}.keys() == local.keys() and not apart[0].keys() & apart[1].keys()
    for name, p in local.items():
        held = (name in apart[0], model.is_distributed_parameter(p), model.is_scaled_batch_parameter(p))
        assert held == (not name.startswith("layers"),) * 3
    train, seen = trainer(smp), []
    for step in range(STEPS):
        model.zero_grad()
        train(model, *batch(seed, step, smp.dp_rank(), smp.dp_size()))
        norms = [float(smp.clip_grad_norm_(model, 1e9, kind)) for kind in (2.0, float("inf"))]
        seen.append((smp.tp_rank(), norms, copy.deepcopy({n: p.grad for n, p in model.local_named_parameters()})))
    return seen


@pytest.mark.parametrize(
    ("ranks", "pp", "options", "hook"),
    [
        (2, 1, TINY, False),
        (4, 1, TINY, False),
        (4, 1, {"gradient_as_bucket_view": True, **TINY}, False),
        (4, 1, {"overlapping_allreduce": False}, False),
        (4, 1, TINY, True),
        (4, 2, TINY, False),
        (8, 2, TINY, False),
    ],
    ids=["tp2", "tp2 rdp2", "views", "no overlap", "hook", "tp2 pp2", "tp2 pp2 rdp2"],
)
def test_slices_are_averaged_over_replicas_and_whole_parameters_over_all(
    pool: Pool, seed: int, ranks: int, pp: int, options: dict[str, Any], hook: bool
) -> None:
    every = pool.run(ranks, sliced_training, config(pp, JOINED), options, hook, seed)
    parts = ranks // pp  # of the batch: dp ranks; those with an even number are the first of their group
    for step in range(STEPS):
        by_part = []
        for part in range(parts):
            model = scaled(seed, part % 2)
            x, y = batch(seed, step, part, parts)
            F.mse_loss(model(x, True), y).backward()
            by_part.append({n: p.grad for n, p in model.named_parameters()})
        want = [
            {
                name: torch.stack([by_part[i][name] for i in range(parts) if i % 2 == tp or "layers" in name]).mean(0)
                for name in by_part[0]
            }
            for tp in range(2)
        ]
        counted = [g for name, g in want[0].items()] + [g for name, g in want[1].items() if "layers" not in name]
        flat = torch.cat([g.flatten() for g in counted])
        for rank in every:
            tp, norms, gradients = rank[step]
            assert norms == pytest.approx([float(flat.norm()), float(flat.abs().max())], rel=1e-9)
            for name, gradient in gradients.items():
                close(gradient, want[tp][name], 1e-9, f"step {step}, {name}")


def shared_buffers(seed: int) -> list[tuple[int, int, Tensor, Tensor]]:
    import smpar as smp

    smp.init(config(1, JOINED, microbatches=1))
    module = Normed().double()
    start, stop = bounds_of(LENGTH, 2)[smp.tp_rank()]
    own = torch.full((stop - start,), float(smp.rank()), dtype=torch.float64)
    module.register_buffer("own", sliced(own, Slicing.even(0, LENGTH, 2)))  # type: ignore[arg-type]
    model, train, seen = smp.DistributedModel(module), trainer(smp), []
    for step in range(2):
        model.own += 10 * smp.rdp_rank()  # takes its value from the first replica at the start of the next step
        train(model, *batch(seed, step, smp.dp_rank(), smp.dp_size()))
        assert model.is_distributed_buffer(model.own) and not model.is_distributed_buffer(model.norms[0].running_mean)
        seen.append((smp.tp_rank(), smp.rdp_rank(), model.own.clone(), model.norms[0].running_mean.clone()))
    return seen


def test_sliced_buffers_come_from_the_first_replica_s_same_slice(pool: Pool, seed: int) -> None:
    every = pool.run(4, shared_buffers, seed)
    for tp, rdp, own, _ in (rank[0] for rank in every):
        assert torch.equal(own, torch.full_like(own, tp + 10.0 * rdp))
    for tp, _, own, _ in (rank[1] for rank in every):
        assert len(own) == (3, 2)[tp] and torch.equal(own, torch.full_like(own, float(tp)))


# ---- the start of a step ---------------------------------------------------------------------------------------


def misuse(pp: int, prescaled: bool, kind: str, seed: int) -> None:
    import smpar as smp

    smp.init(config(pp, prescaled))
    model = smp.DistributedModel(made(Layers, seed), **TINY)
    x, y = batch(seed, 0, 0, 1)
    other = smp.tp_rank() == 1

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, number: int) -> None:
        model.backward(F.mse_loss(model(x, True), y))

    @smp.step
    def another(model: Any, x: Tensor, y: Tensor, number: int) -> None:
        model.backward(F.mse_loss(model(x, True), y))

    train(model, x, y, 1)
    if kind == "values":
        x = x + other
    elif kind == "values in the pipeline":
        x = x + smp.pp_rank()
    elif kind == "samples":
        x, y = x[: SAMPLES - 2 * other], y[: SAMPLES - 2 * other]
    elif kind == "few samples":
        x = x[:1] if other else x
    elif kind == "modes" and other:
        model.eval()
    with torch.set_grad_enabled(not (kind == "grad mode" and other)):
        (another if kind == "function" and other else train)(model, x, y, 1 + (kind == "constant" and other))


@pytest.mark.parametrize(
    ("pp", "prescaled", "kind", "error", "text"),
    [
        (1, PRESCALED, "values", "BatchesDisagree", "prescaled_batch = True"),
        (2, PRESCALED, "values", "BatchesDisagree", "smpar.rdp_rank()"),
        (1, PRESCALED, "samples", "BatchesDisagree", "[8, 6] on rank 0, torch.float64"),
        (1, JOINED, "samples", "ShapesDisagree", "argument x of misuse.<locals>.train: float64 [8, 6] on rank 0"),
        (2, JOINED, "samples", "ShapesDisagree", "float64 [6, 6] on rank 1"),
        (1, JOINED, "constant", "ShapesDisagree", "argument number"),
        (1, JOINED, "few samples", "ShapesDisagree", "float64 [1, 6] on rank 1"),
        (2, JOINED, "values in the pipeline", "RanksDisagree", "with other values"),
        (2, PRESCALED, "values in the pipeline", "RanksDisagree", "with other values"),
        (1, JOINED, "function", "RanksDisagree", "another"),
        (1, JOINED, "modes", "ProgramsDisagree", "modules in evaluation mode"),
        (2, JOINED, "modes", "ProgramsDisagree", "modules in evaluation mode"),
        (1, PRESCALED, "grad mode", "ProgramsDisagree", "grad mode"),
    ],
)
def test_a_group_that_is_called_unlike_is_told_so(
    pool: Pool, seed: int, pp: int, prescaled: bool, kind: str, error: str, text: str
) -> None:
    text = text.replace("torch.float64", "float64")
    for outcome in pool.attempt(2 * pp, misuse, pp, prescaled, kind, seed):
        assert (outcome.kind, outcome.error) == ("error", error), outcome
        assert text in outcome.text


# ---- draws -----------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout inside of modules, checkpointed ones too, and in glue."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)) for _ in range(4))
        self.recompute = recompute

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return F.dropout(x, 0.3)


Drawn = tuple[int, list[Tensor], dict[str, Tensor]]


def drawn(settings: dict[str, Any], recompute: bool, stepped: bool, seed: int) -> Drawn:
    """Tensor-parallel rank, outputs of two steps for inputs that are all alike, and the last gradients."""
    import smpar as smp

    smp.init(settings)
    torch.manual_seed(seed)
    model = smp.DistributedModel(Dropping(recompute).double())
    torch.manual_seed(seed + smp.rank())  # the first rank's counts
    x = torch.ones(4, WIDTH, dtype=torch.float64)

    def forward(model: Any, x: Tensor) -> Any:
        y = model(x, True) + (torch.rand(WIDTH, dtype=torch.float64) if stepped else 0.0)
        (model.backward if stepped else Tensor.backward)((y * y).mean())
        return y

    step = smp.step(forward) if stepped else forward
    outputs = []
    for _ in range(2):
        model.zero_grad()
        result = step(model, x)
        outputs.append((result.concat() if stepped else result).detach())
    return smp.tp_rank(), outputs, {n: p.grad for n, p in model.local_named_parameters()}


def same(some: Drawn, other: Drawn) -> bool:
    return all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(some[1], other[1], strict=True))


@pytest.mark.parametrize("prescaled", [JOINED, PRESCALED], ids=["joined", "prescaled"])
def test_draws_depend_on_the_tensor_parallel_rank_only_if_its_samples_are_its_own(
    pool: Pool, seed: int, prescaled: bool
) -> None:
    """They do not depend on the pipeline's degree, nor on recomputation; nor, all alike, on the group's size."""
    alone = pool.run(1, drawn, config(1, prescaled, tensor_parallel_degree=1), False, True, seed)
    first = pool.run(2, drawn, config(1, prescaled), False, True, seed)
    others = [
        *pool.run(2, drawn, config(1, prescaled), True, True, seed),
        *pool.run(4, drawn, config(2, prescaled), False, True, seed),
        *pool.run(4, drawn, config(2, prescaled), True, True, seed),
    ]
    assert same(first[0], first[1]) == same(alone[0], first[0]) == prescaled
    for outputs in (first[0][1], first[1][1]):
        assert not torch.equal(outputs[0], outputs[1])  # another draw in each step
    for other in others:
        tp, _, gradients = other
        assert same(other, first[tp])
        for name, gradient in gradients.items():
            close(gradient, first[0][2][name], 1e-9, name)


@pytest.mark.parametrize("prescaled", [JOINED, PRESCALED], ids=["joined", "prescaled"])
def test_draws_outside_of_steps(pool: Pool, seed: int, prescaled: bool) -> None:
    """A backward outside of any watching mode recomputes with the draws of the forward."""
    plain = pool.run(2, drawn, config(1, prescaled), False, False, seed)
    again = pool.run(2, drawn, config(1, prescaled), True, False, seed)
    assert same(plain[0], plain[1]) == prescaled
    for one, other in zip(plain, again, strict=True):
        assert same(one, other) and not torch.equal(one[1][0], one[1][1])
        for name, gradient in one[2].items():
            close(other[2][name], gradient, 1e-9, name)


# ---- without a step --------------------------------------------------------------------------------------------


def unstepped(settings: dict[str, Any], model_class: type, options: dict[str, Any], seed: int) -> int:
    """Train without a step beside torch's DistributedDataParallel; returns how much was compared."""
    import smpar as smp

    smp.init(settings)
    theirs = DistributedDataParallel(made(model_class, seed), process_group=smp.get_dp_process_group())
    ours = smp.DistributedModel(made(model_class, seed + smp.dp_rank()), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (theirs, ours)]
    compared = 0
    for step in range(4):
        x, y = batch(seed, step, smp.dp_rank(), smp.dp_size())
        for model in (theirs, ours):
            with model.no_sync() if step == 1 else contextlib.nullcontext():
                F.mse_loss(model(x, True), y).backward()
            if step == 2:  # once more before the gradients are used
                F.mse_loss(model(y, True), x).backward()
        for (name, p), q in zip(theirs.module.named_parameters(), ours.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            close(q.grad, p.grad, 1e-9, f"step {step}, {name}")
            compared += 1
        for (name, b), c in zip(theirs.module.named_buffers(), ours.buffers(), strict=True):
            close(c, b, 1e-9, f"step {step}, {name}")
        with torch.no_grad():
            close(ours(x, True), theirs.module(x, True), 1e-9, f"step {step}, result")
        if step != 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return compared


@pytest.mark.parametrize(
    ("ranks", "tp", "model", "options"),
    [
        (2, 1, Normed, TINY),
        (2, 2, Normed, TINY),
        (4, 2, Tied, {}),
        (2, 2, Tied, {"gradient_as_bucket_view": True, **TINY}),
    ],
)
def test_training_without_steps_equals_ddp(
    pool: Pool, seed: int, ranks: int, tp: int, model: type, options: dict[str, Any]
) -> None:
    settings = config(1, JOINED, tensor_parallel_degree=tp)
    assert min(pool.run(ranks, unstepped, settings, model, options, seed)) > 0


def sliced_unstepped(stepped: bool, seed: int) -> dict[str, Tensor]:
    """Of a step, and then of the same batch without one; gradients of the last."""
    import smpar as smp

    smp.init(config(1, JOINED, microbatches=1))
    model, train = smp.DistributedModel(scaled(seed, smp.tp_rank()), **TINY), trainer(smp)
    x, y = batch(seed, 0, smp.dp_rank(), smp.dp_size())
    train(model, x, y)
    model.zero_grad()
    if stepped:
        train(model, x, y)
    else:
        F.mse_loss(model(x, True), y).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_slices_are_averaged_without_steps_too(pool: Pool, seed: int) -> None:
    want, got = (pool.run(4, sliced_unstepped, stepped, seed) for stepped in (True, False))
    for mine, theirs in zip(want, got, strict=True):
        assert mine.keys() == theirs.keys() and len(mine) == 24
        for name, gradient in mine.items():
            close(theirs[name], gradient, 1e-9, name)


# ---- join ------------------------------------------------------------------------------------------------------


def uneven(counts: list[int], seed: int) -> dict[str, Tensor]:
    """Each rank of a tensor-parallel group of two replicas has so many batches."""
    import smpar as smp

    smp.init(config(1, JOINED, microbatches=1))
    model, train = smp.DistributedModel(scaled(seed, smp.tp_rank()), **TINY), trainer(smp)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    with model.join():
        for step in range(counts[smp.dp_rank()]):
            optimizer.zero_grad()
            train(model, *batch(seed, step, smp.dp_rank(), 4))
            optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def test_replicas_of_uneven_length_end_with_the_longest_one_s_parameters(pool: Pool, seed: int) -> None:
    every = pool.run(4, uneven, [3, 3, 1, 1], seed)
    models = [scaled(seed, tp) for tp in range(2)]
    for step in range(3):
        grads = []
        for part in range(4 if step < 1 else 2):
            model = models[part % 2]
            model.zero_grad()
            x, y = batch(seed, step, part, 4)
            F.mse_loss(model(x, True), y).backward()
            grads.append({n: p.grad for n, p in model.named_parameters()})
        with torch.no_grad():
            for tp, model in enumerate(models):
                for name, p in model.named_parameters():
                    own = slicing_of(p) is not None
                    mine = [g[name] for part, g in enumerate(grads) if not own or part % 2 == tp]
                    p -= 0.2 * torch.stack(mine).sum(0) / (2 if own else 4)
    for part, rank in enumerate(every):
        for name, p in models[part % 2].named_parameters():
            close(rank[name], p, 1e-9, name)


def test_ranks_of_a_group_with_unequal_numbers_of_batches_cannot_join(pool: Pool, seed: int) -> None:
    for outcome in pool.attempt(4, uneven, [2, 2, 2, 1], seed):
        assert outcome.error == "JoinError" and "1 of 2 tensor-parallel ranks" in outcome.text, outcome
