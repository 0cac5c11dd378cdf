"""torch's own transformer modules, divided in place, are those that one process has."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import Pool
from tests.tensor.divided import Case, run_cases
from tests.tensor.test_layers import GRIDS, MODES, name_of


def leaf_cases(draw: random.Random, ranks: int) -> dict[str, Case]:
    """Each module with each of its arguments, in random sizes."""
    from smpar.nn.group import TensorGroup
    from smpar.nn.leaves import divide_leaf

    heads, size, length, other = ranks + draw.randint(0, 2), draw.randint(2, 4), draw.randint(4, 9), draw.randint(3, 6)
    width = heads * size

    def case(make: Any, inputs: Any, call: Any) -> Case:
        whole = make().eval()

        def divide() -> nn.Module:
            module = copy.deepcopy(whole)
            assert divide_leaf(module, TensorGroup.current()) is module
            return module

        def truth(w: dict[str, Tensor], *given: Any) -> Tensor:
            return call(lambda *a, **k: torch.func.functional_call(whole, w, a, k), *given)

        return Case(divide, truth, inputs, call)

    def state(rows: int, length: int = length, width: int = width) -> Tensor:
        return torch.randn(rows, length, width)

    def hidden_keys(rows: int, length: int = length) -> Tensor:
        return (torch.rand(rows, length) < 0.3) & (torch.arange(length) > 0)

    def attention(**more: Any) -> nn.Module:
        return nn.MultiheadAttention(width, heads, batch_first=True, **more)

    def causal(length: int = length) -> Tensor:
        return nn.Transformer.generate_square_subsequent_mask(length)

    def turned(call: Any) -> Any:
        """Of a module with the sequence first."""
        return lambda m, *given: call(m, *(t.transpose(0, 1) if t.is_floating_point() else t for t in given)).transpose(
            0, 1
        )

    def weights_of(m: Any, x: Tensor, **more: Any) -> Tensor:
        y, weights = m(x, x, x, **more)
        return torch.cat((y.flatten(1), weights.flatten(1)), 1)

    by_head = torch.tensor([[draw.gauss(0, 1) for _ in range(length)] for _ in range(heads)], dtype=torch.float64)

    def masked_by_head(m: Any, x: Tensor) -> Tensor:
        mask = by_head[None, :, None].expand(len(x), -1, length, -1).flatten(0, 1)
        return m(x, x, x, attn_mask=mask.to(x.dtype), need_weights=False)[0]

    few: dict[str, Any] = {"d_model": 6, "nhead": ranks - 1, "dim_feedforward": ranks - 1, "dropout": 0.0}
    layer: dict[str, Any] = {
        "d_model": width,
        "nhead": heads,
        "dim_feedforward": ranks + draw.randint(0, 9),
        "dropout": 0.0,
    }
    encoder, decoder = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer

    def encoded(m: Any, x: Tensor) -> Tensor:
        return m(x, src_mask=causal(x.shape[1]).to(x.dtype), is_causal=True)

    def decoded(m: Any, x: Tensor, y: Tensor, hidden: Tensor) -> Tensor:
        return m(x, y, tgt_mask=causal().to(x.dtype), memory_key_padding_mask=hidden)

    def both(rows: int) -> list[Any]:
        return [state(rows), state(rows, other), hidden_keys(rows, other)]

    return {
        "attention": case(attention, lambda rows: [state(rows)], lambda m, x: m(x, x, x, need_weights=False)[0]),
        "attention, averages": case(attention, lambda rows: [state(rows)], weights_of),
        "attention, weights by head": case(
            attention, lambda rows: [state(rows)], lambda m, x: weights_of(m, x, average_attn_weights=False)
        ),
        "attention, no bias, mask by head": case(
            lambda: attention(bias=False), lambda rows: [state(rows)], masked_by_head
        ),
        "attention, more keys, keys left out": case(
            lambda: attention(add_bias_kv=True, add_zero_attn=True),
            lambda rows: [state(rows), state(rows, other), hidden_keys(rows, other)],
            lambda m, x, y, hidden: m(x, y, y, key_padding_mask=hidden)[0],
        ),
        "attention, other widths": case(
            lambda: attention(kdim=5, vdim=3),
            lambda rows: [state(rows), state(rows, other, 5), state(rows, other, 3)],
            lambda m, *given: m(*given)[0],
        ),
        "attention, sequence first": case(
            lambda: nn.MultiheadAttention(width, heads),
            lambda rows: [state(rows), state(rows, other)],
            turned(lambda m, x, y: m(x, y, y)[0]),
        ),
        "encoder layer": case(lambda: encoder(**layer, batch_first=True), lambda rows: [state(rows)], encoded),
        "encoder layer, norm first, sequence first": case(
            lambda: encoder(**layer, norm_first=True, activation="gelu"),
            lambda rows: [state(rows), hidden_keys(rows)],
            turned(lambda m, x, hidden: m(x, src_key_padding_mask=hidden)),
        ),
        "encoder layer, whole": case(
            lambda: encoder(**few, batch_first=True), lambda rows: [state(rows, width=6)], encoded
        ),
        "decoder layer": case(lambda: decoder(**layer, batch_first=True, bias=False), both, decoded),
        "decoder layer, norm first": case(lambda: decoder(**layer, batch_first=True, norm_first=True), both, decoded),
        "encoder": case(
            lambda: nn.TransformerEncoder(encoder(**layer, batch_first=True), 2, nn.LayerNorm(width)),
            lambda rows: [state(rows)],
            lambda m, x: m(x, causal().to(x.dtype)),
        ),
        "decoder": case(
            lambda: nn.TransformerDecoder(decoder(**layer), 2),
            lambda rows: [state(rows), state(rows, other)],
            turned(lambda m, x, y: m(x, y)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=name_of)
def test_divided_modules_equal_undivided_ones(pool: Pool, seed: int, grid: tuple[int, dict[str, Any]]) -> None:
    ranks, config = grid
    for found in pool.run(ranks, run_cases, f"{__name__}:leaf_cases", seed, config, timeout=120.0):
        assert not {name: errors for name, errors in found.items() if errors.largest > 1e-9}


def evaluated(seed: int, config: dict[str, Any]) -> list[float]:
    """How far evaluation is from the undivided modules', where torch has fused kernels."""
    import smpar as smp
    from smpar.nn.group import TensorGroup
    from smpar.nn.leaves import divide_leaf

    smp.init({"tensor_parallel_degree": 2, **config})
    torch.manual_seed(seed)
    group = TensorGroup.current()
    wholes = [
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 6, batch_first=True, dropout=0.3), 2).eval()
        for _ in range(2)
    ]
    x = torch.randn(4, 7, 8)
    hidden = torch.arange(7) >= torch.randint(3, 7, (4, 1))
    hidden[::2, -1] = False  # each rank has a sample that is not padded
    hidden[::2] = False
    distances = []
    for whole, parts in zip(wholes, (lambda m: [m], lambda m: list(m.layers)), strict=True):
        divided = copy.deepcopy(whole)
        for part in parts(divided):
            assert divide_leaf(part, group) is part
        rows = slice(None) if config["prescaled_batch"] else slice(2 * smp.tp_rank(), 2 * smp.tp_rank() + 2)
        with torch.no_grad():
            got, want = divided(x[rows], src_key_padding_mask=hidden[rows]), whole(x, src_key_padding_mask=hidden)[rows]
        distances.append(float((got - want).masked_fill(hidden[rows].unsqueeze(-1), 0.0).abs().max()))
    return distances


@pytest.mark.parametrize("config", MODES, ids=lambda config: name_of((2, config)))
def test_evaluation_reads_no_slices_where_torch_has_fused_kernels(
    pool: Pool, seed: int, config: dict[str, Any]
) -> None:
    for distances in pool.run(2, evaluated, seed, config):
        assert max(distances) < 1e-5


def mask_gradients(seed: int) -> list[float]:
    """How far the gradients of learned scores are from those of undivided modules."""
    import smpar as smp
    from smpar.nn import DistributedAttentionLayer
    from smpar.nn.group import TensorGroup
    from smpar.nn.leaves import divide_leaf
    from tests.tensor import undivided
    from tests.tensor.divided import whole_values

    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": True})
    torch.manual_seed(seed)
    whole = nn.MultiheadAttention(6, 3, batch_first=True)
    divided = copy.deepcopy(whole)
    divide_leaf(divided, TensorGroup.current())
    o: dict[str, Any] = {"num_attention_heads": 3, "attention_head_size": 2, "hidden_size": 6}
    layer = DistributedAttentionLayer(**o, attention_dropout_prob=0.0, hidden_dropout_prob=0.0)
    weights = whole_values(layer)
    x, scores = torch.randn(2, 5, 6), torch.randn(5, 5, requires_grad=True)
    pairs = [
        (lambda m: divided(x, x, x, attn_mask=m)[0], lambda m: whole(x, x, x, attn_mask=m)[0]),
        (lambda m: layer(x, m[None, None]), lambda m: undivided.attention(weights, o, x, None, m[None, None])),
    ]
    distances = []
    for ours, theirs in pairs:
        got, want = (torch.autograd.grad(function(scores).square().sum(), scores)[0] for function in (ours, theirs))
        distances.append(float((got - want).abs().max()))
    return distances


def test_learned_scores_get_the_gradients_of_all_heads(pool: Pool, seed: int) -> None:
    for distances in pool.run(2, mask_gradients, seed):
        assert max(distances) < 1e-4


def left_whole() -> list[bool]:
    import smpar as smp
    from smpar.nn.group import TensorGroup
    from smpar.nn.leaves import divide_leaf

    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    smp.init({"tensor_parallel_degree": 2})
    modules = [nn.MultiheadAttention(4, 1), Own(4, 2), nn.Linear(4, 4)]
    return [
        divide_leaf(m, TensorGroup.current()) is None and all(p.shape[0] != 2 for p in m.parameters()) for m in modules
    ]


def test_what_is_not_known_or_too_small_stays_as_it_is(pool: Pool) -> None:
    assert pool.run(2, left_whole) == [[True, True, True]] * 2
