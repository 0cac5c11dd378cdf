"""Small models of many families, with random sizes, and what they are called with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of one model, drawn afresh: heads that do not divide by the ranks, odd lengths, and so on."""

    layers: int
    heads: int
    kv: int
    head: int
    inner: int
    vocabulary: int
    length: int
    attention: str
    experts: int
    drop: float
    decoder: bool = False  # of a model that can be one: with attention to an encoder's states

    @classmethod
    def draw(cls, draw: random.Random, ranks: int, layers: int = 2, drop: float = 0.0, attention: str = "") -> Sizes:
        kv = draw.choice([1, ranks, draw.randint(ranks, ranks + 2), 2])
        return cls(
            layers, kv * draw.randint(max(2, ranks // kv), max(2, ranks // kv) + 1), kv, 4 * draw.randint(1, 2),
            draw.randint(17, 29), draw.randint(31, 47), draw.randint(4, 9),
            attention or draw.choice(["eager", "sdpa"]), draw.randint(ranks, ranks + 2), drop,
        )  # fmt: skip

    @property
    def width(self) -> int:
        return self.heads * self.head

    def gpt2(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary, "n_positions": 16, "n_embd": self.width, "n_layer": self.layers,
            "n_head": self.heads, "n_inner": self.inner, "resid_pdrop": self.drop, "embd_pdrop": self.drop,
            "attn_pdrop": self.drop, "bos_token_id": 0, "eos_token_id": 0,
            "add_cross_attention": self.decoder,
        }  # fmt: skip

    def bert(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "intermediate_size": self.inner, "max_position_embeddings": 16,
            "hidden_dropout_prob": self.drop, "attention_probs_dropout_prob": self.drop, "pad_token_id": 0,
            "is_decoder": self.decoder, "add_cross_attention": self.decoder,
        }  # fmt: skip

    def llama(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv, "intermediate_size": self.inner,
            "head_dim": self.head, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 0,
            "eos_token_id": 0, "attention_dropout": self.drop,
        }  # fmt: skip


def _bart(s: Sizes) -> dict[str, Any]:
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
              (("layers", s.layers), ("attention_heads", s.heads), ("ffn_dim", s.inner))}  # fmt: skip
    return {
        "vocab_size": s.vocabulary, "d_model": s.width, "max_position_embeddings": 16, "dropout": s.drop,
        "attention_dropout": s.drop, "activation_dropout": s.drop, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None, "scale_embedding": True, **layers,
    }  # fmt: skip


def _t5(s: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": s.vocabulary, "d_model": 24, "d_kv": s.head, "d_ff": s.inner, "num_layers": s.layers,
        "num_decoder_layers": s.layers, "num_heads": s.heads, "dropout_rate": s.drop, "pad_token_id": 0,
        "decoder_start_token_id": 0, "eos_token_id": 0,
        "feed_forward_proj": "gated-gelu" if s.length % 2 else "relu",
    }  # fmt: skip


def _vit(s: Sizes) -> dict[str, Any]:
    return {**s.bert(), "image_size": 6, "patch_size": 3, "num_labels": 5, "num_channels": 2}


def _mixtral(s: Sizes) -> dict[str, Any]:
    return {**s.llama(), "num_local_experts": s.experts, "num_experts_per_tok": 2, "output_router_logits": True,
            "router_aux_loss_coef": 0.5, "sliding_window": None}  # fmt: skip


NAMED: dict[str, tuple[str, str, Callable[[Sizes], dict[str, Any]]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", Sizes.gpt2),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", lambda s: {**s.llama(), "hidden_dropout": s.drop}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", lambda s: {**s.gpt2(), "rotary_dim": 2}),
    "bert": ("BertConfig", "BertForMaskedLM", Sizes.bert),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", lambda s: {**s.bert(), "max_position_embeddings": 20}),
    "t5": ("T5Config", "T5ForConditionalGeneration", _t5),
    "bart": ("BartConfig", "BartForConditionalGeneration", _bart),
    "vit": ("ViTConfig", "ViTForImageClassification", _vit),
    "llama": ("LlamaConfig", "LlamaForCausalLM", Sizes.llama),
    "mistral": ("MistralConfig", "MistralForCausalLM", lambda s: {**s.llama(), "sliding_window": 3}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", Sizes.llama),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _mixtral),
}
PLANNED: dict[str, tuple[str, str, Callable[[Sizes], dict[str, Any]]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", Sizes.llama),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", Sizes.llama),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", Sizes.llama),
    "phi": ("PhiConfig", "PhiForCausalLM", Sizes.llama),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", Sizes.llama),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", lambda s: {**s.llama(), "residual_dropout": s.drop,
                                                                          "embedding_dropout": s.drop}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", Sizes.llama),
    "cohere": ("CohereConfig", "CohereForCausalLM", Sizes.llama),
    "glm": ("GlmConfig", "GlmForCausalLM", Sizes.llama),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", Sizes.llama),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", lambda s: {**s.llama(), "num_experts": s.experts,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", lambda s: {**s.llama(), "num_experts": s.experts,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 10}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", lambda s: {**s.llama(), "n_routed_experts": s.experts,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1}),
}  # fmt: skip


def made(name: str, seed: int, sizes: Sizes) -> nn.Module:
    """A model in the default dtype, the same for the same arguments."""
    import transformers

    config_class, model_class, options = (NAMED | PLANNED)[name]
    config = getattr(transformers, config_class)(**options(sizes))
    config._attn_implementation = "eager" if name == "gemma2" else sizes.attention  # its scores are capped
    config._experts_implementation = "eager"  # the default one knows no float64
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for p in model.parameters():  # the small first weights of wide models give narrow ones no gradients to see
            p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def inputs_of(name: str, seed: int, sizes: Sizes, samples: int, embedded: bool = False) -> dict[str, Tensor]:
    """A batch of ``samples``, some tokens of it padding.

    Args:
        embedded: whether the model gets embedded tokens, as leaves with gradients, in place of numbers.
    """
    draw = torch.Generator().manual_seed(seed)
    n, s, v = samples, sizes.length, sizes.vocabulary
    if name == "vit":
        pixels = torch.randn(n, 2, 6, 6, generator=draw, dtype=torch.get_default_dtype())
        return {"pixel_values": pixels.requires_grad_(embedded), "labels": torch.randint(5, (n,), generator=draw)}
    ids = torch.randint(1, v, (n, s), generator=draw)
    mask = torch.ones(n, s, dtype=torch.long)
    mask[0, s - 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    width = 24 if name == "t5" else sizes.width
    given: dict[str, Tensor] = {"attention_mask": mask}
    if name in ("t5", "bart"):
        labels = torch.randint(1, v, (n, 3), generator=draw)
        given["decoder_input_ids"] = torch.randint(1, v, (n, 3), generator=draw)
    if embedded:
        hidden = torch.randn(n, s, width, generator=draw, dtype=torch.get_default_dtype())
        given["inputs_embeds"] = hidden.requires_grad_()
    else:
        given["input_ids"] = ids
    return {**given, "labels": labels}
