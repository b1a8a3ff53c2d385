"""Dropout whose mask is a pure function of *what* is dropped, never of where it is computed.

The mask of an element depends on (seed, site, sample number, position, channel) through an integer
hash. So recomputation, any micro-batch size, any degree of data, tensor, sequence or pipeline
parallelism and any device give the same mask, without random state to save or restore; different
sequence shards have different masks because their positions differ.

The hash is a two-round multiply-xorshift finaliser; its constants are those that Chris Wellons'
"hash-prospector" search found to have the lowest bias for 32 bits (0x7feb352d, 0x846ca68b).

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_engine.parallel.init import derive_seed

_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit number


def _mix(x: Tensor) -> Tensor:
    """Scramble int32 values in place; a bijection."""
    x ^= (x >> 16) & 0xFFFF
    x *= _M1
    x ^= (x >> 15) & 0x1FFFF
    x *= _M2
    x ^= (x >> 16) & 0xFFFF
    return x


def _fold(x: Tensor) -> Tensor:
    """int64 values of any size -> int32 (the two halves are combined, so none is lost)."""
    return ((x ^ (x >> 32)) & 0xFFFFFFFF).to(torch.int32)


def row_keys(site: int, *indices: Tensor) -> Tensor:
    """Hash integer index tensors that broadcast against each other into one int32 key each.

    Args:
        site: seed of the dropout site.
        indices: int64 tensors, for example sample numbers (B, 1) and positions (1, S).
    """
    key = _mix(torch.tensor([site & 0x7FFFFFFF], dtype=torch.int32, device=indices[0].device))
    for index in indices:
        key = _mix(_fold(index) ^ key)
    return key


def keep_mask(rows: Tensor, num_columns: int, probability: float, first_column: int = 0) -> Tensor:
    """Boolean mask ``rows.shape + (num_columns,)``; True with probability ``1 - probability``."""
    columns = torch.arange(first_column, first_column + num_columns, device=rows.device)
    columns = _mix(columns.to(torch.int32) + 1)
    bits = rows.unsqueeze(-1) ^ columns
    bits *= _M1
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _M2
    # A uniform int32 is below this threshold with exactly the wanted probability (to 2**-32).
    return bits >= int(probability * 2**32) - 2**31


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.where(keep, x * scale, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return torch.where(keep, grad * ctx.scale, 0.0), None, None


def apply_mask(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """Zero the elements that are not kept and scale the others by ``1 / (1 - probability)``."""
    return _Drop.apply(x, keep, 1.0 / (1.0 - probability))


class Dropout(nn.Module):
    """Dropout on activations (B, S, H); see the module's text for what the mask depends on.

    Args:
        probability: of an element to be zeroed, in [0, 1).
        seed: the run's seed.
        site: canonical name of the place in the model, for example ``layers.3.mlp.dropout``.
    """

    def __init__(self, probability: float, seed: int, site: str) -> None:
        super().__init__()
        self.probability = probability
        self.site = derive_seed(seed, "dropout", site)

    def forward(
        self, x: Tensor, sample_ids: Tensor, first_position: int = 0, first_channel: int = 0
    ) -> Tensor:
        """Drop elements of ``x`` (B, S_T, H).

        Args:
            x: activations; dim 1 may be a sequence shard.
            sample_ids: (B,) int64 numbers of the samples in the run.
            first_position: index in the row of ``x``'s first position.
            first_channel: index in the whole model of ``x``'s first channel.
        """
        if not self.training or self.probability == 0.0:
            return x
        positions = torch.arange(first_position, first_position + x.shape[1], device=x.device)
        rows = row_keys(self.site, sample_ids[:, None], positions[None, :])
        keep = keep_mask(rows, x.shape[2], self.probability, first_channel)
        return apply_mask(x, keep, self.probability)
