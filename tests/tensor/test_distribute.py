"""What is divided is what was asked for, and computes the same: contexts, families, pairs, shared weights."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.harness import ROOT, Pool
from tests.tensor.asked import Call, check_divided, outermost_twins, started

Build = Callable[[random.Random], tuple[nn.Module, Call]]


class Block(nn.Module):
    """A user's MLP, which calls its linears by hand."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Gated(nn.Module):
    """Two linears of one input, whose results are multiplied."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Softmaxed(nn.Module):
    """Two linears between which features depend on each other: no pair."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class Kept(nn.Module):
    """What is between the linears is the result, too: no pair."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        return self.down(hidden) + hidden.mean(-1, keepdim=True)


class Branching(nn.Module):
    """torch.fx cannot see it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden.relu() if hidden.numel() > 3 else hidden)


class Tied(nn.Module):
    """A small language model in plain torch, whose output layer has the embedding's weight."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(vocabulary, width), Block(width, 3 * width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)))


def hidden_loss(width: int) -> Call:
    def call(model: Any, draw: torch.Generator) -> Tensor:
        return (model(torch.randn(3, 5, width, generator=draw)) ** 3).mean()

    return call


def blocks(cls: Any) -> Build:
    def build(draw: random.Random) -> tuple[nn.Module, Call]:
        width, inner = draw.randint(4, 9), draw.randint(5, 11)
        return cls(width, inner), hidden_loss(width)

    return build


def sequential(draw: random.Random) -> tuple[nn.Module, Call]:
    width, inner = draw.randint(4, 9), draw.randint(5, 11)
    layers = [nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.0), nn.Linear(inner, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3)), hidden_loss(width)


def next_token_loss(logits_of: Callable[[Tensor], Tensor], vocabulary: int, generator: torch.Generator) -> Tensor:
    ids = torch.randint(1, vocabulary, (3, 6), generator=generator)
    return F.cross_entropy(logits_of(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tied(draw: random.Random) -> tuple[nn.Module, Call]:
    vocabulary = draw.randint(11, 17)
    return Tied(vocabulary, draw.randint(4, 9)), lambda m, generator: next_token_loss(m, vocabulary, generator)


def encoder(draw: random.Random) -> tuple[nn.Module, Call]:
    width = 4 * draw.randint(2, 4)
    layer = nn.TransformerEncoderLayer(width, 4, draw.randint(5, 11), 0.0, batch_first=True)
    return nn.Sequential(nn.Linear(width, width), nn.TransformerEncoder(layer, 2)), hidden_loss(width)


def gpt2(draw: random.Random) -> tuple[nn.Module, Call]:
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary, heads = draw.randint(20, 30), draw.randint(2, 4)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_positions=8, n_embd=4 * heads, n_layer=2, n_head=heads, resid_pdrop=0,
            embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    return model, lambda m, generator: next_token_loss(lambda ids: m(input_ids=ids).logits, vocabulary, generator)


def t5(draw: random.Random) -> tuple[nn.Module, Call]:
    from transformers import T5Config, T5ForConditionalGeneration

    vocabulary = draw.randint(20, 30)
    config = T5Config(vocab_size=vocabulary, d_model=8, d_kv=4, d_ff=9, num_layers=1, num_decoder_layers=1, num_heads=3,
                      dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)  # fmt: skip

    def call(model: Any, generator: torch.Generator) -> Tensor:
        return next_token_loss(lambda ids: model(input_ids=ids, decoder_input_ids=ids).logits, vocabulary, generator)

    return T5ForConditionalGeneration(config), call


def example() -> Any:
    """The names in examples/new_family.py."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "new_family.py"), run_name="example"))


def rook(draw: random.Random) -> tuple[nn.Module, Call]:
    vocabulary, heads = draw.randint(11, 17), draw.randint(2, 5)
    model = example().RookForPrediction(vocabulary, 4 * heads, heads, draw.randint(5, 11))
    return model, lambda m, generator: next_token_loss(m, vocabulary, generator)


def rook_with_a_whole_embedding(draw: random.Random) -> tuple[nn.Module, Call]:
    import smpar as smp

    made = rook(draw)
    plan = {name: style for name, style in example().ROOK.plan.items() if name != "embed"}
    smp.nn.register_family("Rook", smp.nn.Family(plan, counts=("heads",)))
    return made


def everything(smp: Any, model: Any) -> None:
    smp.set_tensor_parallelism(model)


def only(path: str) -> Callable[[Any, Any], None]:
    return lambda smp, model: smp.set_tensor_parallelism(model.get_submodule(path))


def all_but(path: str) -> Callable[[Any, Any], None]:
    def mark(smp: Any, model: Any) -> None:
        smp.set_tensor_parallelism(model)
        smp.set_tensor_parallelism(model.get_submodule(path), False)

    return mark


PAIR = {"up": "PairColumns", "down": "PairRows"}
LONE = {"up": "WholeLinear", "down": "WholeLinear"}
IN_BLOCK = {f"block.{name}": twin for name, twin in PAIR.items()}
# what is made, what of it is asked for, and the twins that there are to be (with no parts of twins)
CASES: dict[str, tuple[Build, Callable[[Any, Any], None], dict[str, str]]] = {
    "block": (blocks(Block), everything, PAIR),
    "gated": (blocks(Gated), everything, {"gate": "PairColumns", **PAIR}),
    "sequential": (sequential, everything, {"0": "PairColumns", "3": "PairRows", "5": "WholeLinear"}),
    "softmaxed": (blocks(Softmaxed), everything, LONE),
    "kept": (blocks(Kept), everything, LONE),
    "branching": (blocks(Branching), everything, LONE),
    "tied": (tied, everything, {"embed": "VocabularyEmbedding", "head": "VocabularyHead", **IN_BLOCK}),
    "tied, head whole": (tied, all_but("head"), IN_BLOCK),
    "encoder": (encoder, everything, {"0": "WholeLinear", "1": "TorchLayer"}),
    "encoder, a part of it whole": (
        encoder, all_but("1.layers.0.dropout"), {"0": "WholeLinear", "1.layers.1": "TorchLayer"},
    ),
    "gpt2": (gpt2, everything, {"transformer": "Outermost", "lm_head": "VocabularyHead"}),
    "gpt2 without head": (gpt2, only("transformer"), {"transformer": "Outermost"}),
    "new family": (rook, everything, {"model": "Outermost", "head": "VocabularyHead"}),
    "new family, embedding whole": (rook_with_a_whole_embedding, everything, {"model": "Outermost"}),
    "t5 encoder": (t5, only("encoder"), {"encoder": "Outermost"}),
}  # fmt: skip


def run_cases(seed: int, config: dict[str, Any]) -> dict[str, dict[str, str]]:
    import smpar as smp

    found = {}
    with started(**config):
        for name, (build, mark, _) in CASES.items():
            torch.manual_seed(seed)
            model, call = build(random.Random(seed))
            whole = copy.deepcopy(model)
            if dist.get_rank():  # the first rank's weights are everybody's
                for p in model.parameters():
                    p.data += 1.0
            mark(smp, model)
            found[name] = outermost_twins(check_divided(model, whole, call, seed, not config["prescaled_batch"]))
    return found


@pytest.mark.parametrize("prescaled", [True, False], ids=["prescaled", "joined"])
def test_what_is_asked_for_is_divided_and_computes_the_same(pool: Pool, seed: int, prescaled: bool) -> None:
    config = {"prescaled_batch": prescaled, "optimize": random.Random(seed).choice(["speed", "memory"])}
    for found in pool.run(2, run_cases, seed, config, timeout=240.0):
        assert found == {name: twins for name, (_, _, twins) in CASES.items()}


def run_example() -> list[float]:
    out = io.StringIO()
    sys.argv = ["new_family.py", "--steps", "21"]
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(ROOT / "examples" / "new_family.py"), run_name="__main__")
    return [float(line.split()[3]) for line in out.getvalue().splitlines() if line.startswith("step")]


def test_the_example_of_a_new_family_learns(pool: Pool) -> None:
    losses, others = pool.run(2, run_example)
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    assert not others  # rank 0 prints


# -- contexts --------------------------------------------------------------------------------------------------------


def run_contexts() -> tuple[dict[str, str], list[str]]:
    import smpar as smp

    with started() as said:
        model = nn.ModuleDict()
        with smp.tensor_parallelism():
            model["on"] = Block(4, 6)
            with smp.tensor_parallelism(False):
                model["off"] = Block(4, 6)
                with smp.model_creation(tensor_parallelism=True, dtype=torch.float32):
                    model["on again"] = nn.Linear(4, 6)
            with smp.tensor_parallelism(enabled=False):
                part = nn.Linear(4, 4)
            model["around"] = nn.TransformerEncoderLayer(4, 2, 6)
            model["around"].linear1 = part
            model["small"] = nn.Linear(1, 1)
        model["outside"] = nn.Linear(4, 6)
        assert model["on again"].weight.dtype == torch.float32
        assert model["outside"].weight.dtype == torch.float64
        wrapped = smp.DistributedModel(model)
        assert {type(m).__name__ for m in wrapped.distributed_modules()} == {"Linear"}
        return outermost_twins(model), said


def test_the_innermost_context_decides_and_a_whole_part_keeps_what_is_around_it_whole(pool: Pool) -> None:
    for twins, said in pool.run(2, run_contexts):
        assert twins == {"on.up": "PairColumns", "on.down": "PairRows", "on again": "WholeLinear"}
        around, small = (next(line for line in said if name in line) for name in ("around", "small"))
        assert "linear1 (Linear) was not asked for" in around
        assert "fewer features than there are ranks" in small


def run_unasked() -> list[str]:
    import smpar as smp

    with started() as said:
        smp.DistributedModel(nn.Linear(4, 4))
        return said


def test_a_model_of_which_nothing_is_divided_is_warned_of(pool: Pool) -> None:
    for said in pool.run(2, run_unasked):
        assert any("smpar.set_tensor_parallelism(module)" in line for line in said)


def run_alone() -> bool:
    import smpar as smp

    with started():
        model = Block(4, 6)
        before = [(type(m), id(p)) for m in model.modules() for p in m.parameters(recurse=False)]
        smp.set_tensor_parallelism(model)
        smp.DistributedModel(model)
        return before == [(type(m), id(p)) for m in model.modules() for p in m.parameters(recurse=False)]


def test_alone_nothing_changes(pool: Pool) -> None:
    assert pool.run(1, run_alone) == [True]


def run_shared() -> tuple[dict[str, str], list[str]]:
    import smpar as smp

    with started() as said:
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("one", "two", "three")})
        model["two"].weight = model["one"].weight
        smp.set_tensor_parallelism(model)
        smp.DistributedModel(model)
        return outermost_twins(model), said


def test_modules_that_share_a_weight_stay_whole(pool: Pool) -> None:
    for twins, said in pool.run(2, run_shared):
        assert twins == {"three": "WholeLinear"}
        assert any("one (Linear)" in line and "shares a weight with two" in line for line in said)
