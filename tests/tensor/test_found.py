"""What users do with a divided model beside plain training: each once went wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.harness import Pool
from tests.tensor.family_models import Sizes, made

ROWS = 4  # samples of all ranks together
MODES: dict[str, dict[str, Any]] = {
    f"{optimize}-{'prescaled' if prescaled else 'joined'}": {"optimize": optimize, "prescaled_batch": prescaled}
    for optimize in ("speed", "memory")
    for prescaled in (False, True)
}


class Trainer:
    """A model under tensor parallelism, and its plain copy, trained side by side without steps, in float64.

    Args:
        alter: done to both before one is divided.
    """

    def __init__(self, name: str, mode: str, seed: int, alter: Callable[[Any], None] = lambda model: None) -> None:
        import smpar as smp

        smp.init({"tensor_parallel_degree": 2, **MODES[mode]})
        self.sizes = Sizes.draw(random.Random(seed), smp.tp_size(), layers=3)
        torch.set_default_dtype(torch.float64)
        try:
            whole = made(name, seed, self.sizes)
        finally:
            torch.set_default_dtype(torch.float32)
        alter(whole)
        self.whole, self.joined = whole, mode.endswith("joined")
        self.module = copy.deepcopy(whole)
        self.optimizers = [self.optimizer(m) for m in (self.module, self.whole)]
        self.ids = torch.randint(1, self.sizes.vocabulary, (ROWS, self.sizes.length))

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    def divide(self) -> None:
        import smpar as smp

        smp.set_tensor_parallelism(self.module)
        self.model = smp.DistributedModel(self.module)
        self.optimizers[0] = smp.DistributedOptimizer(self.optimizers[0])

    def step(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        """One of both; their losses must agree."""
        import smpar as smp

        parts = self.ids.chunk(smp.tp_size()) if self.joined else (self.ids,) * smp.tp_size()
        got = loss(self.model, parts[smp.tp_rank()])
        got.backward()
        wanted = [loss(self.whole, part) / len(parts) for part in parts]
        sum(wanted[1:], wanted[0]).backward()
        torch.testing.assert_close(got, wanted[smp.tp_rank()] * len(parts), rtol=1e-9, atol=1e-12)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """Parameters must be those of the plain copy."""
        state = self.model.state_dict()
        for name, value in self.whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def plain(model: Any, ids: Tensor) -> Tensor:
    return loss_of(model(input_ids=ids).logits, ids)


# ---- what is trained ---------------------------------------------------------------------------------------------


def train_in_turns(name: str, mode: str, seed: int) -> None:
    """At each step, another half of the parameters is frozen: some have been since before the division."""

    def freeze(model: nn.Module, turn: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 2 == turn % 2)

    trainer = Trainer(name, mode, seed, lambda model: freeze(model, 0))
    trainer.divide()
    for turn in range(3):
        for model in (trainer.module, trainer.whole):
            freeze(model, turn)
        trainer.step(plain)
    trainer.check()


def train_on(name: str, mode: str, seed: int) -> None:
    """The optimizer has stepped before the division, and there are gradients."""
    trainer = Trainer(name, mode, seed)
    for model, optimizer in zip((trainer.module, trainer.whole), trainer.optimizers, strict=True):
        for _ in range(2):
            optimizer.step()  # of the gradients of the step before
            plain(model, trainer.ids).backward()
    trainer.divide()
    trainer.step(plain)
    trainer.check()


class Adapted(nn.Module):
    """A linear with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return result


class AdaptedLinear(nn.Linear):
    """The same in one module: it has a weight as a linear has it."""

    down: nn.Parameter
    up: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


def adapt(model: nn.Module) -> None:
    """Adapters around columns, and in rows."""
    for part in list(model.modules()):
        if hasattr(part, "q_proj"):
            part.q_proj = Adapted(part.q_proj)  # type: ignore[arg-type]
        if hasattr(part, "down_proj"):
            linear: Any = part.down_proj
            linear.__class__ = AdaptedLinear
            linear.down = nn.Parameter(torch.randn(2, linear.in_features, dtype=torch.float64))
            linear.up = nn.Parameter(torch.randn(linear.out_features, 2, dtype=torch.float64))


def train_adapted(name: str, mode: str, seed: int) -> None:
    trainer = Trainer(name, mode, seed, adapt)
    trainer.divide()
    trainer.step(plain)
    trainer.check()


def share(model: Any) -> None:
    """The last layer is the first one again."""
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    layers[2] = layers[0]


def train_shared(name: str, mode: str, seed: int) -> None:
    trainer = Trainer(name, mode, seed, share)
    trainer.divide()
    trainer.step(lambda model, ids: loss_of(model(input_ids=ids, use_cache=False).logits, ids))
    trainer.check()


TRAINED: dict[str, tuple[Callable[[str, str, int], None], str]] = {
    "parameters frozen in turns": (train_in_turns, "gpt2"),
    "an optimizer that stepped before": (train_on, "llama"),
    "adapters": (train_adapted, "llama"),
    "a layer in two places": (train_shared, "gpt2"),
}


def trained(what: str, mode: str, seed: int) -> None:
    torch.manual_seed(seed)
    train, name = TRAINED[what]
    train(name, mode, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", TRAINED)
def test_training_as_of_the_undivided_model(pool: Pool, seed: int, what: str, mode: str) -> None:
    pool.run(2, trained, what, mode, seed)


# ---- how it is called --------------------------------------------------------------------------------------------


def positions_of_all(model: Any, ids: Tensor) -> Tensor:
    return loss_of(model(input_ids=ids, position_ids=torch.arange(ids.shape[1])).logits, ids)


def embedded_outside(model: Any, ids: Tensor) -> Tensor:
    return loss_of(model(inputs_embeds=model.get_input_embeddings()(ids) * 1.5).logits, ids)


def written_views(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    logits[..., 7:].mul_(2.0)
    logits.select(-1, 3).fill_(-5.0)
    return loss_of(logits, ids)


CALLS = {f.__name__: f for f in (positions_of_all, embedded_outside, written_views)}


def train_called(call: str, mode: str, seed: int) -> None:
    torch.manual_seed(seed)
    trainer = Trainer("gpt2", mode, seed)
    trainer.divide()
    trainer.step(CALLS[call])
    trainer.check()
    copied = copy.deepcopy(trainer.module).eval()
    with torch.no_grad():
        want = trainer.module.eval()(input_ids=trainer.ids).logits
        torch.testing.assert_close(copied(input_ids=trainer.ids).logits, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_calls(pool: Pool, seed: int, call: str, mode: str) -> None:
    pool.run(2, train_called, call, mode, seed)


def unequal(shapes: bool, mode: str, seed: int) -> None:
    """Ranks call the model without a step, with unequal shapes or values."""
    import smpar as smp

    torch.manual_seed(seed)
    trainer = Trainer("gpt2", mode, seed)
    trainer.divide()
    ids = trainer.ids.clone()
    if smp.tp_rank() == 1:
        ids = ids[:, 1:] if shapes else ids % (trainer.sizes.vocabulary - 1) + 1
    plain(trainer.model, ids).backward()


@pytest.mark.parametrize(
    ("shapes", "mode", "error"),
    [
        (True, "memory-joined", "ShapesDisagree"),
        (True, "speed-prescaled", "BatchesDisagree"),
        (False, "memory-prescaled", "BatchesDisagree"),
    ],
)
def test_unequal_calls_without_a_step_are_refused(pool: Pool, seed: int, shapes: bool, mode: str, error: str) -> None:
    for outcome in pool.attempt(2, unequal, shapes, mode, seed):
        assert outcome.error == error and "argument input_ids of GPT2LMHeadModel" in outcome.text, outcome
