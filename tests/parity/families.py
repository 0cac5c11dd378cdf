"""Small randomly initialised models of many families, with batches and losses; none of them edited.

Batches hold 8 samples. All dropout is off, so that a single process gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.parity import own_families as own
from tests.parity.models import IGNORE

hf: Any = transformers  # its configurations take more keywords than their annotations know
BATCH, LENGTH, VOCAB, WIDTH, LAYERS, HEADS, LABELS, IMAGE = 8, 10, 61, 32, 4, 4, 5, 32
SPREAD = 0.2  # of the first weights; the 0.02 of wide models gives narrow ones gradients close to nothing
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """``batch(step)`` gives the model's keyword inputs and the target of ``loss(output, target)``."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Inputs, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return self.build().train()

    def inputs(self, step: int) -> tuple[Inputs, Tensor]:
        return self.batch(torch.Generator().manual_seed(500 + step))


# ---- batches ---------------------------------------------------------------------------------------------------


def _ids(g: torch.Generator, length: int = LENGTH) -> Tensor:
    """Tokens [BATCH, length]; 0 .. 3 are kept for special ones."""
    return torch.randint(4, VOCAB, (BATCH, length), generator=g)


def causal(g: torch.Generator) -> tuple[Inputs, Tensor]:
    ids = _ids(g)
    return {"input_ids": ids, "labels": ids}, ids


def padded(g: torch.Generator, pad: int = 0) -> tuple[Inputs, Tensor]:
    """Rows of 5 .. 10 valid tokens; the rest is masked and not learned."""
    ids, labels = _ids(g), _ids(g)
    valid = torch.arange(LENGTH) < torch.randint(5, LENGTH + 1, (BATCH, 1), generator=g)
    labels = labels.masked_fill(~valid, IGNORE)
    return {"input_ids": ids.masked_fill(~valid, pad), "attention_mask": valid.long(), "labels": labels}, labels


def sequences(g: torch.Generator, pad: int = 0) -> tuple[Inputs, Tensor]:
    """Encoder input and decoder labels of different lengths."""
    inputs, _ = padded(g, pad)
    labels = _ids(g, 7)
    return inputs | {"labels": labels}, labels


def images(g: torch.Generator) -> tuple[Inputs, Tensor]:
    labels = torch.randint(LABELS, (BATCH,), generator=g)
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=g), "labels": labels}, labels


def captions(g: torch.Generator) -> tuple[Inputs, Tensor]:
    ids = _ids(g)
    ids[:, -1] = VOCAB - 1
    pixels = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=g)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}, ids


def speech(g: torch.Generator) -> tuple[Inputs, Tensor]:
    labels = _ids(g)
    return {"input_features": torch.randn(BATCH, 8, 2 * LENGTH, generator=g), "labels": labels}, labels


def next_tokens(g: torch.Generator) -> tuple[Inputs, Tensor]:
    ids = _ids(g, LENGTH + 1)
    return {"ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()


def segments(g: torch.Generator) -> tuple[Inputs, Tensor]:
    return {"image": torch.randn(BATCH, 1, 16, 16, generator=g)}, torch.randint(3, (BATCH, 16, 16), generator=g)


def ratings(g: torch.Generator) -> tuple[Inputs, Tensor]:
    user, item = torch.randint(40, (BATCH,), generator=g), torch.randint(60, (BATCH,), generator=g)
    return {"user": user, "item": item}, torch.randint(2, (BATCH,), generator=g).float()


# ---- losses ----------------------------------------------------------------------------------------------------


def inside(output: Any, target: Tensor) -> Tensor:
    """The model computed it."""
    return output.loss


def over_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def contrast(output: Any, target: Tensor) -> Tensor:
    """Each text against all images of the microbatch, and back."""
    right = torch.arange(len(target))
    return F.cross_entropy(output.logits_per_text, right) + F.cross_entropy(output.logits_per_image, right)


# ---- models ----------------------------------------------------------------------------------------------------


def gpt2(**more: Any) -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "initializer_range": SPREAD}
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, **sizes, **off, **special, **more))


def _encoder(model: Any, config: Any, **more: Any) -> nn.Module:
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "initializer_range": SPREAD,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return model(config(intermediate_size=2 * WIDTH, **sizes, **off, **more))


def _text_encoder(model: Any, config: Any, **more: Any) -> nn.Module:
    return _encoder(model, config, vocab_size=VOCAB, max_position_embeddings=32, **more)


def _decoder(model: Any, config: Any, **more: Any) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "initializer_range": SPREAD}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return model(config(vocab_size=VOCAB, max_position_embeddings=32, **sizes, **heads, **special, **more))


def t5(**more: Any) -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": HEADS}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, **sizes, **more)
    )


def _sequence_sizes() -> dict[str, Any]:
    ends = ("encoder", "decoder")
    return (
        {"d_model": WIDTH, "vocab_size": VOCAB, "dropout": 0.0, "init_std": SPREAD}
        | {f"{end}_layers": 2 for end in ends}
        | {f"{end}_attention_heads": HEADS for end in ends}
        | {f"{end}_ffn_dim": 2 * WIDTH for end in ends}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    )


def bart(**more: Any) -> nn.Module:
    return hf.BartForConditionalGeneration(
        hf.BartConfig(max_position_embeddings=32, forced_eos_token_id=None, **_sequence_sizes(), **more)
    )


def whisper(**more: Any) -> nn.Module:
    positions = {"num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": 32}
    special = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**positions, **special, **_sequence_sizes(), **more))


def swin() -> nn.Module:
    sizes = {"image_size": IMAGE, "patch_size": 4, "embed_dim": 16, "window_size": 4, "initializer_range": SPREAD}
    shape = {"depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.0}
    return hf.SwinForImageClassification(hf.SwinConfig(num_labels=LABELS, **sizes, **shape))


def resnet() -> nn.Module:
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=LABELS, **shape))


def convnext() -> nn.Module:
    """The layers' scale starts at a half, not at 1e-6, which would hide all gradients but the last layer's."""
    shape = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1], "layer_scale_init_value": 0.5}
    shape["initializer_range"] = SPREAD
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=LABELS, image_size=IMAGE, **shape))


def clip() -> nn.Module:
    both = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": VOCAB - 1}
    text = {"vocab_size": VOCAB, "max_position_embeddings": 32, **special, **both}
    vision = {"image_size": IMAGE, "patch_size": 8, **both}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2, causal, inside),
    "bert": Family(partial(_text_encoder, hf.BertForMaskedLM, hf.BertConfig), padded, inside),
    "roberta": Family(
        partial(_text_encoder, hf.RobertaForMaskedLM, hf.RobertaConfig, pad_token_id=1), partial(padded, pad=1), inside
    ),
    "albert": Family(partial(_text_encoder, hf.AlbertForMaskedLM, hf.AlbertConfig, embedding_size=16), padded, inside),
    "llama": Family(partial(_decoder, hf.LlamaForCausalLM, hf.LlamaConfig), padded, inside),
    "qwen2": Family(partial(_decoder, hf.Qwen2ForCausalLM, hf.Qwen2Config), causal, inside),
    "mixtral": Family(
        partial(_decoder, hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4, output_router_logits=True),
        causal,
        inside,
    ),
    "t5": Family(t5, sequences, inside),
    "bart": Family(bart, sequences, inside),
    "vit": Family(
        partial(
            _encoder, hf.ViTForImageClassification, hf.ViTConfig, image_size=IMAGE, patch_size=8, num_labels=LABELS
        ),
        images,
        inside,
    ),
    "swin": Family(swin, images, inside),
    "resnet": Family(resnet, images, inside),
    "convnext": Family(convnext, images, inside),
    "clip": Family(clip, captions, contrast),
    "whisper": Family(whisper, speech, inside),
    "unet": Family(own.UNet, segments, F.cross_entropy),
    "lstm": Family(own.LstmLm, next_tokens, over_tokens),
    "experts": Family(own.ExpertLm, next_tokens, over_tokens),
    "filtering": Family(own.NeuralFiltering, ratings, F.binary_cross_entropy_with_logits),
}
WITHOUT_CACHE: dict[str, Family] = {
    "gpt2_no_cache": Family(partial(gpt2, use_cache=False), causal, inside),
    "llama_no_cache": Family(partial(_decoder, hf.LlamaForCausalLM, hf.LlamaConfig, use_cache=False), padded, inside),
    "t5_no_cache": Family(partial(t5, use_cache=False), sequences, inside),
}
ALL = FAMILIES | WITHOUT_CACHE
