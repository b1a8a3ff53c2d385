"""The one handle that every tensor-parallel layer takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """This process's place in its tensor-parallel group.

    Attributes:
        group: the process group, or None when one process holds the whole model.
        rank: position in the group.
        size: number of ranks in the group.
        sequence_parallel: activations outside the matrix products are cut along the sequence
            (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
            Models"); needs ``size > 1`` to have an effect.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence_parallel: bool = False

    @classmethod
    def single(cls) -> TensorParallel:
        """Everything in one plain process; no ``torch.distributed`` needed."""
        return cls(group=None, rank=0, size=1)

    @property
    def active(self) -> bool:
        """Whether there is anything to communicate."""
        return self.size > 1

    @property
    def scatters_sequence(self) -> bool:
        """Whether activations between layers are sequence shards."""
        return self.size > 1 and self.sequence_parallel
