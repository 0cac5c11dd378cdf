"""Sixteen small trainings that break pipeline systems; each must equal a single process.

A case is data: a model, a batch for each step, a loss, and what is special about its training. ``reference.py``
trains it in one process, ``train.py`` under smpar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tests.parity import models
from tests.parity.models import BATCH, IGNORE, LENGTH, OUT, VOCAB, WIDTH, seeded, token_loss

STEPS = 3


@dataclass(frozen=True)
class Batch:
    args: tuple[Any, ...]
    target: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def decay_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups. The large eps: some gradients are zero but for rounding, which Adam would make full steps of."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) / 4)


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        promise: what must hold.
        model, batch, loss: builder of the model; step -> batch; (output, target) -> scalar, a mean over the samples.
        stages: pipeline degrees to try, besides 1.
        most: stages that it can be cut into.
        microbatches: a batch is split in so many.
        chain: one segment per stage and microbatch; else 1F1B's table does not apply.
        reference: what a single process does: the ``whole`` batch at once; a loop over ``micro``batches (batch
            statistics); ``self``: randomness is the runtime's own, results must not depend on the degree.
        optimizer, scheduler, clip, accumulate: of the training; ``clip`` is the largest global norm.
        autocast: dtype, or None.
        by_tokens: microbatches weigh by their valid tokens, not by samples.
        phases: train or eval steps, in order; ``eval_batch`` gives the latter's.
        tolerance: largest |a - b| / (1 + max |b|).
    """

    promise: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    stages: tuple[int, ...]
    most: int = 60
    microbatches: int = 4
    chain: bool = True
    reference: Literal["whole", "micro", "self"] = "whole"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    scheduler: Callable[[torch.optim.Optimizer], LambdaLR] | None = None
    clip: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    by_tokens: bool = False
    phases: tuple[str, ...] = ("train",) * STEPS
    eval_batch: Callable[[int], Batch] | None = None
    tolerance: float = 1e-9

    def weight(self, target: Tensor) -> float:
        """Of a microbatch in the mean."""
        return float((target != IGNORE).sum()) if self.by_tokens else float(target.shape[0])


def _generator(step: int, salt: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * salt + step)


def tokens(step: int, salt: int = 1, length: int = LENGTH) -> Batch:
    """ids and next ids, each [BATCH, length]."""
    ids = torch.randint(VOCAB, (BATCH, length + 1), generator=_generator(step, salt))
    return Batch((ids[:, :-1].contiguous(),), ids[:, 1:].contiguous())


def tokens_of_varying_length(step: int) -> Batch:
    return tokens(step, salt=2, length=(6, 9, 4)[step % 3])


def ragged_tokens(step: int) -> Batch:
    """Rows 4 and 5, which are microbatch 2 of 4, hold nothing to learn."""
    batch = tokens(step, salt=3)
    valid = torch.tensor([6, 6, 1, 2, 0, 0, 3, 5])
    return Batch(batch.args, batch.target.masked_fill(torch.arange(LENGTH) >= valid[:, None], IGNORE))


def labelled_tokens(step: int) -> Batch:
    batch = tokens(step, salt=4)
    return Batch(batch.args, batch.target, {"labels": batch.target})


def points(step: int, salt: int = 5, samples: int = BATCH, dtype: torch.dtype = torch.float64) -> Batch:
    """x [samples, WIDTH] and y [samples, OUT]."""
    g = _generator(step, salt)
    x = torch.randn(samples, WIDTH, generator=g, dtype=dtype)
    return Batch((x,), torch.randn(samples, OUT, generator=g, dtype=dtype))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.to(target.dtype), target)


def loss_inside(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return output[0]


tied_model = partial(seeded, models.LanguageModel, True)

CASES: dict[str, Case] = {
    "tied_embedding_head": Case(
        "A parameter of the first and the last stage gets the sum of both gradients; its copies stay bitwise equal.",
        tied_model, tokens, token_loss, (2, 4),
    ),
    "clip_global_norm_tied": Case(
        "The norm is that of all stages, a tied weight counted once.",
        tied_model, tokens, token_loss, (2, 4), clip=0.3,
    ),
    "multi_output_node": Case(
        "Two outputs of one autograd node, cut behind it, keep their own gradients.",
        partial(seeded, models.GatedUnit), points, mse, (2,), most=3,
    ),
    "recurrent_shared_block": Case(
        "A block called six times has one set of weights, with the sum of all gradients.",
        partial(seeded, models.shared_block), points, mse, (2, 3), chain=False, most=5,
    ),
    "uneven_microbatches": Case(
        "Seven samples in four microbatches give the mean over samples, not the mean of means.",
        partial(seeded, models.mlps, 4), partial(points, samples=7), mse, (2, 3),
    ),
    "uneven_layers_few_microbatches": Case(
        "Seven layers on four stages all run, with fewer microbatches than stages.",
        partial(seeded, models.mlps, 7), points, mse, (4,), microbatches=2,
    ),
    "varying_seq_len": Case(
        "A sequence length may change at any step.",
        partial(seeded, models.LanguageModel), tokens_of_varying_length, token_loss, (2, 4),
    ),
    "token_mean_ignore_index": Case(
        "Microbatches weigh by their valid tokens; one without any adds nothing, and no NaN.",
        partial(seeded, models.LanguageModel), ragged_tokens, token_loss, (2,), by_tokens=True,
    ),
    "outer_grad_accumulation": Case(
        "Gradients of two steps add up before one optimizer step.",
        partial(seeded, models.mlps, 4), partial(points, salt=6), mse, (2,), accumulate=2,
    ),
    "dropout_partition_invariance": Case(
        "Random draws do not depend on the degree or the schedule.",
        partial(seeded, models.dropout_stack), points, mse, (2, 4), reference="self",
    ),
    "labels_kwarg_loss_inside": Case(
        "A keyword input that only the last stage uses belongs to its microbatch.",
        partial(seeded, models.LossInside), labelled_tokens, loss_inside, (2, 4),
    ),
    "long_skip_connection": Case(
        "A tensor of the first stage used by the last gets both gradients; nothing hangs.",
        partial(seeded, models.LongSkips), points, mse, (2, 3, 4), chain=False,
    ),
    "lora_frozen_first_stages": Case(
        "Stages without anything to train, whose outputs need no gradient; frozen weights stay bitwise the same.",
        partial(seeded, models.Adapters), partial(tokens, salt=9), token_loss, (2, 3),
    ),
    "eval_train_eval": Case(
        "Evaluation comes first, with another batch size, and leaves batch statistics alone.",
        partial(seeded, models.batchnorm_stack), partial(points, salt=11), mse, (2, 4), reference="micro",
        phases=("eval", "train", "eval", "train", "train", "eval"), eval_batch=partial(points, salt=12, samples=12),
    ),
    "bf16_autocast_boundary": Case(
        "The caller's autocast holds on every stage; cuts carry the dtypes of a single process.",
        partial(seeded, models.Dtypes, dtype=torch.float32), partial(points, salt=13, dtype=torch.float32), mse, (2, 4),
        most=4, autocast=torch.bfloat16, tolerance=2e-2,
    ),
    "resume_new_partition": Case(
        "Training goes on from whole state dicts under another degree, optimizer and schedule included.",
        tied_model, tokens, token_loss, (2, 4), optimizer=decay_groups, scheduler=warm_up,
    ),
}  # fmt: skip
