"""Attention kernels behind one call: flash-attn on a GPU, torch's SDPA, or written out.

All take queries (B, Q, N, D), keys and values (B, K, M, D) with N a multiple of M (grouped-query
attention) and return (B, Q, N, D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_engine.errors import ConfigError
from ds_engine.parallel.random import apply_mask, keep_mask, row_keys
from models.common.masks import AttentionMask

# flash-attn 2 has kernels for NVIDIA's Ampere and newer.
FLASH_CAPABILITY = 8
# Below this many keys, bf16 products written out beat SDPA's CPU kernel (README, benchmarks).
REFERENCE_BELOW = 512


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout on attention probabilities, keyed like ``ds_engine.parallel.random``."""

    probability: float
    site: int
    first_head: int
    sample_ids: Tensor

    def __call__(self, probabilities: Tensor) -> Tensor:
        """(B, N_T, Q, K) -> the same."""
        _, heads, queries, keys = probabilities.shape
        device = probabilities.device
        head = torch.arange(self.first_head, self.first_head + heads, device=device)
        query = torch.arange(keys - queries, keys, device=device)
        rows = row_keys(
            self.site, self.sample_ids[:, None, None], head[None, :, None], query[None, None, :]
        )
        keep = keep_mask(rows, keys, self.probability)
        return apply_mask(probabilities, keep, self.probability)


def choose_backend(requested: str, query: Tensor, mask: AttentionMask, *, dropout: bool) -> str:
    """Resolve ``auto`` for these tensors; dropout needs the written-out form."""
    if dropout:
        return "reference"
    if requested != "auto":
        return requested
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda:
        fits = half and mask.documents is not None and _runs_flash(query.device)
        return "flash" if fits else "sdpa"
    return "reference" if half and query.shape[1] < REFERENCE_BELOW else "sdpa"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    backend: str,
    dropout: AttentionDropout | None,
) -> Tensor:
    """Softmax attention of this rank's heads.

    Args:
        backend: ``auto``, ``flash``, ``sdpa`` or ``reference``.
        scale: factor on the scores.
    """
    backend = choose_backend(backend, query, mask, dropout=dropout is not None)
    if backend == "flash":
        return _flash(query, key, value, mask, scale)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if backend == "sdpa":
        out = _sdpa(query, key, value, mask, scale)
    else:
        out = _reference(query, key, value, mask, scale, dropout)
    return out.transpose(1, 2)


def _runs_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= FLASH_CAPABILITY


def _flash_kernel(query: Tensor, mask: AttentionMask) -> tuple[Any, tuple[Tensor, int]]:
    """flash-attn's function and the documents that it takes.

    Raises:
        ConfigError: it is not installed or cannot compute this attention.
    """
    wrong, other = 'model.attention.backend = "flash" cannot be used: ', 'use "auto" or "sdpa"'
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ConfigError(
            f"{wrong}flash-attn cannot be imported ({error}); install it with "
            f'pip install -e ".[flash]", or {other}'
        ) from error
    if not query.is_cuda or not _runs_flash(query.device):
        raise ConfigError(
            f"{wrong}flash-attn needs an NVIDIA GPU of compute capability {FLASH_CAPABILITY} or "
            f"higher, and this rank's device is {query.device}; {other}"
        )
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"{wrong}flash-attn computes in bf16 and fp16, not in {query.dtype}; add "
            f"ds_configs/deepspeed/bf16.json, or {other}"
        )
    if mask.documents is None:
        raise ConfigError(
            f"{wrong}flash-attn has no bias on scores, no cross-attention and no generation cache; "
            f"{other}"
        )
    return flash_attn_varlen_func, mask.documents


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    kernel, (starts, longest) = _flash_kernel(query, mask)
    window = (-1, -1) if mask.window is None else (mask.window - 1, 0)
    out = kernel(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        starts,
        starts,
        longest,
        longest,
        softmax_scale=scale,
        causal=mask.causal,
        window_size=window,
    )
    return out.view_as(query)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    plain = mask.causal and mask.allowed is None and mask.bias is None
    if plain:
        dense = None
    elif mask.bias is None:
        dense = mask.allowed
    else:
        dense = mask.additive(query.dtype, query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=dense,
        is_causal=plain,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float,
    dropout: AttentionDropout | None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    rule = mask.additive(scores.dtype, scores.shape[2], scores.shape[3])
    if rule is not None:
        scores = scores + rule
    probabilities = torch.softmax(scores, -1)
    if dropout is not None:
        probabilities = dropout(probabilities)
    return torch.matmul(probabilities, value)
