"""Labels and weights of a micro-batch: how many count, and what a model made of them.

The targets of a micro-batch are ``(labels, weights)`` of each loss term in turn. A term is summed
over its targets and divided by their number in the *whole* batch, each term by its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Targets = tuple[Tensor, ...]


def count_targets(batches: Sequence[Targets]) -> Tensor:
    """Valid targets of each loss term over some micro-batches: (terms,) float64."""
    counts = [
        torch.stack([weights.sum(dtype=torch.float64) for weights in targets[1::2]])
        for targets in batches
    ]
    return torch.stack(counts).sum(0)


def weigh_targets(targets: Targets, scales: Sequence[float]) -> Targets:
    """The targets with the weights of each loss term multiplied by its scale."""
    pairs = zip(targets[::2], targets[1::2], scales, strict=True)
    return tuple(part for labels, weights, scale in pairs for part in (labels, weights * scale))


class TermSums:
    """Sums of what a model's last layer returns over micro-batches, read by whoever drives it.

    Args:
        num_losses: how many of the numbers are loss terms; further ones are accuracies.
    """

    def __init__(self, num_losses: int) -> None:
        self.num_losses = num_losses
        self._sums: Tensor | None = None

    def add(self, numbers: Tensor) -> Tensor:
        """Note a micro-batch's numbers, a scalar or (n,); return the loss, to differentiate."""
        numbers = numbers.reshape(-1)
        found = numbers.detach().double()
        self._sums = found if self._sums is None else self._sums + found
        return numbers[: self.num_losses].sum()

    def take(self, count: int, device: torch.device) -> Tensor:
        """(count,) float64 sums since the last call; zeros if nothing was noted here."""
        sums, self._sums = self._sums, None
        return torch.zeros(count, dtype=torch.float64, device=device) if sums is None else sums
