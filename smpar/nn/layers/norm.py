"""Norms over the hidden dim."""

from __future__ import annotations

from torch import nn

from smpar.nn.layers.options import Options


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm, [.., H] -> [.., H], with ``nn.LayerNorm``'s arguments and names: torch's is one kernel already."""


def norm_of(options: Options) -> nn.Module:
    """The norm that the options ask for."""
    if options.norm == "rmsnorm":
        return nn.RMSNorm(options.hidden_size, eps=options.layernorm_epsilon)
    return FusedLayerNorm(options.hidden_size, eps=options.layernorm_epsilon)
