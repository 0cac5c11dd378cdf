"""The arguments of all layers, in one table."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smpar.errors import LayerArgumentError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
NORMS = ("layernorm", "rmsnorm")


@dataclass(frozen=True)
class Options:
    """Arguments of the layers; each layer takes all of them and uses those that concern it.

    Sizes:
        num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size: of the transformer.
        num_key_value_heads: fewer than attention heads for grouped queries (default: as many). Beyond SMP.
        vocab_size, num_positions, num_token_types: of the embeddings; no token types if 0.
    Attention:
        causal_mask_size: any number makes self-attention causal; no mask is stored, so the number is no limit.
        cross_attention: an attention layer takes its keys and values from other states.
        add_cross_attention: each transformer layer has such an attention after its own.
        use_alibi: linear biases instead of positions (arXiv 2108.12409).
        rotary_dim, rotary_base, gpt_neox_type_rotary: rotary positions for the first ``rotary_dim`` features of each
            head (arXiv 2104.09864); pairs are halves apart if ``gpt_neox_type_rotary``, else neighbours.
        scale_attention_scores: by 1 / sqrt(attention_head_size); ``scale_attn_by_layer_idx``: and by
            1 / (``layer_idx`` + 1), which a transformer sets.
        attention_in_fp32, query_key_layer_scaling: scores in float32, from inputs in less.
    Norms and sums:
        norm: "layernorm", or "rmsnorm" (beyond SMP); layernorm_epsilon.
        pre_layernorm, post_layernorm: before attention and MLP, or after the sum with what went in.
        fp32_residual_addition: that sum in float32.
    MLP:
        activation: "gelu", "gelu_new" (by tanh), "relu", "silu".
        gated_mlp: a second linear, whose result is multiplied with the activation (arXiv 2002.05202). Beyond SMP.
    Dropout:
        attention_dropout_prob, hidden_dropout_prob, embedding_dropout_prob.
    Parameters:
        use_normal_initialization, initializer_range: weights from N(0, range), biases 0; else torch's defaults.
        zero_init: zeros, for weights that are loaded.
        use_qkv_bias, use_attn_dense_bias, use_mlp_bias: whether these linears have a bias.
    Language model:
        add_lm_head, tie_input_output_embedding, use_positional_embedding.
    No effect, as torch's kernels or this design make them moot:
        flash_attention, fused_softmax, fused_bias_gelu, fused_dropout, distribute_embedding (it always is).
    """

    num_layers: int = 12
    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_key_value_heads: int | None = None
    vocab_size: int = 30522
    num_positions: int = 1024
    num_token_types: int = 0
    causal_mask_size: int | None = None
    cross_attention: bool = False
    add_cross_attention: bool = False
    use_alibi: bool = False
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    gpt_neox_type_rotary: bool = False
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int = 0
    attention_in_fp32: bool = False
    query_key_layer_scaling: bool = False
    norm: str = "layernorm"
    layernorm_epsilon: float = 1e-5
    pre_layernorm: bool = False
    post_layernorm: bool = True
    fp32_residual_addition: bool = False
    activation: str = "gelu"
    gated_mlp: bool = False
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    embedding_dropout_prob: float = 0.1
    use_normal_initialization: bool = False
    initializer_range: float = 0.02
    zero_init: bool = False
    use_qkv_bias: bool = True
    use_attn_dense_bias: bool = True
    use_mlp_bias: bool = True
    add_lm_head: bool = True
    tie_input_output_embedding: bool = True
    use_positional_embedding: bool = True
    flash_attention: bool = True
    fused_softmax: bool = True
    fused_bias_gelu: bool = True
    fused_dropout: bool = True
    distribute_embedding: bool = True

    @classmethod
    def of(cls, layer: type, given: Mapping[str, Any]) -> Options:
        """The options that a layer was called with.

        Raises:
            LayerArgumentError: an argument that no layer has, or a value that means nothing.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise LayerArgumentError(layer.__name__, f"{name}={given[name]!r}", near[0] if near else None)
        options = cls(**given)
        for name, allowed in (("activation", tuple(ACTIVATIONS)), ("norm", NORMS)):
            if getattr(options, name) not in allowed:
                raise LayerArgumentError(layer.__name__, f"{name}={getattr(options, name)!r}", " or ".join(allowed))
        if options.num_attention_heads % options.kv_heads:
            values = f"num_attention_heads={options.num_attention_heads}, num_key_value_heads={options.kv_heads}"
            raise LayerArgumentError(layer.__name__, values, "a number of key and value heads that divides the others")
        return options

    def given(self, **changed: Any) -> dict[str, Any]:
        """The arguments for a layer inside."""
        return {**vars(self), **changed}

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def linear(self, features: int, out: int, bias: bool) -> nn.Linear:
        """A whole linear with its first values."""
        linear = nn.Linear(features, out, bias=bias)
        self._initialize(linear)
        return linear

    def embedding(self, rows: int) -> nn.Embedding:
        """A whole embedding with its first values."""
        embedding = nn.Embedding(rows, self.hidden_size)
        self._initialize(embedding)
        return embedding

    @torch.no_grad()
    def _initialize(self, module: nn.Linear | nn.Embedding) -> None:
        if not (self.zero_init or self.use_normal_initialization):
            return
        if self.zero_init:
            module.weight.zero_()
        else:
            module.weight.normal_(0.0, self.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
