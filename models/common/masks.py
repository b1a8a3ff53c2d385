"""Who may attend to whom, derived from positions in the row and document numbers.

Legend: ``B`` batch, ``Q`` query and ``K`` key positions, ``N`` heads.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMask:
    """The rule, and its dense forms made once for all layers of a stage.

    Attributes:
        causal: a query sees no later key.
        allowed: (B or 1, 1, Q, K) bool, True where attention is allowed; None when the causal rule
            is all there is, so that kernels may use their own causal path.
        bias: (B or 1, N_T, Q, K) float added to the scores (ALiBi), or None.
        window: sliding window in tokens, or None.
        documents: for flash-attn's variable-length kernel, where it can be used: offsets of the
            documents in the flattened batch (int32) and the longest document.
    """

    causal: bool
    allowed: Tensor | None
    bias: Tensor | None
    window: int | None
    device: torch.device
    documents: tuple[Tensor, int] | None = None

    def additive(self, dtype: torch.dtype, num_queries: int, num_keys: int) -> Tensor | None:
        """The whole rule as one tensor to add to scores; None when everything is allowed."""
        allowed = self.allowed
        if allowed is None and self.causal:
            allowed = causal_rule(num_queries, num_keys, self.device)[None, None]
        if allowed is None:
            return None if self.bias is None else self.bias.to(dtype)
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        base = zero if self.bias is None else self.bias.to(dtype)
        return torch.where(allowed, base, float("-inf"))


def causal_rule(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """(Q, K) bool; the last query is at the last key."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(num_keys - num_queries)


def document_mask(
    query_segments: Tensor,
    key_segments: Tensor,
    *,
    isolate: bool,
    window: int | None = None,
    bias: Tensor | None = None,
) -> AttentionMask:
    """Causal attention inside documents.

    Args:
        query_segments: (B, Q); key_segments: (B, K), whose last Q entries are the queries.
        isolate: documents of one row do not see each other.
        window: a query sees itself and the ``window - 1`` tokens before it.
        bias: see ``AttentionMask.bias``.
    """
    num_queries, num_keys = query_segments.shape[1], key_segments.shape[1]
    allowed = None
    if isolate or window is not None or num_queries != num_keys:
        allowed = causal_rule(num_queries, num_keys, key_segments.device)
        if window is not None:
            allowed = allowed & ~allowed.tril(num_keys - num_queries - window)
        allowed = allowed[None, None]
        if isolate:
            same = query_segments[:, :, None] == key_segments[:, None, :]
            allowed = allowed & same[:, None]
    documents = None
    if (
        query_segments.is_cuda
        and bias is None
        and num_queries == num_keys
        and has_flash_attention()
    ):
        documents = document_offsets(query_segments, isolate=isolate)
    mask = AttentionMask(True, allowed, None, window, key_segments.device, documents)
    return mask if bias is None else with_bias(mask, bias)


def segment_mask(
    query_segments: Tensor, key_segments: Tensor, *, bias: Tensor | None = None
) -> AttentionMask:
    """Attention in both directions inside documents; also of a decoder to its encoder.

    Args:
        query_segments: (B, Q); key_segments: (B, K), of the same or of another sequence.
        bias: (1, N_T, Q, K) added to the scores, or None.
    """
    allowed = (query_segments[:, :, None] == key_segments[:, None, :])[:, None]
    if query_segments is not key_segments:
        # Padding may find no key of its own; it then sees all, and its result counts for nothing.
        allowed = allowed | ~allowed.any(-1, keepdim=True)
    documents = None
    if query_segments.is_cuda and query_segments is key_segments and bias is None:
        documents = (
            document_offsets(query_segments, isolate=True) if has_flash_attention() else None
        )
    mask = AttentionMask(False, allowed, None, None, key_segments.device, documents)
    return mask if bias is None else with_bias(mask, bias)


def with_bias(mask: AttentionMask, bias: Tensor) -> AttentionMask:
    """The rule and a bias (1, N_T, Q, K) as one tensor, made once for all layers of a stage."""
    queries, keys = bias.shape[-2:]
    dense = replace(mask, bias=bias).additive(bias.dtype, queries, keys)
    return AttentionMask(False, None, dense, mask.window, mask.device)


def has_flash_attention() -> bool:
    """Whether flash-attn is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def document_offsets(segments: Tensor, *, isolate: bool) -> tuple[Tensor, int]:
    """Where documents start in the flattened (B * S) batch, with the end appended; the longest.

    Args:
        segments: (B, S) document numbers.
        isolate: False: each row is one document.
    """
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = (segments[:, 1:] != segments[:, :-1]) if isolate else False
    offsets = starts.flatten().nonzero().flatten()
    offsets = torch.cat([offsets, offsets.new_tensor([segments.numel()])]).to(torch.int32)
    return offsets, int(offsets.diff().max())
