"""What a user asks of replicas: when they average, who has which buffers, how sums are held, how hooks see them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Pool
from tests.replicas.models import WIDTH, Case, Layers, Normed, Sometimes, Tied, batch, close, make, train_both

TINY = {"bucket_cap_mb": 1e-4}


def config(degree: int, microbatches: int = 3, **more: Any) -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree, "microbatches": microbatches, **more}


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize(("degree", "model"), [(1, Layers), (2, Normed)])
def test_only_each_so_many_th_step_averages(pool: Pool, seed: int, degree: int, model: type, every: int) -> None:
    synced = tuple((i + 1) % every == 0 for i in range(2 * every))
    case = Case(model, config(degree), {**TINY, "backward_passes_per_step": every}, synced=synced, contexts=False)
    pool.run(2 * degree, train_both, case, seed)


def trainer(smp: Any) -> Any:
    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x, True), y)
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    return train


def counts_steps(degree: int, seed: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Gradients after each of several steps, as they come and averaged by hand."""
    import smpar as smp

    smp.init(config(degree))
    case = Case(Layers, options={"backward_passes_per_step": 3})
    model, train = smp.DistributedModel(make(case, seed), **case.options), trainer(smp)
    seen, averaged = [], []
    for number, kind in enumerate(["step", "evaluate", "step", "unsynced", "step", "step"]):
        x, y = batch(case, seed, number, smp.dp_rank())
        around = {"evaluate": torch.no_grad, "unsynced": model.no_sync}.get(kind, contextlib.nullcontext)
        with around():
            train(model, x, y)
        grads = [p.grad.clone() for p in model.local_parameters() if p.grad is not None]
        seen.append(grads)
        every = smp.allgather(grads, smp.DP_GROUP)
        averaged.append([sum(g) / len(every) for g in zip(*every, strict=True)])
    return seen, averaged


@pytest.mark.parametrize("degree", [1, 2])
def test_evaluation_does_not_count_as_a_step_and_no_sync_only_puts_off(pool: Pool, seed: int, degree: int) -> None:
    """Of every three backwards the last averages; it is inside ``no_sync`` here, so the next one outside does."""
    for seen, averaged in pool.run(2 * degree, counts_steps, degree, seed):
        equal = [
            bool(mine) and all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(mine, mean, strict=True))
            for mine, mean in zip(seen, averaged, strict=True)
        ]
        assert equal == [False, False, False, False, True, False]


def sums_of_half(degree: int, dtype: torch.dtype, seed: int, tied: bool, wide: bool) -> tuple[float, int]:
    """The largest difference from sums made in float32 by hand, in units of the type's precision, and how many."""
    import smpar as smp

    microbatches, steps = 8, 2
    smp.init(config(degree, microbatches, fp32_grad_accumulation=wide))
    case = Case(Tied if tied else Layers, dtype=dtype)
    reference, model = make(case, seed), smp.DistributedModel(make(case, seed), **TINY)
    train, worst, count = trainer(smp), 0.0, 0
    if tied:  # each use of the weight gives a gradient of its own
        reference.layers[4].weight = nn.Parameter(reference.layers[0].weight.detach().clone())
    parameters = dict(reference.named_parameters())
    sums = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    for step in range(steps):  # gradients stay, and pass through the parameters' type between the steps
        x, y = batch(case, seed, step, smp.dp_rank())
        sums = {name: total.to(dtype).float() for name, total in sums.items()}
        for part, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            loss = F.mse_loss(reference(part, True), target) / microbatches
            for name, grad in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
                sums[name] += grad.float()
        if tied:
            sums["layers.0.weight"] += sums["layers.4.weight"]
            sums["layers.4.weight"].zero_()
        every = smp.allgather(sums, smp.DP_GROUP)
        sums = {name: sum(one[name] for one in every) / len(every) for name in sums}
        train(model, x, y)
        for name, p in model.local_named_parameters():
            assert p.grad is not None and p.grad.dtype == dtype
            right = sums[name].to(dtype)
            unit = torch.finfo(dtype).eps * right.float().abs().clamp(min=1e-6)
            worst = max(worst, float(((p.grad.float() - right.float()).abs() / unit).max()))
            count += 1
    return worst, count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 1), (2, 2), (4, 2)], ids=["1x1", "1x2", "2x1", "2x2"])
def test_half_precision_gradients_are_summed_in_float32(
    pool: Pool, seed: int, ranks: int, degree: int, dtype: torch.dtype
) -> None:
    for worst, count in pool.run(ranks, sums_of_half, degree, dtype, seed, False, True):
        assert count and worst <= 1.01  # one rounding of a tie


def test_without_float32_sums_half_precision_loses_more(pool: Pool, seed: int) -> None:
    assert max(worst for worst, _ in pool.run(1, sums_of_half, 1, torch.bfloat16, seed, False, False)) > 1.5


@pytest.mark.parametrize("ranks", [2, 4])
def test_tied_half_precision_gradients_are_summed_in_float32(pool: Pool, seed: int, ranks: int) -> None:
    for worst, count in pool.run(ranks, sums_of_half, 2, torch.bfloat16, seed, True, True):
        assert count and worst <= 1.01


def tied_bits(seed: int, synced: bool) -> dict[str, Tensor]:
    import smpar as smp

    smp.init(config(2))
    case = Case(Tied, dtype=torch.float32)
    model, train = smp.DistributedModel(make(case, seed)), trainer(smp)
    for step in range(2):
        with contextlib.nullcontext() if synced else model.no_sync():
            train(model, *batch(case, seed, step, smp.dp_rank()))
    return {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}


@pytest.mark.parametrize("synced", [True, False])
def test_all_holders_of_a_tied_parameter_have_the_same_bits(pool: Pool, seed: int, synced: bool) -> None:
    """Ranks 0 to 2 are the three replicas of the first stage, 3 to 5 of the second (placement PDT)."""
    grads = [rank["layers.0.weight"] for rank in pool.run(6, tied_bits, seed, synced)]
    per_replica = [(grads[0], grads[1]), (grads[2], grads[3]), (grads[4], grads[5])]
    by_placement = [(grads[i], grads[i + 3]) for i in range(3)]
    alike = [all(torch.equal(a, b) for a, b in pairs) for pairs in (per_replica, by_placement)]
    assert any(alike)
    assert all(torch.equal(grads[0], g) for g in grads) == synced


def buffers(degree: int, seed: int, broadcast: bool) -> list[dict[str, Tensor]]:
    import smpar as smp

    smp.init(config(degree))
    case = Case(Normed)
    model, train = smp.DistributedModel(make(case, seed), broadcast_buffers=broadcast), trainer(smp)
    seen = []
    for step in range(2):
        train(model, *batch(case, seed, step, smp.dp_rank()))
    seen.append({n: b.clone() for n, b in model.local_named_buffers()})
    model.eval()
    with torch.no_grad():
        train(model, *batch(case, seed, 2, smp.dp_rank()))
    seen.append({n: b.clone() for n, b in model.local_named_buffers()})
    return seen


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("degree", [1, 2])
def test_buffers_are_the_first_replicas_when_the_next_step_starts(
    pool: Pool, seed: int, degree: int, broadcast: bool
) -> None:
    """After a step each replica has its own; an evaluating step changes none, but starts with the first one's."""
    ranks = pool.run(2 * degree, buffers, degree, seed, broadcast)
    for name in {name for rank in ranks for name in rank[0] if "running" in name}:
        holders = [rank for rank in ranks if name in rank[0]]
        after_training = [rank[0][name] for rank in holders]
        after_evaluation = [rank[1][name] for rank in holders]
        assert not all(torch.equal(after_training[0], b) for b in after_training)
        assert torch.equal(after_evaluation[0], after_training[0])
        assert all(torch.equal(after_training[0], b) for b in after_evaluation) == broadcast


def power(degree: int, seed: int) -> list[dict[str, Tensor]]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    import smpar as smp

    smp.init(config(degree))
    case = Case(Layers, dtype=torch.float32)
    model, train = smp.DistributedModel(make(case, seed)), trainer(smp)
    state = powerSGD_hook.PowerSGDState(
        smp.get_dp_process_group(), matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    seen = []
    for step in range(4):
        model.zero_grad()
        train(model, *batch(case, seed, step, smp.dp_rank()))
        seen.append({n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None})
    return seen


@pytest.mark.parametrize("degree", [1, 2])
def test_power_sgd_gives_matrices_of_rank_one(pool: Pool, seed: int, degree: int) -> None:
    ranks = pool.run(2 * degree, power, degree, seed)
    for step in range(4):
        for name in {name for rank in ranks for name in rank[step]}:
            first, *others = [rank[step][name] for rank in ranks if name in rank[step]]
            assert all(torch.allclose(first, other, atol=1e-7) for other in others)
            if first.dim() == 2:
                singular = torch.linalg.svdvals(first.double())
                assert (float(singular[1] / singular[0]) < 1e-5) == (step >= 2), name


class One(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def several_backwards(overlap: bool, seed: int) -> int:
    """Steps that start one backward or two, compared with both replicas' batches by hand; returns how many."""
    import smpar as smp

    smp.init({"microbatches": 2})
    torch.manual_seed(seed)
    module = One().double()
    model = smp.DistributedModel(module, overlapping_allreduce=overlap)

    @smp.step
    def train(model: Any, x: Tensor, twice: bool) -> None:
        model.backward(model(x).square().mean())
        if twice:
            model.backward(model(2 * x).mean())

    plan = [True, True, False, True, False, True]
    for step, twice in enumerate(plan):
        draws = [torch.Generator().manual_seed(seed + 10 * step + replica) for replica in range(2)]
        batches = [torch.randn(4, WIDTH, dtype=torch.float64, generator=g) for g in draws]
        model.zero_grad()
        train(model, batches[smp.dp_rank()], twice)
        grads = []
        for x in batches:
            loss = module(x).square().mean() + (module(2 * x).mean() if twice else 0)
            grads.append(torch.autograd.grad(loss, list(module.parameters())))
        for p, first, second in zip(module.parameters(), *grads, strict=True):
            assert p.grad is not None
            close(p.grad, (first + second) / 2, 1e-9, f"step {step}")
    return len(plan)


@pytest.mark.parametrize("overlap", [True, False])
def test_several_backwards_in_a_step(pool: Pool, seed: int, overlap: bool) -> None:
    """Steps with fewer than the first wait for their end; none is wrong."""
    assert pool.run(2, several_backwards, overlap, seed) == [6, 6]


def misuse(what: str, seed: int) -> tuple[str, str]:
    import smpar as smp

    smp.init({"microbatches": 2})
    case = Case(Sometimes)
    options: dict[str, Any] = {"cap": {"bucket_cap_mb": 0}, "every": {"backward_passes_per_step": 0}}.get(what, {})
    try:
        model = smp.DistributedModel(make(case, seed), **options)

        @smp.step
        def train(model: Any, x: Tensor) -> None:
            if what == "no_sync in a step":
                with model.no_sync():
                    pass
            if what == "hook in a step":
                model.register_comm_hook(None, lambda state, bucket: bucket)
            if what == "join in a step":
                with model.join():
                    pass
            model.backward(model(x, True).mean())

        if what == "two hooks":
            model.register_comm_hook(None, lambda state, bucket: bucket)
            model.register_comm_hook(None, lambda state, bucket: bucket)
        if what == "no hook":
            model.register_comm_hook(None, "allreduce")
        if what == "join in a join":
            with model.join(), model.join():
                pass
        train(model, torch.randn(4, WIDTH, dtype=torch.float64))
    except smp.SmparError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("cap", "ModelError", "bucket_cap_mb = 0"),
        ("every", "ModelError", "backward_passes_per_step = 0"),
        ("two hooks", "CommHookError", "a second one"),
        ("no hook", "CommHookError", "a str, which cannot be called"),
        ("hook in a step", "CommHookError", "inside a step"),
        ("no_sync in a step", "ModelError", "no_sync inside a step"),
        ("join in a step", "JoinError", "join inside a step"),
        ("join in a join", "JoinError", "join inside a join"),
    ],
)
def test_errors_name_the_rule_and_the_way_out(pool: Pool, seed: int, what: str, error: str, says: str) -> None:
    for kind, text in pool.run(2, misuse, what, seed):
        assert kind == error and says in text and "to fix:" in text


def hooked(returns: str, seed: int) -> tuple[str, str]:
    import smpar as smp

    smp.init({"microbatches": 2})
    model = smp.DistributedModel(make(Case(), seed))

    def hook(state: None, bucket: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result({"short": bucket.buffer()[1:], "text": "averages"}.get(returns))
        return {"nothing": None, "tensor": bucket.buffer()}.get(returns, future)

    model.register_comm_hook(None, hook)

    @smp.step
    def train(model: Any, x: Tensor) -> None:
        model.backward(model(x, True).mean())

    try:
        train(model, torch.randn(4, WIDTH, dtype=torch.float64))
    except smp.SmparError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("nothing", "a NoneType from hook"),
        ("tensor", "a Tensor from hook"),
        ("short", "numbers"),
        ("text", "a future of a str"),
    ],
)
def test_a_hook_that_returns_something_else_is_refused(pool: Pool, seed: int, returns: str, says: str) -> None:
    kinds, texts = zip(*pool.run(2, hooked, returns, seed), strict=True)
    assert set(kinds) <= {"WrongHookResult", "PeerFailed"}  # the first to notice stops the other
    assert any(kind == "WrongHookResult" and says in text for kind, text in zip(kinds, texts, strict=True))
