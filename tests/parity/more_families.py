"""Families that each showed something new: what they compute beside their layers, keep in lists, or ask of hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.families import (
    BATCH,
    HEADS,
    IMAGE,
    LABELS,
    LAYERS,
    LENGTH,
    SPREAD,
    VOCAB,
    WIDTH,
    Family,
    Inputs,
    _decoder,
    _encoder,
    _ids,
    _text_encoder,
    causal,
    hf,
    images,
    inside,
    padded,
)

# ---- batches ---------------------------------------------------------------------------------------------------


def spans(g: torch.Generator) -> tuple[Inputs, Tensor]:
    """Questions with the first and last token of their answers."""
    inputs, _ = padded(g)
    del inputs["labels"]
    first, last = (torch.randint(LENGTH, (BATCH,), generator=g) for _ in range(2))
    return inputs | {"start_positions": first, "end_positions": last}, first


def sound(g: torch.Generator) -> tuple[Inputs, Tensor]:
    """Waves of different lengths with texts."""
    valid = torch.arange(400) < torch.randint(250, 401, (BATCH, 1), generator=g)
    labels = torch.randint(1, VOCAB, (BATCH, 5), generator=g)
    wave = torch.randn(BATCH, 400, generator=g)
    return {"input_values": wave, "attention_mask": valid.long(), "labels": labels}, labels


def series(g: torch.Generator) -> tuple[Inputs, Tensor]:
    past, future = (torch.rand(BATCH, length, generator=g) + 0.5 for length in (20, 4))
    features = {
        f"{when}_time_features": torch.randn(BATCH, n, 2, generator=g) for when, n in (("past", 20), ("future", 4))
    }
    return {
        "past_values": past,
        "past_observed_mask": torch.ones(BATCH, 20),
        "future_values": future,
    } | features, future


def scenes(g: torch.Generator) -> tuple[Inputs, Tensor]:
    """Images with a box per query."""
    return {"pixel_values": torch.randn(BATCH, 3, 2 * IMAGE, 2 * IMAGE, generator=g)}, torch.rand(
        BATCH, 6, 4, generator=g
    )


def tokens(g: torch.Generator) -> tuple[Inputs, Tensor]:
    ids = _ids(g)
    return {"ids": ids}, ids


# ---- losses ----------------------------------------------------------------------------------------------------


def with_attentions(output: Any, target: Tensor) -> Tensor:
    """Attentions and hidden states, which hooks collect, take part."""
    assert len(output.attentions) == LAYERS, "attentions got lost"
    kept = (*output.attentions, *output.hidden_states)
    return output.loss + 0.01 * sum(h.square().mean() for h in kept)


def boxes(output: Any, target: Tensor) -> Tensor:
    return F.l1_loss(output.pred_boxes, target) + output.logits.logsumexp(-1).mean()


def with_balance(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, balance = output
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.1 * balance


# ---- models ----------------------------------------------------------------------------------------------------


def bert_that_shows_all() -> nn.Module:
    model = _text_encoder(hf.BertForMaskedLM, hf.BertConfig)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    model.config.output_attentions = model.config.output_hidden_states = True  # type: ignore[union-attr]
    return model


def wav2vec2() -> nn.Module:
    """Convolutions of 20 samples per frame; CTC counts frames and labels."""
    convolutions = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    off = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
    off |= dict.fromkeys(("final_dropout", "layerdrop", "mask_time_prob"), 0.0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = hf.Wav2Vec2Config(
        vocab_size=VOCAB, intermediate_size=2 * WIDTH, do_stable_layer_norm=True, feat_extract_norm="layer",
        ctc_zero_infinity=True, ctc_loss_reduction="mean", **sizes, **convolutions, **positions, **off,
    )  # fmt: skip
    return hf.Wav2Vec2ForCTC(config)


def _encoder_decoder_sizes() -> dict[str, Any]:
    return {f"{end}_{size}": value for end in ("encoder", "decoder")
            for size, value in (("layers", 2), ("attention_heads", HEADS), ("ffn_dim", 2 * WIDTH))}  # fmt: skip


def time_series() -> nn.Module:
    off = dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0
    )
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=13, lags_sequence=[1, 2, 7], num_time_features=2, d_model=WIDTH,
        **_encoder_decoder_sizes(), **off,
    )  # fmt: skip
    return hf.TimeSeriesTransformerForPrediction(config)


def detr() -> nn.Module:
    """A ResNet with frozen batch norm, then transformers over its map and over queries."""
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    config = hf.DetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=hf.ResNetConfig(out_features=["stage4"], **shape),
        d_model=WIDTH, num_queries=6, dropout=0.0, attention_dropout=0.0, num_labels=LABELS, **_encoder_decoder_sizes(),
    )  # fmt: skip
    return hf.DetrForObjectDetection(config)


def beit() -> nn.Module:
    """Its table of relative positions is a method's ``lru_cache``."""
    sizes = {"image_size": IMAGE, "patch_size": 8, "num_labels": LABELS, "vocab_size": 64}
    return _encoder(
        hf.BeitForImageClassification, hf.BeitConfig, use_relative_position_bias=True, drop_path_rate=0.0, **sizes
    )


def deepseek() -> nn.Module:
    ranks = {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
    }
    experts = {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    }
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=32, first_k_dense_replace=1,
            n_shared_experts=1, initializer_range=SPREAD, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            **ranks, **experts,
        )
    )  # fmt: skip


class Mixture(nn.Module):
    """Four experts, all run; what balances them goes into a list of the whole model."""

    def __init__(self, balances: list[Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.balances = balances

    def forward(self, h: Tensor) -> Tensor:
        shares = self.gate(h).softmax(-1)
        self.balances.append(shares.mean((0, 1)).square().sum())
        return h + sum(e(h).tanh() * s for e, s in zip(self.experts, shares.split(1, -1), strict=True))


class ListingLm(nn.Module):
    """ids [B, S] -> logits [B, S, vocab], and the sum of what its layers put into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.balances: list[Tensor] = []
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Mixture(self.balances) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.balances.clear()
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h), sum(self.balances, torch.zeros(()))


def opt(**more: Any) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 2 * WIDTH, "num_hidden_layers": LAYERS}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32}
    config = hf.OPTConfig(vocab_size=VOCAB, num_attention_heads=HEADS, init_std=SPREAD, **sizes, **special, **more)
    return hf.OPTForCausalLM(config)


_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
MORE: dict[str, Family] = {
    "deberta": Family(
        partial(_text_encoder, hf.DebertaForMaskedLM, hf.DebertaConfig, max_relative_positions=16, **_DISENTANGLED),
        padded,
        inside,
    ),
    "longformer": Family(
        partial(_text_encoder, hf.LongformerForMaskedLM, hf.LongformerConfig, attention_window=4, pad_token_id=1),
        partial(padded, pad=1),
        inside,
    ),
    "answers": Family(partial(_text_encoder, hf.BertForQuestionAnswering, hf.BertConfig), spans, inside),
    "attentions": Family(bert_that_shows_all, padded, with_attentions),
    "beit": Family(beit, images, inside),
    "wav2vec2": Family(wav2vec2, sound, inside),
    "time_series": Family(time_series, series, inside),
    "detr": Family(detr, scenes, boxes),
    "deepseek": Family(deepseek, padded, inside),
    "gemma2": Family(
        partial(_decoder, hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=8, sliding_window=4), padded, inside
    ),
    "mamba": Family(
        partial(_decoder, hf.MambaForCausalLM, hf.MambaConfig, state_size=4, use_cache=False), causal, inside
    ),
    "listing": Family(ListingLm, tokens, with_balance),
}
# Their dropout and layer drop are on: no single process in plain PyTorch draws the same numbers.
RANDOM: dict[str, Family] = {
    "opt_drops_layers": Family(partial(opt, dropout=0.1, attention_dropout=0.1, layerdrop=0.3), padded, inside),
}
