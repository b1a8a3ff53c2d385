"""Word embedding whose vocabulary is cut over the group; also the tied output projection.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``V`` words; ``_T`` this rank's part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.collectives import leave
from ds_engine.parallel.parameter import Init, make_parameter
from ds_engine.parallel.tensor_parallel import TensorParallel


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
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.tp.rank * rows
        foreign = (local < 0) | (local >= rows)
        part = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return leave(part.masked_fill(foreign[..., None], 0.0), self.tp)
