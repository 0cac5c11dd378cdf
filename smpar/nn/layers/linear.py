"""A linear that is divided inside and whole outside."""

from __future__ import annotations

from torch import nn

from smpar.nn.group import TensorGroup
from smpar.nn.linears import divide_linear


class DistributedLinear(nn.Linear):
    """[.., in_features] -> [.., out_features], whole on every rank, with its values and names.

    It is divided by the features of which there are more, as that moves less. Where ranks bring different samples, they
    lie along the first dim.

    Raises:
        NotInitialized: ``smpar.init`` has not run.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        group = TensorGroup.current()
        if group.size > 1:
            divide_linear(self, group)
