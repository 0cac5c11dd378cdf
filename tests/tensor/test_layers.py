"""The layers of smpar.nn, divided, are the layers that one process has."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Pool
from tests.tensor import undivided
from tests.tensor.divided import Case, run_cases

MODES = [
    {"prescaled_batch": prescaled, "optimize": optimize}
    for prescaled in (True, False)
    for optimize in ("speed", "memory")
]


def layer_cases(draw: random.Random, ranks: int) -> dict[str, Case]:
    """Each layer with options of today's models, in random sizes."""
    import smpar.nn as nn
    from smpar.nn.group import TensorGroup

    heads, size, length, other = (
        ranks + draw.randint(0, 2),
        2 * draw.randint(1, 3),
        draw.randint(4, 9),
        draw.randint(3, 6),
    )
    hidden, vocabulary = draw.randint(7, 12), draw.randint(ranks, 40)
    sizes: dict[str, Any] = {
        "num_attention_heads": heads, "attention_head_size": size, "hidden_size": hidden, "num_layers": 2,
        "intermediate_size": draw.randint(ranks, 3 * ranks), "vocab_size": vocabulary, "num_positions": length + 2,
        "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0,
    }  # fmt: skip
    gpt = {"pre_layernorm": True, "post_layernorm": False, "causal_mask_size": 64}
    llama = {
        **gpt, "norm": "rmsnorm", "rotary_dim": size, "gpt_neox_type_rotary": True, "gated_mlp": True,
        "activation": "silu", "num_attention_heads": 2 * heads, "num_key_value_heads": heads,
        "use_qkv_bias": False, "use_attn_dense_bias": False, "use_mlp_bias": False,
    }  # fmt: skip
    gptj = {**gpt, "rotary_dim": 2, "rotary_base": 500.0}

    def state(rows: int) -> Tensor:
        return torch.randn(rows, length, hidden)

    def states(rows: int) -> Tensor:
        return torch.randn(rows, other, hidden)

    def mask(rows: int, length: int = length) -> Tensor:
        hidden = (torch.rand(rows, 1, 1, length) < 0.3) & (torch.arange(length) > 0)
        return torch.zeros(rows, 1, 1, length).masked_fill(hidden, -1e4)

    def ids(rows: int, count: int = vocabulary) -> Tensor:
        return torch.randint(0, count, (rows, length))

    def attention(**more: Any) -> Case:
        o = {**sizes, **more}
        if more.get("cross_attention"):
            return Case(
                lambda: nn.DistributedAttentionLayer(**o),
                lambda w, x, s, m: undivided.attention(w, o, x, s, m),
                lambda rows: [state(rows), states(rows), mask(rows, other)],
                lambda module, *given: module(given),
            )
        return Case(
            lambda: nn.DistributedAttentionLayer(**o),
            lambda w, x, m: undivided.attention(w, o, x, None, m),
            lambda rows: [state(rows), mask(rows)],
            lambda module, *given: module(given),
        )

    def output(**more: Any) -> Case:
        o = {**sizes, **more}
        return Case(
            lambda: nn.DistributedTransformerOutputLayer(**o),
            lambda w, x: undivided.output(w, o, x),
            lambda rows: [state(rows)],
        )

    def layer(kind: Any, truth: Any, **more: Any) -> Case:
        o = {**sizes, **more}
        both = more.get("add_cross_attention")
        return Case(
            lambda: kind(**o),
            lambda w, *given: truth(w, o, *given),
            lambda rows: (
                [state(rows), states(rows), mask(rows), mask(rows, other)] if both else [state(rows), mask(rows)]
            ),
            lambda module, *given: module(given)[0],
        )

    def seen(rows: int) -> Tensor:
        return torch.where(mask(rows)[:, 0, 0] == 0, 1, 0)

    def model(**more: Any) -> Case:
        """Of a mask of ones and zeros."""
        o = {**sizes, "add_lm_head": False, **more}

        def truth(w: dict[str, Tensor], x: Tensor, seen: Tensor, types: Tensor | None, *others: Any) -> Tensor:
            scores = (seen[:, None, None] - 1.0) * 1e4
            more = (others[1], scores, others[2]) if o.get("add_cross_attention") else (scores,)
            return undivided.hidden_states(w, o, x, types, *more)

        def inputs(rows: int) -> list[Any]:
            given = [ids(rows), seen(rows), ids(rows, 3) if o.get("num_token_types") else None, None]
            return [*given, states(rows), mask(rows, other)] if o.get("add_cross_attention") else given

        return Case(lambda: nn.DistributedTransformerLMHead(**o), truth, inputs)

    def language(told: bool, **more: Any) -> Case:
        o = {**sizes, **more}

        def truth(w: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
            found = undivided.logits(w, o, x)
            if not told:
                return found
            each = len(x) // ranks if TensorGroup.current().joined else len(x)  # samples that a loss is the mean of
            losses = [undivided.loss(o, *part) for part in zip(found.split(each), labels.split(each), strict=True)]
            return torch.stack(losses).repeat_interleave(each)

        def call(module: Any, x: Tensor, labels: Tensor) -> Tensor:
            return module(x, None, None, None, labels)[0].expand(len(x)) if told else module(x) * 1.0

        def inputs(rows: int) -> list[Any]:
            return [
                ids(rows),
                ids(rows).masked_fill((torch.rand(rows, length) < 0.3) & (torch.arange(length) > 1), -100),
            ]

        return Case(lambda: nn.DistributedTransformerLMHead(**o), truth, inputs, call)

    def linear(features: int, out: int, bias: bool) -> Case:
        return Case(
            lambda: nn.DistributedLinear(features, out, bias),
            lambda w, x: x @ w["weight"].T + (w["bias"] if bias else 0.0),
            lambda rows: [torch.randn(rows, length, features)],
        )

    one, two = draw.randint(1, 2 * ranks), draw.randint(2 * ranks + 1, 4 * ranks)
    return {
        "attention": attention(),
        "attention, causal": attention(**gpt),
        "attention, both norms, alibi": attention(pre_layernorm=True, use_alibi=True),
        "attention, grouped, rotary": attention(**llama),
        "attention, shared keys": attention(
            **{**llama, "num_key_value_heads": ranks // 2, "num_attention_heads": 3 * ranks}
        ),
        "attention, rotary in part": attention(**gptj),
        "attention, to others": attention(cross_attention=True),
        "attention, whole": attention(num_attention_heads=ranks - 1, pre_layernorm=True, use_alibi=True),
        "attention to others, whole": attention(num_attention_heads=ranks - 1, cross_attention=True),
        "mlp": output(),
        "mlp, gated": output(**llama),
        "mlp, whole": output(intermediate_size=ranks - 1, activation="relu"),
        "layer": layer(nn.DistributedTransformerLayer, undivided.layer),
        "layer, with others": layer(nn.DistributedTransformerLayer, undivided.layer, add_cross_attention=True, **gpt),
        "stack": layer(nn.DistributedTransformer, undivided.transformer, **llama),
        "stack, with others": layer(nn.DistributedTransformer, undivided.transformer, add_cross_attention=True),
        "model": model(num_token_types=3),
        "model, causal": model(**gpt),
        "model, with others": model(add_cross_attention=True),
        "language model": language(True, **gpt),
        "language model, words left out": language(True, tie_input_output_embedding=False),
        "language model, logits": language(False, pre_layernorm=True),
        "linear, more out": linear(one, two, True),
        "linear, more in": linear(two, one, True),
        "linear, no bias": linear(one, two, False),
        "embedding": Case(
            lambda: nn.DistributedEmbedding(vocabulary, hidden), lambda w, x: w["weight"][x], lambda rows: [ids(rows)]
        ),
    }


GRIDS = [(2, mode) for mode in MODES] + [(4, MODES[0]), (4, MODES[-1])]


def name_of(grid: tuple[int, dict[str, Any]]) -> str:
    ranks, config = grid
    return f"{ranks}-{'prescaled' if config['prescaled_batch'] else 'joined'}-{config['optimize']}"


@pytest.mark.parametrize("grid", GRIDS, ids=name_of)
def test_divided_layers_equal_undivided_ones(pool: Pool, seed: int, grid: tuple[int, dict[str, Any]]) -> None:
    ranks, config = grid
    for found in pool.run(ranks, run_cases, f"{__name__}:layer_cases", seed, config, timeout=120.0):
        assert not {name: errors for name, errors in found.items() if errors.largest > 1e-9}


def test_float32_is_as_near_as_it_rounds(pool: Pool, seed: int) -> None:
    for found in pool.run(2, run_cases, f"{__name__}:layer_cases", seed, MODES[-1], "float32", timeout=120.0):
        assert not {name: errors for name, errors in found.items() if errors.largest > 1e-4}


def plain_layer(draw: random.Random, ranks: int) -> dict[str, Case]:
    """One layer, inside another module: nothing is joined or made whole around it."""
    import smpar.nn as nn
    from smpar.nn.group import TensorGroup
    from smpar.nn.layers.base import inner
    from smpar.nn.sequence import to_slice, to_whole

    o: dict[str, Any] = {
        "num_attention_heads": 2 * ranks, "attention_head_size": 4, "hidden_size": 8, "intermediate_size": 4 * ranks,
        "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    }  # fmt: skip

    def call(layer: Any, x: Tensor) -> Tensor:
        group = TensorGroup.current()
        return to_whole(layer(to_slice(x, group)) if group.memory else layer(x), group)

    def make() -> torch.nn.Module:
        return inner(nn.DistributedTransformerLayer(**o))

    return {
        "layer": Case(
            make, lambda w, x: undivided.layer(w, o, x), lambda rows: [torch.randn(rows, 2 * ranks - 1, 8)], call
        )
    }


def test_a_layer_moves_nothing_more_than_its_regions_need(pool: Pool, seed: int) -> None:
    speed, memory = (
        pool.run(2, run_cases, f"{__name__}:plain_layer", seed, {"prescaled_batch": True, "optimize": mode})[0]["layer"]
        for mode in ("speed", "memory")
    )
    for counts in (speed.forward, speed.backward, memory.forward, memory.backward):
        counts.pop("bytes")
    assert speed.forward == speed.backward == {"all_reduce": 2}
    # one more gather for the test itself, to make the result whole
    assert memory.forward == {"all_gather": 2 + 1, "reduce_scatter": 2}
    # 2 of leaving, 2 of what is gathered again, and the test's slicing of the input
    assert memory.backward == {"all_gather": 2 + 2 + 1, "reduce_scatter": 2}


def test_logits_are_not_gathered_for_the_loss(pool: Pool, seed: int) -> None:
    found = pool.run(2, run_cases, f"{__name__}:layer_cases", seed, MODES[0])[0]
    assert MODES[0] == {"prescaled_batch": True, "optimize": "speed"}
    assert "all_gather" not in found["language model"].forward | found["language model"].backward
    looked_at = found["language model, logits"]
    assert "all_gather" in looked_at.forward | looked_at.backward


def kept_bytes(degree: int, seed: int) -> int:
    """Bytes that autograd keeps of a layer in memory mode, parameters aside."""
    import smpar as smp
    import smpar.nn as nn
    from smpar.nn.group import TensorGroup
    from smpar.nn.layers.base import inner
    from smpar.nn.sequence import to_slice

    smp.init({"tensor_parallel_degree": degree, "optimize": "memory", "prescaled_batch": True})
    torch.manual_seed(seed)
    layer = inner(
        nn.DistributedTransformerLayer(
            num_attention_heads=8, attention_head_size=8, hidden_size=64, intermediate_size=256, pre_layernorm=True,
            causal_mask_size=64, attention_dropout_prob=0.0,
        )
    )  # fmt: skip
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = to_slice(torch.randn(2, 64, 64, requires_grad=True), TensorGroup.current())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = layer(hidden)
    assert result.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_share_of_the_activations(pool: Pool, seed: int, ranks: int) -> None:
    whole = pool.run(1, kept_bytes, 1, seed)[0]
    for part in pool.run(ranks, kept_bytes, ranks, seed):
        assert part == pytest.approx(whole / ranks, rel=0.1)


def first_values(degree: int, seed: int, normal: bool) -> dict[str, tuple[Any, Tensor]]:
    import smpar as smp
    import smpar.nn as nn
    from smpar.slices import slicing_of

    smp.init({"tensor_parallel_degree": degree})
    torch.manual_seed(seed)
    model = nn.DistributedTransformerLMHead(
        num_layers=1, num_attention_heads=5, attention_head_size=2, hidden_size=6, intermediate_size=7, vocab_size=9,
        num_positions=8, use_normal_initialization=normal, gated_mlp=True,
    )  # fmt: skip
    return {name: (slicing_of(p), p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("normal", [True, False], ids=["normal", "torch's"])
def test_first_values_do_not_depend_on_the_degree(pool: Pool, seed: int, normal: bool) -> None:
    (whole,) = pool.run(1, first_values, 1, seed, normal)
    parts = pool.run(2, first_values, 2, seed, normal)
    assert whole.keys() == parts[0].keys()
    for name, (_, value) in whole.items():
        slicing = parts[0][name][0]
        found = parts[0][name][1] if slicing is None else slicing.join([part[name][1] for part in parts])
        assert torch.equal(found, value), name
    assert any(slicing is not None for slicing, _ in parts[0].values())


def dropped_places(optimize: str, seed: int) -> tuple[Tensor, Tensor]:
    """Where an attention layer drops probabilities of two heads, one of each rank; and where it drops results."""
    import smpar as smp
    import smpar.nn as nn
    from smpar.trace.draws import SeedMode

    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": optimize})

    def run(**probabilities: float) -> Tensor:
        layer = nn.DistributedAttentionLayer(
            num_attention_heads=2, attention_head_size=8, hidden_size=16, post_layernorm=False, zero_init=True,
            **{"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, **probabilities},
        )  # fmt: skip
        with torch.no_grad():
            layer.value.bias.fill_(1.0)
            layer.dense.weight.copy_(torch.eye(16)[:, 8 * smp.tp_rank() : 8 * smp.tp_rank() + 8])
        torch.manual_seed(seed)
        with SeedMode():
            return layer(torch.zeros(2, 6, 16)).detach()

    return run(attention_dropout_prob=0.5)[..., ::8], run(hidden_dropout_prob=0.5)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_dropout_differs_on_slices_and_is_equal_on_what_all_hold(pool: Pool, seed: int, optimize: str) -> None:
    runs = pool.run(2, dropped_places, optimize, seed)
    (heads, results), (other_heads, other_results) = runs
    assert torch.equal(heads, other_heads)
    assert torch.equal(results, other_results)
    assert not torch.equal(heads[..., 0], heads[..., 1])
    assert not torch.equal(results[:, :3], results[:, 3:])
    assert results.unique().tolist() == [0.0, 2.0]


def asked_wrongly(given: dict[str, Any]) -> str:
    import smpar as smp
    import smpar.nn as nn
    from smpar.errors import LayerArgumentError

    smp.init({"tensor_parallel_degree": 1})
    with pytest.raises(LayerArgumentError) as found:
        nn.DistributedTransformerLayer(**given)
    return str(found.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hiden_size": 8}, "use hidden_size"),
        ({"activation": "swish"}, "activation='swish'"),
        ({"norm": "batch"}, "layernorm or rmsnorm"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads=4"),
    ],
)
def test_arguments_that_no_layer_has_are_refused(pool: Pool, given: dict[str, Any], said: str) -> None:
    assert said in pool.run(1, asked_wrongly, given)[0]
