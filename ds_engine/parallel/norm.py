"""Normalisation layers. Each rank holds the whole weight; under sequence parallelism each sees
other positions, so the weight's gradient is summed over the group (``local_weight``)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.collectives import local_weight
from ds_engine.parallel.parameter import ONES, ZEROS, make_parameter
from ds_engine.parallel.tensor_parallel import TensorParallel


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension (Ba et al. 2016), with weight and bias."""

    def __init__(self, size: int, epsilon: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.epsilon = tp, epsilon
        self.weight = make_parameter((size,), tp, ONES)
        self.bias = make_parameter((size,), tp, ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        weight, bias = local_weight(self.weight, self.tp), local_weight(self.bias, self.tp)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019), no bias."""

    def __init__(self, size: int, epsilon: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.epsilon = tp, epsilon
        self.weight = make_parameter((size,), tp, ONES)

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        weight = local_weight(self.weight, self.tp)
        return F.rms_norm(x, weight.shape, weight, self.epsilon)


def make_norm(kind: str, size: int, epsilon: float, tp: TensorParallel) -> LayerNorm | RMSNorm:
    """Build the norm that a model section names: ``layernorm`` or ``rmsnorm``."""
    if kind == "layernorm":
        return LayerNorm(size, epsilon, tp)
    return RMSNorm(size, epsilon, tp)
