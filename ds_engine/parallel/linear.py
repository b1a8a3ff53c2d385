"""Linear layers whose weight is cut over the tensor-parallel group (Megatron-LM's scheme).

A column-parallel product followed by a row-parallel one needs one communication on the way in and
one on the way out; with sequence parallelism these become an all-gather and a reduce-scatter of
the same size, and everything between the products holds only a part of the sequence.

Legend: ``B`` batch, ``S`` sequence, ``I`` input and ``O`` output features; ``_T`` this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.collectives import (
    all_gather,
    copy_to,
    leave,
    local_weight,
    reduce_scatter,
)
from ds_engine.parallel.parameter import ZEROS, Init, make_parameter
from ds_engine.parallel.tensor_parallel import TensorParallel


class _GatheredLinear(torch.autograd.Function):
    """all-gather + products; keeps only the sequence shard and gathers again in the backward pass.

    The second gather trades communication for ``size`` times less activation memory, as in
    Korthikanti et al. 2022, section 4.2.2. Several weights share one gather.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        ctx.save_for_backward(x, *weights)
        gathered = all_gather(x, tp, 1)
        return tuple(F.linear(gathered, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            parts = [g @ w for g, w in zip(grads, weights, strict=True)]
            grad_x = reduce_scatter(torch.stack(parts).sum(0) if parts[1:] else parts[0], ctx.tp, 1)
        flat = all_gather(x, ctx.tp, 1).reshape(-1, x.shape[-1])
        return grad_x, None, *(g.reshape(-1, g.shape[-1]).t() @ flat for g in grads)


def column_parallel(
    x: Tensor, tp: TensorParallel, *pairs: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, ...]:
    """Products of one input with several (weight, bias) pairs, communicating the input once.

    Args:
        x: (B, S, I), or (B, S_T, I) under sequence parallelism.
        pairs: this rank's weights (O_T, I) and biases (O_T,).

    Returns:
        (B, S, O_T) for each pair.
    """
    if not tp.scatters_sequence:
        x = copy_to(x, tp)
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)
    outputs = _GatheredLinear.apply(x, tp, *(weight for weight, _ in pairs))
    biases = (bias for _, bias in pairs)
    return tuple(y if b is None else y + b for y, b in zip(outputs, biases, strict=True))


class ColumnParallelLinear(nn.Module):
    """``y_T = x W_T^T + b_T`` with the output features cut over the group.

    Args:
        in_features: I, whole on each rank.
        out_features: O in all; each of ``blocks`` must be divisible by the group's size.
        tp: the tensor-parallel handle.
        bias: whether there is a bias (cut like the outputs).
        init: starting values of the weight.
        blocks: sizes of matrices fused along O (for example Q, K, V); default one block.

    Raises:
        ValueError: a block is not divisible by the group's size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        bias: bool,
        init: Init,
        blocks: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        for block in blocks or (out_features,):
            if block % tp.size:
                raise ValueError(
                    f"{block} output features cannot be cut into {tp.size} equal parts"
                )
        self.tp = tp
        shape = (out_features, in_features)
        self.weight = make_parameter(shape, tp, init, dim=0, blocks=blocks)
        self.bias = (
            make_parameter((out_features,), tp, ZEROS, dim=0, blocks=blocks) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, I), or (B, S_T, I) under sequence parallelism -> (B, S, O_T)."""
        return column_parallel(x, self.tp, (self.weight, self.bias))[0]


class RowParallelLinear(nn.Module):
    """``y = sum over ranks of x_T W_T^T, + b`` with the input features cut over the group.

    The bias is whole on each rank and added once, after the reduction.

    Raises:
        ValueError: ``in_features`` is not divisible by the group's size.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: TensorParallel, *, bias: bool, init: Init
    ) -> None:
        super().__init__()
        if in_features % tp.size:
            raise ValueError(
                f"{in_features} input features cannot be cut into {tp.size} equal parts"
            )
        self.tp = tp
        self.weight = make_parameter((out_features, in_features), tp, init, dim=1)
        self.bias = make_parameter((out_features,), tp, ZEROS) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, I_T) -> (B, S, O), or (B, S_T, O) under sequence parallelism."""
        if not self.tp.active:
            return F.linear(x, self.weight, self.bias)
        y = leave(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + local_weight(self.bias, self.tp)


class ReplicatedLinear(nn.Module):
    """``y = x W^T + b``, whole on each rank, for small heads between tensor-parallel regions.

    Under sequence parallelism each rank applies it to other positions, and gradients are summed.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, init: Init) -> None:
        super().__init__()
        self.tp = tp
        self.weight = make_parameter((out_features, in_features), tp, init)
        self.bias = make_parameter((out_features,), tp, ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the precision of ``x``."""
        weight, bias = local_weight(self.weight, self.tp), local_weight(self.bias, self.tp)
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
