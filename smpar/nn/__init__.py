"""Tensor parallelism: twins of modules, each rank with its slices; and SMP's layers, which are made divided."""

from __future__ import annotations

from smpar.nn.families import register_family
from smpar.nn.family import Family
from smpar.nn.layers.attention import DistributedAttentionLayer
from smpar.nn.layers.embedding import DistributedEmbedding
from smpar.nn.layers.flash import FlashAttentionLayer
from smpar.nn.layers.linear import DistributedLinear
from smpar.nn.layers.lm_head import DistributedTransformerLMHead
from smpar.nn.layers.norm import FusedLayerNorm
from smpar.nn.layers.output import DistributedTransformerOutputLayer
from smpar.nn.layers.transformer import DistributedTransformer, DistributedTransformerLayer
from smpar.nn.module import DistributedModule

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "Family",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "register_family",
]
