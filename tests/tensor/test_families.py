"""Models of transformers, divided over a tensor-parallel group, equal the undivided ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

from tests.harness import Pool
from tests.tensor.dividing import compare, divided, loss_of
from tests.tensor.family_models import NAMED, PLANNED, Sizes, inputs_of, made

MODES = {
    f"{optimize}-{'prescaled' if prescaled else 'joined'}": {"optimize": optimize, "prescaled_batch": prescaled}
    for optimize in ("speed", "memory")
    for prescaled in (False, True)
}
NOT_SERVED = ("olmo2",)  # it norms over all heads


@contextmanager
def group_of(ranks: int, mode: str, dtype: torch.dtype = torch.float64) -> Iterator[bool]:
    """A tensor-parallel group of all ranks; gives whether each has samples of its own."""
    import smpar as smp

    smp.init({"tensor_parallel_degree": ranks, **MODES[mode]})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield mode.endswith("joined")
    finally:
        torch.set_default_dtype(before)


def kept_whole(model: nn.Module) -> list[str]:
    from smpar.nn.twins import WholeRegion

    return [name for name, module in model.named_modules() if isinstance(module, WholeRegion)]


# ---- training --------------------------------------------------------------------------------------------------


def all_equal(names: list[str], seed: int, ranks: int, mode: str, dtype: torch.dtype) -> None:
    with group_of(ranks, mode, dtype) as joined:
        for name in names:
            model = compare(name, seed, joined)
            compare(name, seed + 1, joined, embedded=True)
            assert bool(kept_whole(model)) == (name in NOT_SERVED), (name, kept_whole(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_known_families(pool: Pool, seed: int, ranks: int, mode: str) -> None:
    pool.run(ranks, all_equal, list(NAMED), seed, ranks, mode, torch.float64, timeout=240.0)


@pytest.mark.parametrize("ranks, mode", [(2, "memory-joined"), (4, "memory-prescaled"), (2, "speed-joined")])
def test_families_served_from_their_own_plan(pool: Pool, seed: int, ranks: int, mode: str) -> None:
    pool.run(ranks, all_equal, list(PLANNED), seed, ranks, mode, torch.float64, timeout=240.0)


def test_in_float32(pool: Pool, seed: int) -> None:
    pool.run(2, all_equal, ["gpt2", "llama", "t5"], seed, 2, "memory-joined", torch.float32)


def few_equal(seed: int, mode: str) -> None:
    with group_of(4, mode) as joined:
        for name in ("gpt2", "bert", "t5", "mixtral"):
            model = compare(name, seed, joined, heads=3, kv=3, experts=3)
            parts = ("att", "mlp") if name == "mixtral" else ("att",)
            whole = [path.lower() for path in kept_whole(model)]
            assert all(any(part in path for path in whole) for part in parts)
            assert all(any(part in path for part in parts) for path in whole)


@pytest.mark.parametrize("mode", ["memory-joined", "speed-prescaled"])
def test_fewer_heads_than_ranks_stay_whole(pool: Pool, seed: int, mode: str) -> None:
    pool.run(4, few_equal, seed, mode)


# ---- uses of a model -------------------------------------------------------------------------------------------


def weighed(value: Any) -> Tensor:
    """A sum over all numbers in it, each with a weight of its own."""
    if isinstance(value, (tuple, list)):
        return sum((weighed(v) for v in value), torch.zeros(()))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return torch.zeros(())
    return (value * torch.arange(value.numel(), dtype=value.dtype).cos().view(value.shape)).mean()


def with_all_outputs(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    given = {k: v for k, v in inputs.items() if k != "labels"}
    result = model(**given, output_hidden_states=True, output_attentions=True)
    return loss_of(model, inputs, result) + weighed(result.to_tuple())


def as_a_tuple(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    given = {k: v for k, v in inputs.items() if k != "labels"}
    return weighed(model(**given, output_hidden_states=True, output_attentions=True, return_dict=False))


def with_encoder(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """A decoder's loss, given states of an encoder."""
    states = torch.arange(2 * 5 * model.config.hidden_size).cos().view(2, 5, -1)  # type: ignore[union-attr]
    return loss_of(model, {**inputs, "encoder_hidden_states": states.double(), "use_cache": False})


def skipping(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(len(inputs))
    return loss_of(model, inputs)


def skip_layers(model: nn.Module) -> None:
    for part in model.modules():
        if hasattr(part, "layerdrop"):
            part.layerdrop = 0.5


def route_alike(model: nn.Module) -> None:
    """All tokens go to the same experts, so that some ranks get none."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.zeros_(parameter)


USES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all outputs": (
        ("gpt2", "bert", "t5", "bart", "vit", "llama", "mixtral"),
        {"call": with_all_outputs, "attention": "eager"},
    ),
    "outputs as a tuple": (
        ("gpt2", "bert"),
        {"call": as_a_tuple, "attention": "eager"},
    ),
    "checkpointing of layers": (
        ("gpt2", "t5", "bart", "mixtral"),
        {"alter": lambda model: model.gradient_checkpointing_enable()},
    ),
    "checkpointing, reentrant": (
        ("gpt2", "llama"),
        {"alter": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}), "embedded": True},
    ),
    "layers left out": (("bart",), {"call": skipping, "alter": skip_layers, "layers": 3}),
    "ranks without tokens": (("mixtral",), {"alter": route_alike, "experts": 5}),
    "cross attention": (("gpt2", "bert"), {"call": with_encoder, "decoder": True}),
}


def used(seed: int, ranks: int, mode: str) -> None:
    with group_of(ranks, mode) as joined:
        for what, (names, options) in USES.items():
            for name in names:
                try:
                    compare(name, seed, joined, **options)
                except Exception as error:
                    raise AssertionError(f"{what} of {name}") from error


@pytest.mark.parametrize("ranks, mode", [(2, "memory-joined"), (2, "speed-joined"), (4, "memory-prescaled")])
def test_uses_of_a_model(pool: Pool, seed: int, ranks: int, mode: str) -> None:
    pool.run(ranks, used, seed, ranks, mode, timeout=240.0)


def generate(seed: int, ranks: int, mode: str) -> None:
    with group_of(ranks, mode):
        for name in ("gpt2", "llama", "mixtral", "t5", "bart"):
            sizes = Sizes.draw(random.Random(seed), ranks)
            whole, model = made(name, seed, sizes).eval(), divided(made(name, seed, sizes)).eval()
            given = inputs_of(name, seed, sizes, 2)
            asked = {"input_ids": given["input_ids"], "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
            with torch.no_grad():
                got, want = model.generate(**asked), whole.generate(**asked)  # type: ignore[operator]
            assert got.tolist() == want.tolist(), (name, sizes)


@pytest.mark.parametrize("ranks, mode", [(2, "memory-prescaled"), (4, "memory-prescaled"), (2, "speed-prescaled")])
def test_greedy_generation(pool: Pool, seed: int, ranks: int, mode: str) -> None:
    pool.run(ranks, generate, seed, ranks, mode)


# ---- what it takes ---------------------------------------------------------------------------------------------


def counted(name: str, seed: int, layers: int) -> Counter[str]:
    """Collectives of one forward."""
    from smpar.nn import collectives

    sizes = Sizes.draw(random.Random(seed), 2, layers)
    model = divided(made(name, seed, sizes))
    with collectives.counting() as counter:
        loss_of(model, inputs_of(name, seed, sizes, 2))
    del counter["bytes"]
    return counter


def per_layer(names: list[str], seed: int, mode: str) -> list[Counter[str]]:
    with group_of(2, mode):
        return [counted(name, seed, 3) - counted(name, seed, 2) for name in names]


@pytest.mark.parametrize(
    "mode, want",
    [
        ("speed-prescaled", {"all_reduce": 2}),
        ("speed-joined", {"all_reduce": 2}),
        ("memory-prescaled", {"all_gather": 2, "reduce_scatter": 2}),
        ("memory-joined", {"all_gather": 2, "reduce_scatter": 2}),
    ],
)
def test_collectives_of_a_layer(pool: Pool, seed: int, mode: str, want: dict[str, int]) -> None:
    names = ["gpt2", "llama", "bert", "vit", "mixtral", "glm4_moe"]
    for run in pool.run(2, per_layer, names, seed, mode):
        assert run == [want] * len(names)


# ---- dropout ---------------------------------------------------------------------------------------------------


class Masks(TorchFunctionMode):
    """Keeps what dropout leaves out: of what the ranks have alike, and of what each has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.alike: list[Tensor] = []
        self.own: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from smpar.trace import draws

        result = func(*args, **(kwargs or {}))
        if func is F.dropout:
            (self.own if draws.shard() else self.alike).append((result == 0).detach())
        return result


def dropped(name: str, seed: int, mode: str) -> tuple[float, list[Tensor], list[Tensor]]:
    """The loss of a model with dropout, and its masks."""
    from smpar.trace import draws

    with group_of(2, mode):
        sizes = Sizes.draw(random.Random(seed), 2, drop=0.5, attention="eager")
        model = divided(made(name, seed, sizes))
        draws.seed_generators(seed)
        with Masks() as masks, draws.SeedMode():
            loss = loss_of(model, inputs_of(name, seed, sizes, 4))
    return float(loss.detach()), masks.alike, masks.own


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "bart"])
@pytest.mark.parametrize("mode", ["speed-prescaled", "memory-prescaled"])
def test_dropout(pool: Pool, seed: int, name: str, mode: str) -> None:
    """Masks are equal on what the ranks have alike, and so is the result; on what is divided they differ."""
    (loss, alike, own), (loss_too, alike_too, own_too) = pool.run(2, dropped, name, seed, mode)
    assert loss == loss_too
    assert alike and len(alike) == len(alike_too) and len(own) == len(own_too)
    assert all(torch.equal(a, b) for a, b in zip(alike, alike_too, strict=True))
    for a, b in zip(own, own_too, strict=True):
        if a.numel() > 20:  # else they may be equal by chance
            assert a.shape != b.shape or not torch.equal(a, b)
    assert own
