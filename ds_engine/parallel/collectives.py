"""Collective operations over a tensor-parallel group, in pairs that are each other's gradient.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden; the suffix ``_T`` marks this rank's shard.

=====================  =========================  =========================  ====================
function               forward                    backward                   shape
=====================  =========================  =========================  ====================
``copy_to``            identity                   all-reduce                 any
``reduce_from``        all-reduce                 identity                   any
``gather_sequence``    all-gather dim 1           reduce-scatter dim 1       (B,S_T,H)->(B,S,H)
``reduce_scatter_…``   reduce-scatter dim 1       all-gather dim 1           (B,S,H)->(B,S_T,H)
``scatter_sequence``   take own part of dim 1     all-gather dim 1           (B,S,…)->(B,S_T,…)
``gather_last``        all-gather last dim        take own part              (…,V_T)->(…,V)
``first_position``     rank 0's first position   to rank 0 alone            (B,S_T,H)->(B,1,H)
``sum_gradient``       identity (on a parameter)  all-reduce                 any
=====================  =========================  =========================  ====================

The pairs are the f/g operators of Shoeybi et al. 2019 (Megatron-LM) and Korthikanti et al. 2022.
Each is the identity when the group has one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_engine.parallel.tensor_parallel import TensorParallel


def all_reduce(
    x: Tensor, tp: TensorParallel, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Return the reduction of ``x`` over the group; ``x`` itself is not changed."""
    if not tp.active:
        return x
    x = x.contiguous().clone()
    dist.all_reduce(x, op=op, group=tp.group)
    return x


def all_gather(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    """Concatenate the ranks' ``x`` along ``dim``."""
    if not tp.active:
        return x
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty(moved.shape[0] * tp.size, *moved.shape[1:])
    dist.all_gather_single(out, moved, group=tp.group)
    return out.movedim(0, dim)


def reduce_scatter(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    """Sum ``x`` over the ranks and keep this rank's part of ``dim``."""
    if not tp.active:
        return x
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty(_part_size(x, tp, dim), *moved.shape[1:])
    dist.reduce_scatter_single(out, moved, group=tp.group)
    return out.movedim(0, dim)


def own_part(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    """This rank's contiguous part of ``dim``; a view."""
    if not tp.active:
        return x
    size = _part_size(x, tp, dim)
    return x.narrow(dim, tp.rank * size, size)


def _part_size(x: Tensor, tp: TensorParallel, dim: int) -> int:
    size, rest = divmod(x.shape[dim], tp.size)
    if rest:
        raise ValueError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} cannot be cut into {tp.size} "
            "equal parts; pad the sequence to a multiple of parallel.tensor"
        )
    return size


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.tp), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return all_reduce(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.tp, 1), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return reduce_scatter(x, tp, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.tp, 1), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return own_part(x, tp, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.tp, 1), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp, x.ndim - 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_part(grad, ctx.tp, grad.ndim - 1).contiguous(), None


class _FirstPosition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp, ctx.shape = tp, x.shape
        first = x[:, :1].contiguous().clone()
        dist.broadcast(first, group=tp.group, group_src=0)
        return first

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        full = grad.new_zeros(ctx.shape)
        if ctx.tp.rank == 0:
            full[:, :1] = grad
        return full, None


def copy_to(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enter a column-parallel product: the same ``x`` on each rank, gradients summed."""
    return _CopyTo.apply(x, tp) if tp.active else x


def reduce_from(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leave a row-parallel product: sum the ranks' partial results."""
    return _ReduceFrom.apply(x, tp) if tp.active else x


def gather_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """(B, S_T, H) -> (B, S, H); gradients are summed and scattered back."""
    return _GatherSequence.apply(x, tp) if tp.active else x


def reduce_scatter_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """(B, S, H) partial sums -> (B, S_T, H) summed."""
    return _ReduceScatterSequence.apply(x, tp) if tp.active else x


def scatter_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """(B, S, ...) equal on all ranks -> this rank's (B, S_T, ...)."""
    return _ScatterSequence.apply(x, tp) if tp.active else x


def gather_last(x: Tensor, tp: TensorParallel) -> Tensor:
    """(..., V_T) -> (..., V)."""
    return _GatherLast.apply(x, tp) if tp.active else x


def first_position(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sequence's first position, for a computation that every rank does alike.

    Its gradient is the same on all ranks, and belongs to the rank that holds the position: without
    sequence parallelism that is each for itself.
    """
    return _FirstPosition.apply(x, tp) if tp.scatters_sequence else x[:, :1]


def sum_gradient(weight: Tensor, tp: TensorParallel) -> Tensor:
    """Use a replicated parameter on different data per rank: its gradient is the ranks' sum.

    Norms, row-parallel biases and positions see one sequence shard a rank under sequence
    parallelism; replicated KV projections see one head a rank. Summing here, on the weight's use,
    keeps the rule beside the layer and independent of the training engine.
    """
    return _CopyTo.apply(weight, tp) if tp.active else weight


def enter(x: Tensor, tp: TensorParallel) -> Tensor:
    """Into a tensor-parallel region: gather the sequence under SP, otherwise copy."""
    return gather_sequence(x, tp) if tp.scatters_sequence else copy_to(x, tp)


def leave(x: Tensor, tp: TensorParallel) -> Tensor:
    """Out of a tensor-parallel region: reduce-scatter the sequence under SP, otherwise reduce."""
    return reduce_scatter_sequence(x, tp) if tp.scatters_sequence else reduce_from(x, tp)


def local_weight(weight: Tensor, tp: TensorParallel) -> Tensor:
    """A replicated parameter as a layer between tensor-parallel regions must use it."""
    return sum_gradient(weight, tp) if tp.scatters_sequence else weight
