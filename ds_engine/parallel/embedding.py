"""Word embedding whose vocabulary is cut over the group; also the tied output projection.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``V`` words; ``_T`` this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.collectives import leave
from ds_engine.parallel.parameter import Init, make_parameter
from ds_engine.parallel.tensor_parallel import TensorParallel


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradients of uses of one row are added up in float32."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.rows, grad.shape[-1], dtype=torch.float32)
        total.index_add_(0, index.flatten(), grad.flatten(0, -2).float())
        return None, total.to(grad.dtype)


def look_up(index: Tensor, table: Tensor) -> Tensor:
    """Rows of a table (R, H) by ``index`` (...) int64 -> (..., H).

    On a CPU torch adds up the gradients of a row in the table's own precision (2.13): in bf16 a sum
    stands still after some hundred equal terms, and a row of token types or of relative positions
    has thousands of uses. A GPU's kernel adds in float32 by itself.
    """
    if table.device.type == "cpu" and table.dtype in (torch.bfloat16, torch.float16):
        return _Lookup.apply(index, table)
    return F.embedding(index, table)


class VocabParallelEmbedding(nn.Module):
    """Table (V, H) with its rows cut over the group.

    Args:
        vocab_size: real words.
        padded_size: rows of the table, a multiple of the group's size; the surplus stays zero.
        hidden_size: H.
    """

    def __init__(
        self, vocab_size: int, padded_size: int, hidden_size: int, tp: TensorParallel, init: Init
    ) -> None:
        super().__init__()
        self.tp = tp
        shape = (padded_size, hidden_size)
        self.weight = make_parameter(shape, tp, init, dim=0, valid=vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 -> (B, S, H), or (B, S_T, H) under sequence parallelism."""
        if not self.tp.active:
            return look_up(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.tp.rank * rows
        foreign = (local < 0) | (local >= rows)
        part = look_up(local.masked_fill(foreign, 0), self.weight)
        return leave(part.masked_fill(foreign[..., None], 0.0), self.tp)
