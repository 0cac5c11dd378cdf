"""The references are sharp: each case tells the bug it is about, simulated in one process, from a right training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn

from tests.parity import models, reference
from tests.parity.cases import CASES, Batch, Case
from tests.parity.reference import differences, train_alone


class MeanOfMeans(Case):
    """Every microbatch weighs the same, however few samples or tokens it holds."""

    def weight(self, target: Tensor) -> float:
        return 1.0


class SumOnFirst(torch.autograd.Function):
    """``chunk(2)`` whose backward gives the sum of both gradients to the first part."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: object, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a + b, torch.zeros_like(b)], -1)


class MixedGradients(models.GatedUnit):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = SumOnFirst.apply(self.proj(torch.tanh(self.inp(x))))
        return self.out(value * torch.sigmoid(gate))


class LostSkips(models.LongSkips):
    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            skips.append(x.detach())
            x = layer(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], -1)))
        return self.out(x)


def patched(patch: Callable[[nn.Module], object]) -> Callable[[Case], Case]:
    """The case with a model that ``patch`` changed."""

    def change(case: Case) -> Case:
        def build() -> nn.Module:
            model = case.model()
            patch(model)
            return model

        return replace(case, model=build)

    return change


def with_class(cls: type[nn.Module]) -> Callable[[Case], Case]:
    return patched(lambda model: setattr(model, "__class__", cls))


def batches(change: Callable[[Batch], Batch]) -> Callable[[Case], Case]:
    return lambda case: replace(case, batch=lambda step: change(case.batch(step)))


def mean_of_means(case: Case) -> Case:
    values = {f.name: getattr(case, f.name) for f in fields(case)}
    return MeanOfMeans(**{**values, "reference": "micro"})


def untie(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())  # type: ignore[union-attr,operator]


def unshare(model: nn.Module) -> None:
    model.layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.layers)  # type: ignore[union-attr]


def drop_the_remainder(model: nn.Module) -> None:
    model.layers = model.layers[:4]  # type: ignore[index]


BUGS: dict[str, tuple[str, Callable[[Case], Case]]] = {
    "copies drift apart": ("tied_embedding_head", patched(untie)),
    "gradients of two outputs summed": ("multi_output_node", with_class(MixedGradients)),
    "replicas not reduced": ("recurrent_shared_block", patched(unshare)),
    "mean of means": ("uneven_microbatches", mean_of_means),
    "remainder layers lost": ("uneven_layers_few_microbatches", patched(drop_the_remainder)),
    "cut to the first length": (
        "varying_seq_len",
        batches(lambda b: Batch((b.args[0][:, :6],), b.target[:, :6])),
    ),
    "mean of means over tokens": ("token_mean_ignore_index", mean_of_means),
    "labels of another microbatch": (
        "labels_kwarg_loss_inside",
        batches(lambda b: Batch(b.args, b.target, {"labels": b.target.roll(2, 0)})),
    ),
    "gradient of the skip lost": ("long_skip_connection", with_class(LostSkips)),
    "flags of frozen weights lost": ("lora_frozen_first_stages", patched(lambda m: m.requires_grad_(True))),
    "batch statistics of the whole batch": ("eval_train_eval", lambda case: replace(case, reference="whole")),
    "schedule lost": ("resume_new_partition", lambda case: replace(case, scheduler=None)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_bug_is_seen(bug: str) -> None:
    name, simulate = BUGS[bug]
    case = CASES[name]
    assert differences(train_alone(simulate(case)), train_alone(case), 10 * case.tolerance)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.reference == "whole"])
def test_microbatches_equal_the_whole_batch(name: str) -> None:
    """Else the case could not tell a right pipeline from a wrong one."""
    case = CASES[name]
    assert not differences(train_alone(replace(case, reference="micro")), train_alone(case), case.tolerance)


def test_clipping_by_stage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["clip_global_norm_tied"]
    want, clip = train_alone(case), nn.utils.clip_grad_norm_

    def by_stage(parameters: object, limit: float) -> Tensor:
        held = list(parameters)  # type: ignore[call-overload]
        return max(clip(held[:10], limit), clip(held[10:], limit))

    monkeypatch.setattr(reference.nn.utils, "clip_grad_norm_", by_stage)
    assert differences(train_alone(case), want, 10 * case.tolerance)


def test_evaluation_in_train_mode_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["eval_train_eval"]
    want = train_alone(case)
    monkeypatch.setattr(reference, "evaluating", lambda model: torch.no_grad())
    assert differences(train_alone(case), want, 10 * case.tolerance)


def test_ignored_autocast_is_seen() -> None:
    case = CASES["bf16_autocast_boundary"]
    assert train_alone(replace(case, autocast=None)).seen != train_alone(case).seen
