"""Registered classes are replaced by those that users give for them, with their weights; mistakes end in errors."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import Pool
from tests.tensor.asked import check_divided, started


class Mixer(nn.Module):
    """A user's layer: (x, scale) -> dict."""

    def __init__(self, width: int, inner: int, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": scale * self.down(self.up(x).relu())}


def divided_mixer() -> type[nn.Module]:
    """What the user writes for it, of smpar's parts: other arguments, another result."""
    import smpar as smp

    class DividedMixer(nn.Module):
        def __init__(self, sizes: tuple[int, int], bias: bool, name: str = "none") -> None:
            super().__init__()
            self.up = smp.nn.DistributedLinear(sizes[0], sizes[1], bias)
            self.down = smp.nn.DistributedLinear(sizes[1], sizes[0], bias)
            self.name = name

        def forward(self, scale: float, x: Tensor) -> Tensor:
            return scale * self.down(self.up(x).relu())

    return DividedMixer


def run_registered(seed: int, prescaled: bool) -> tuple[str, str]:
    import smpar as smp

    with started(prescaled_batch=prescaled):
        draw = random.Random(seed)
        Divided = divided_mixer()

        @smp.tp_register(
            Divided,
            init_hook=lambda width, inner, bias=True: ((), {"sizes": (width, inner), "bias": bias}),
            forward_hook=lambda x, scale=1.0: ((scale, x), {}),
            return_hook=lambda y: {"y": y},
        )
        class User(Mixer):
            pass

        width = draw.randint(4, 9)
        torch.manual_seed(seed)
        with smp.tensor_parallelism(name="given", unknown=1):
            model = nn.Sequential(User(width, draw.randint(5, 11), bias=draw.random() < 0.5))
        whole = copy.deepcopy(model)

        def call(m: Any, generator: torch.Generator) -> Tensor:
            return (m(torch.randn(3, 5, width, generator=generator))["y"] ** 3).mean()

        made = check_divided(model, whole, call, seed, not prescaled)
        return type(made[0]).__name__, made[0].name


@pytest.mark.parametrize("prescaled", [True, False], ids=["prescaled", "joined"])
def test_a_registered_class_is_replaced_with_its_weights(pool: Pool, seed: int, prescaled: bool) -> None:
    assert pool.run(2, run_registered, seed, prescaled) == [("DividedMixer", "given")] * 2


def run_weights(seed: int) -> tuple[list[str], list[bool]]:
    import smpar as smp

    with started() as said:
        kept = []
        for weights in (None, lambda state: {f"inner.{name}": value for name, value in state.items()}):

            class Plain(nn.Linear):
                pass

            class Divided(nn.Module):
                def __init__(self, width: int, inner: int) -> None:
                    super().__init__()
                    self.inner = smp.nn.DistributedLinear(width, inner)

                def forward(self, x: Tensor) -> Tensor:
                    return self.inner(x)

            smp.tp_register_with_module(Plain, Divided, weights=weights)
            x, plain = torch.randn(3, 4), Plain(4, 6)
            dist.broadcast(x, 0)
            for p in plain.parameters():
                dist.broadcast(p.data, 0)
            want = plain(x)
            model = nn.Sequential(plain)
            smp.set_tensor_parallelism(model)
            kept.append(torch.allclose(smp.DistributedModel(model)(x), want))
        return said, kept


def test_weights_of_other_names_are_translated_or_their_loss_is_said(pool: Pool, seed: int) -> None:
    for said, kept in pool.run(2, run_weights, seed):
        assert kept == [False, True]
        assert sum("weights of its own" in line for line in said) == 1


# -- mistakes --------------------------------------------------------------------------------------------------------


def registered(**hooks: Any) -> nn.Module:
    import smpar as smp

    given = {"init_hook": lambda width, inner, bias=True: (((width, inner), bias), {}),
             "forward_hook": lambda x, scale=1.0: ((scale, x), {}), "return_hook": lambda y: {"y": y}}  # fmt: skip

    class User(Mixer):
        pass

    smp.tp_register_with_module(User, divided_mixer(), **{**given, **hooks})
    return User(4, 6)


def float_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6)
    layer.linear1.float()
    return layer


def differing() -> nn.Module:
    return nn.Linear(4, 6 if dist.get_rank() else 7)


class FloatMixer(Mixer):
    def __init__(self, sizes: tuple[int, int], bias: bool) -> None:
        super().__init__(*sizes, bias)
        self.float()


def float_twin() -> nn.Module:
    import smpar as smp

    class User(Mixer):
        pass

    smp.tp_register_with_module(User, FloatMixer, init_hook=lambda w, i, bias=True: (((w, i), bias), {}))
    return User(4, 6)


MISTAKES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "init_hook takes others": (
        lambda: registered(init_hook=lambda inner: ((), {})), "HookMismatch", "init_hook(inner)",
    ),
    "init_hook gives no pair": (lambda: registered(init_hook=lambda *a, **k: a), "HookMismatch", "(args, kwargs)"),
    "init_hook gives others": (lambda: registered(init_hook=lambda *a, **k: (a, {"n": 1})), "HookMismatch", "'n'"),
    "forward_hook takes others": (lambda: registered(forward_hook=lambda: ((), {})), "HookMismatch", "forward_hook()"),
    "forward_hook gives others": (
        lambda: registered(forward_hook=lambda x, scale=1.0: ((x,), {})), "HookMismatch", "forward of DividedMixer",
    ),
    "return_hook takes others": (lambda: registered(return_hook=lambda: None), "HookMismatch", "return_hook()"),
    "no hook": (lambda: registered(return_hook=3), "RegistrationError", "return_hook = 3"),
    "weights give others": (lambda: registered(weights=lambda state: {}), "TwinWeights", "up.weight"),
    "twin of another dtype": (float_twin, "OtherDtype", "torch.float64, its twin FloatMixer of torch.float32"),
    "parts of two dtypes": (float_layer, "OtherDtype", "linear1.weight torch.float32"),
    "ranks differ": (differing, "ModelsDiffer", "weight [7, 4]"),
}  # fmt: skip


def run_mistakes() -> dict[str, tuple[str, str]]:
    import smpar as smp

    found = {}
    with started():
        for name, (make, _, _) in MISTAKES.items():
            try:
                model = make()
                smp.set_tensor_parallelism(model)
                smp.DistributedModel(model).module(torch.randn(2, 3, 4))
            except smp.SmparError as error:
                found[name] = type(error).__name__, str(error)
        with pytest.raises(smp.SmparError, match="asked for before"):
            model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4)))
            smp.set_tensor_parallelism(model.module[0])
    return found


def test_mistakes_end_in_errors_that_say_what_was_found(pool: Pool) -> None:
    for found in pool.run(2, run_mistakes):
        assert {name: error for name, (error, _) in found.items()} == {k: v[1] for k, v in MISTAKES.items()}
        for name, (_, _, words) in MISTAKES.items():
            assert words in found[name][1], found[name][1]


def run_too_few() -> str:
    import smpar as smp

    with pytest.raises(smp.SmparError) as caught:
        smp.init({"tensor_parallel_degree": 2})
    return str(caught.value)


def test_more_slices_than_ranks_are_refused(pool: Pool) -> None:
    (message,) = pool.run(1, run_too_few)
    assert "tensor_parallel_degree" in message
    assert "start 2 ranks" in message
