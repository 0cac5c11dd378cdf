"""An embedding and a language model's head with a divided vocabulary equal the undivided ones."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Pool

MODES = {"joined": {"prescaled_batch": False}, "prescaled": {"prescaled_batch": True}}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
Use = Callable[[Tensor, Tensor], Tensor]


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.view(-1, logits.shape[-1]), labels.reshape(-1)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()))


def thinned(labels: Tensor, by: int = -100) -> Tensor:
    return labels.masked_fill(labels % 3 == 0, by)


def written(logits: Tensor, labels: Tensor) -> Tensor:
    """A view sees what is written later into what it is a view of."""
    early = logits[:, 1:]
    logits[..., 3] = -2.0
    logits.masked_fill_(labels.unsqueeze(-1) % 2 == 0, 0.5)
    return F.cross_entropy(early.flatten(0, 1), labels[:, 1:].flatten()) + logits[..., :4].pow(2).mean()


def views_written(logits: Tensor, labels: Tensor) -> Tensor:
    """A write into a view of some words reaches what the view is of, and its other views."""
    early = logits[:, 1:]
    logits[..., :2].fill_(-1.0)
    with torch.no_grad():
        logits[..., 2:4].mul_(2.0)
    return F.cross_entropy(early.flatten(0, 1), labels[:, 1:].flatten()) + F.cross_entropy(*flat(logits, labels))


def detached_written(logits: Tensor, labels: Tensor) -> Tensor:
    logits.data[..., :3] = 0.5
    logits.detach()[..., 3:5].zero_()
    return F.cross_entropy(*flat(logits, labels))


def written_and_replaced(logits: Tensor, labels: Tensor) -> Tensor:
    logits[..., 1:4] -= 0.5
    logits[..., -1].clamp_(max=0.1)
    return F.cross_entropy(*flat(F.relu(logits, inplace=True), labels)) + logits.mean()


def trained_bias(logits: Tensor, labels: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, logits.shape[-1], dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(*flat(logits + bias, labels))
    return loss + torch.autograd.grad(loss, bias, retain_graph=True)[0].pow(2).sum()


def without_words(logits: Tensor, labels: Tensor) -> Tensor:
    """All but the last two words are impossible: no word of some ranks is possible."""
    words = logits.shape[-1]
    impossible = torch.where(torch.arange(words) < words - 2, -torch.inf, 0.0)
    return F.cross_entropy(*flat(logits + impossible, labels.clamp(min=words - 2)))


def scaled_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    early = logits[:, 1:]
    logits /= 3.0
    logits.mul_(2.0)
    return F.cross_entropy(early.flatten(0, 1), labels[:, 1:].flatten())


def hooked(logits: Tensor, labels: Tensor) -> Tensor:
    logits.register_hook(lambda grad: grad * 3.0)
    return F.cross_entropy(*flat(logits, labels))


class _Cubes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(3).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0].pow(2) * grad.unsqueeze(-1)


def biased(logits: Tensor, labels: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, logits.shape[-1]).view(1, -1)
    return F.cross_entropy(*flat(((0.5 * logits + bias) / 3 - 1).tanh() * 4, labels))


def of_some_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels % 2 == 1
    return F.cross_entropy(logits[chosen], labels[chosen], reduction="sum")


# What is done with logits [N, S, V] and labels [N, S]. The first ones need no more than sums over the group.
LOCAL: dict[str, Use] = {
    "mean": lambda x, y: F.cross_entropy(*flat(x, y)),
    "sum": lambda x, y: F.cross_entropy(*flat(x, y), reduction="sum"),
    "each": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"),
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), thinned(y)),
    "shifted": shifted,
    "ignored": lambda x, y: F.cross_entropy(*flat(x, thinned(y))),
    "ignored-each": lambda x, y: F.cross_entropy(*flat(x, thinned(y)), reduction="none"),
    "ignore_index": lambda x, y: F.cross_entropy(*flat(x, thinned(y, 1)), ignore_index=1),
    "all-ignored": lambda x, y: F.cross_entropy(*flat(x, torch.full_like(y, -100))),
    "smoothed": lambda x, y: F.cross_entropy(*flat(x, thinned(y)), label_smoothing=0.2),
    "smoothed-each": lambda x, y: F.cross_entropy(*flat(x, y), label_smoothing=0.1, reduction="none"),
    "module": lambda x, y: nn.CrossEntropyLoss(ignore_index=2)(x.flatten(0, 1), y.flatten()),
    "one-token": lambda x, y: F.cross_entropy(x[0, -1], y[0, -1]),
    "last": lambda x, y: F.cross_entropy(x[:, -1].double(), y[:, -1]),
    "unsqueezed": lambda x, y: F.cross_entropy(x.unsqueeze(1).squeeze(1)[:, None].flatten(0, 2), y.flatten()),
    "dims-added": lambda x, y: F.cross_entropy(x[None, :, -1, :, None][0, ..., 0], y[:, -1]),
    "biased": biased,
    "scaled-in-place": scaled_in_place,
    "without-words": without_words,
    "huge": lambda x, y: F.cross_entropy(*flat(x * 1e200, y)),
    "byte-labels": lambda x, y: F.cross_entropy(*flat(x, y.byte())),
    "detached": lambda x, y: F.cross_entropy(*flat(x, y)) * F.cross_entropy(*flat(x.detach(), y)),
}  # fmt: skip
GATHERING: dict[str, Use] = {
    "softmax": lambda x, y: x.softmax(-1).pow(2).sum(),
    "log_softmax": lambda x, y: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), y.flatten()),
    "max": lambda x, y: x.max(-1).values,
    "weights": lambda x, y: F.cross_entropy(*flat(x, y), weight=torch.linspace(1, 2, x.shape[-1]).double()),
    "probabilities": lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.ones_like(x).flatten(0, 1) / x.shape[-1]),
    "some-words": lambda x, y: x[..., 1:4].pow(2).sum(),
    "concatenated": lambda x, y: torch.cat([x, 2 * x], 1).pow(2).mean(),
    "z-loss": lambda x, y: F.cross_entropy(*flat(x, y)) + x.logsumexp(-1).pow(2).mean(),
    "written": written,
    "views-written": views_written,
    "detached-written": detached_written,
    "written-and-replaced": written_and_replaced,
    "iterated": lambda x, y: sum(F.cross_entropy(*pair) for pair in zip(x.unbind(1), y.unbind(1), strict=True)),  # type: ignore[misc,return-value]
    "trained-bias": trained_bias,
    "hooked": hooked,
    "custom": lambda x, y: _Cubes.apply(x),
}
SPARSE: dict[str, Use] = {  # which tokens differs from rank to rank: local only if all ranks have the same samples
    "of-some-tokens": of_some_tokens,
    "mask-and-dim": lambda x, y: F.cross_entropy(x[y % 2 == 1, :, None][..., 0], y[y % 2 == 1]),
    "by-index": lambda x, y: F.cross_entropy(x[torch.arange(len(x)), y[:, 0] % x.shape[1]], y[:, 0]),
}


class Scaled(nn.Embedding):
    """One that does more than look up."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


def reduced(gradient: Tensor) -> Tensor:
    """Of an undivided parameter: the mean over the ranks."""
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def check_parameters(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    from smpar.slices import slicing_of

    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        slicing, grad = slicing_of(parameter), reduced(wanted[name].grad)
        assert slicing is not None, name
        assert parameter.shape[0] < wanted[name].shape[0]
        want = slicing.take(grad, dist.get_rank())
        torch.testing.assert_close(parameter.grad, want, **CLOSE, msg=lambda m, n=name: f"{what}, {n}: {m}")


def setup(seed: int, ranks: int, config: dict[str, Any]) -> tuple[Any, random.Random, int]:
    """The group, what all ranks draw the same from, and the seed of this rank's samples."""
    import smpar as smp
    from smpar.nn.group import TensorGroup

    smp.init({"tensor_parallel_degree": ranks, **config})
    torch.manual_seed(seed)
    own = seed if config.get("prescaled_batch") else seed + dist.get_rank()
    return TensorGroup.current(), random.Random(seed), own


def compare_head(seed: int, ranks: int, config: dict[str, Any]) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Each use of the logits of a divided head, against an undivided one. Gives the collectives, forward, backward."""
    from smpar.nn import collectives
    from smpar.nn.logits import VocabularySlice
    from smpar.nn.vocabulary import divide_head

    group, draw, own = setup(seed, ranks, config)
    counts = {}
    for name, use in {**LOCAL, **GATHERING, **SPARSE}.items():
        features, words = draw.randint(3, 9), draw.randint(5 * ranks, 9 * ranks)
        whole = nn.Linear(features, words, bias=draw.random() < 0.5).double()
        ours = copy.deepcopy(whole)
        assert divide_head(ours, group)
        generator = torch.Generator().manual_seed(own)
        rows, length = draw.randint(2, 4), draw.randint(3, 6)
        x = (torch.randn(rows, length, features, dtype=torch.float64, generator=generator) * 2).requires_grad_()
        theirs = x.detach().clone().requires_grad_()
        labels = torch.randint(words, (rows, length), generator=generator)
        labels[0, 1] = 1  # something odd, for those that choose
        towards: Tensor | float = 1.0
        with collectives.counting() as forward:
            logits = ours(x)
            assert type(logits) is VocabularySlice
            assert (logits.shape, logits.requires_grad, logits.is_leaf) == ((rows, length, words), True, False)
            result = use(logits, labels)
        want = use(whole(theirs), labels)
        torch.testing.assert_close(result, want, **CLOSE, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        if want.dim():
            towards = torch.randn(want.shape, dtype=torch.float64, generator=generator)
        with collectives.counting() as backward:
            (result * towards).sum().backward()
        (want * towards).sum().backward()
        torch.testing.assert_close(x.grad, theirs.grad, **CLOSE, msg=lambda m, n=name: f"{n}, input: {m}")
        check_parameters(ours, whole, name)
        counts[name] = ({k: v for k, v in forward.items() if k != "bytes"}, dict(backward))
    return counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_are_used_as_those_of_one_process(pool: Pool, seed: int, ranks: int, mode: str) -> None:
    joined = mode == "joined"
    run = pool.run(ranks, compare_head, seed, ranks, MODES[mode], timeout=120.0)[0]
    for name in LOCAL if joined else {**LOCAL, **SPARSE}:
        losses = 2 if name == "detached" else 1
        # hidden states of all, and labels; never logits: the greatest, and a sum
        gathers = {"all_gather": 1 + losses} if joined else {}
        assert run[name][0] == {"all_reduce": 2 * losses, **gathers}, name
        assert "all_to_all" not in run[name][1], name
    for name in {**GATHERING, **SPARSE} if joined else GATHERING:
        assert run[name][0].get("all_to_all" if joined else "all_gather", 0) >= 1, name


def compare_embedding(seed: int, ranks: int, config: dict[str, Any]) -> None:
    """An embedding, with and without padding, alone and tied to a head."""
    from smpar.nn.vocabulary import divide_embedding, divide_head

    group, draw, own = setup(seed, ranks, config)
    for tied in (False, True):
        for kind, padding in ((nn.Embedding, None), (nn.Embedding, 0), (Scaled, -1)):
            words, features = draw.randint(5 * ranks, 9 * ranks), draw.randint(3, 9)
            whole = nn.Sequential(kind(words, features, padding_idx=padding), nn.Tanh())
            if tied:
                whole.append(nn.Linear(features, words))
                whole[2].weight = whole[0].weight
            whole.double()
            ours = copy.deepcopy(whole)
            assert divide_embedding(ours[0], group)
            if tied:
                assert divide_head(ours[2], group)
                assert ours[2].weight is ours[0].weight
            ids = torch.randint(words, (3, draw.randint(2, 5)), generator=torch.Generator().manual_seed(own))
            ids[0, 0], ids[0, 1] = 0, words - 1
            results = []
            for model in (ours, whole):
                result = model(ids)
                loss = F.cross_entropy(result.flatten(0, 1), ids.flatten()) if tied else result.pow(2).sum()
                loss.backward()
                results.append(loss)
            torch.testing.assert_close(*results, **CLOSE)
            check_parameters(ours, whole, f"tied {tied}, padding {padding}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_embedding_equals_the_undivided_one(pool: Pool, seed: int, ranks: int, mode: str) -> None:
    pool.run(ranks, compare_embedding, seed, ranks, MODES[mode])


def shapes(seed: int, config: dict[str, Any]) -> None:
    """Hidden states of other shapes than [N, S, H]; the head in a checkpoint."""
    from torch.utils.checkpoint import checkpoint

    from smpar.nn.vocabulary import divide_head

    group, draw, own = setup(seed, 2, config)
    words = draw.randint(8, 20)
    whole = nn.Linear(4, words).double()
    ours = copy.deepcopy(whole)
    divide_head(ours, group)
    torch.manual_seed(own)
    wraps: list[Callable[[nn.Module, Tensor], Tensor]] = [
        lambda head, x: head(x),
        lambda head, x: checkpoint(head, x, use_reentrant=False),
        lambda head, x: checkpoint(head, x, use_reentrant=True),
    ]
    for shape in ((4,), (5, 4), (0, 3, 4), (2, 3, 2, 4)):
        for wrap in wraps:
            x, labels = torch.randn(shape, dtype=torch.float64), torch.randint(words, shape[:-1])
            found = []
            for head in (ours, whole):
                given = x.clone().requires_grad_()
                logits = wrap(head, given)
                assert logits.shape == (*shape[:-1], words)
                loss = F.cross_entropy(*flat(logits, labels), reduction="sum")
                loss.backward()
                found.append((loss, given.grad))
            torch.testing.assert_close(*found, **CLOSE, msg=lambda m, s=shape: f"{s}: {m}")  # type: ignore[misc]
    check_parameters(ours, whole, "all shapes")


@pytest.mark.parametrize("mode", MODES)
def test_hidden_states_may_have_any_shape(pool: Pool, seed: int, mode: str) -> None:
    pool.run(2, shapes, seed, MODES[mode])


def half_precision(seed: int, config: dict[str, Any]) -> None:
    from smpar.nn.vocabulary import divide_head

    group, _, own = setup(seed, 2, config)
    features, words = 32, 1001
    whole = nn.Linear(features, words).bfloat16()
    ours = copy.deepcopy(whole)
    divide_head(ours, group)
    torch.manual_seed(own)
    x, labels = torch.randn(4, 6, features).bfloat16(), torch.randint(words, (24,))
    exact = F.cross_entropy(whole.double()(x.double()).flatten(0, 1), labels)
    loss = F.cross_entropy(ours(x).flatten(0, 1), labels)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), exact, rtol=0.01, atol=0)  # bfloat16 has 8 bits
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(ours(x).flatten(0, 1), labels)
        plain = F.cross_entropy(ours(x).smp_whole().flatten(0, 1), labels)
    assert loss.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_loses_no_more_than_torch_does(pool: Pool, seed: int, mode: str) -> None:
    pool.run(2, half_precision, seed, MODES[mode])


def without_gradients(seed: int, config: dict[str, Any]) -> None:
    from smpar.nn.vocabulary import divide_head

    group, _, own = setup(seed, 2, config)
    whole = nn.Linear(5, 11)
    ours = copy.deepcopy(whole)
    divide_head(ours, group)
    torch.manual_seed(own)
    x = torch.randn(3, 4, 5)
    logits = ours(x)
    if dist.get_rank() == 0:
        assert "[3, 4, 11]" in repr(logits)  # one rank alone may print them
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            logits = ours(x)
            assert type(logits) is Tensor
            torch.testing.assert_close(logits, whole(x))
            torch.testing.assert_close(ours(x[0]), whole(x[0]))


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_logits_are_whole(pool: Pool, seed: int, mode: str) -> None:
    pool.run(2, without_gradients, seed, MODES[mode])


def left_whole(seed: int) -> list[str]:
    from smpar.nn.vocabulary import divide_embedding, divide_head
    from smpar.slices import slicing_of

    group, _, _ = setup(seed, 2, {})
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smpar").addHandler(handler)
    odd = [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
    embeddings = [nn.Embedding(10, 4, **options) for options in odd]  # type: ignore[arg-type]
    assert not any(divide_embedding(embedding, group) for embedding in [*embeddings, nn.Embedding(1, 4)])
    assert not divide_head(nn.Linear(4, 1), group)
    assert all(slicing_of(embedding.weight) is None for embedding in embeddings)
    logging.getLogger("smpar").removeHandler(handler)
    return said


def test_what_stays_whole_is_told_why(pool: Pool, seed: int) -> None:
    said = pool.run(2, left_whole, seed)[0]
    reasons = ["max_norm", "scale_grad_by_freq", "sparse", "1 rows for 2 ranks", "1 rows for 2 ranks"]
    assert len(said) == len(reasons)
    for text, reason in zip(said, reasons, strict=True):
        assert reason in text


def out_of_range(seed: int, config: dict[str, Any]) -> None:
    from smpar.nn.vocabulary import divide_embedding, divide_head

    group, draw, _ = setup(seed, 2, config)
    head, embedding, words = nn.Linear(4, 9), nn.Embedding(9, 4), 9
    divide_head(head, group)
    divide_embedding(embedding, group)
    wrong = draw.choice([words, -1])
    for call in (lambda: F.cross_entropy(head(torch.randn(2, 4)), torch.tensor([0, wrong])),
                 lambda: embedding(torch.tensor([0, wrong]))):  # fmt: skip
        with pytest.raises(IndexError, match=f"{wrong} for .*, among 9 words"):
            call()
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(head(torch.randn(2, 4)), torch.tensor([0]))


@pytest.mark.parametrize("mode", MODES)
def test_words_outside_the_vocabulary_are_refused(pool: Pool, seed: int, mode: str) -> None:
    pool.run(2, out_of_range, seed, MODES[mode])
