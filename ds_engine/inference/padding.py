"""Rows of unequal length as tensors. Padding is a document of its own (segment -1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions and segments (B, S) and sample numbers (B,) of a batch of prompts.

    Args:
        prompts: not empty, none of them empty; S is the longest.
        device: of the tensors.
    """
    batch, longest = len(prompts), max(map(len, prompts))
    tokens = torch.zeros(batch, longest, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    positions = torch.arange(longest) - padding[:, None]
    segments = torch.where(positions < 0, -1, 0)
    parts = (tokens, positions.clamp(min=0), segments, torch.arange(batch))
    tokens, positions, segments, sample_ids = (part.to(device) for part in parts)
    return tokens, positions, segments, sample_ids


def right_padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and segments (B, S) of a batch, padded at the end.

    Args:
        rows: not empty, none of them empty; S is the longest.
        device: of the tensors.
    """
    batch, longest = len(rows), max(map(len, rows))
    tokens = torch.zeros(batch, longest, dtype=torch.long)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = torch.tensor(row, dtype=torch.long)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    positions = torch.arange(longest).expand(batch, -1)
    padding = positions >= lengths
    segments = torch.where(padding, -1, 0)
    positions = torch.where(padding, positions - lengths, positions)
    return tokens.to(device), positions.to(device), segments.to(device)
