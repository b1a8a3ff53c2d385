"""Loss on held-out text, in any layout, at any moment, without touching training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_engine.data.causal_lm import CausalLM
from ds_engine.data.dataset import ValidationDataset
from ds_engine.data.loader import Batch, BatchLoader
from ds_engine.data.samples import Sample
from ds_engine.parallel.context import ParallelContext
from ds_engine.training.metrics import perplexity


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        loss: mean over tokens, nats.
        tokens: target tokens that counted.
    """

    loss: float
    tokens: int

    def metrics(self) -> dict[str, float]:
        """Under the trackers' names."""
        return {"validation/loss": self.loss, "validation/perplexity": perplexity(self.loss)}


class ModelStep:
    """A bare model as something that an ``Evaluator`` can evaluate, without DeepSpeed.

    Args:
        model: in evaluation mode, whole or tensor-parallel.
        context: the live groups.
        device: where the model computes; its parameters may lie elsewhere (offload).
    """

    reads_data = True

    def __init__(self, model: nn.Module, context: ParallelContext, device: torch.device) -> None:
        self.model, self.context, self.device = model, context, device

    def evaluate(self, batches: Iterable[Any], count: int) -> tuple[float, int]:
        """(sum of token losses, number of tokens) over all replicas."""
        device = self.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for inputs, (labels, mask) in batches:
                moved = tuple(t.to(device) for t in inputs)
                total[0] += self.model(moved, (labels.to(device), mask.to(device)))
                total[1] += mask.sum()
        if self.context.get_data_parallel_world_size() > 1:
            dist.all_reduce(total, group=self.context.data_group)
        loss, tokens = total.tolist()
        return loss, int(tokens)


class _First:
    """The first ``count`` samples of a validation set; behind them, samples without a token."""

    def __init__(self, dataset: ValidationDataset, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[index if index < self._count else len(self._dataset) + index]


class Evaluator:
    """Evaluates a ``TrainStep`` on the first samples of a validation set.

    The set is cut into whole micro-batches for all replicas; what is missing at the end is filled
    with samples that count for nothing, so every layout sees the same tokens.

    Args:
        dataset: validation samples.
        objective: turns a sample into a row.
        step: the ``TrainStep``.
        micro_batch_size: samples in a micro-batch.
        max_samples: samples to use at most.
    """

    def __init__(
        self,
        dataset: ValidationDataset,
        objective: CausalLM,
        step: Any,
        *,
        micro_batch_size: int,
        max_samples: int,
    ) -> None:
        context = step.context
        self._step = step
        replicas = context.get_data_parallel_world_size()
        samples = min(len(dataset), max_samples)
        self._loader = BatchLoader(
            _First(dataset, samples),
            objective,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=context.get_data_parallel_rank(),
            data_parallel_size=replicas,
            prefetch=0,
        )
        self._share = micro_batch_size * replicas
        self._count = -(-samples // self._share)

    def run(self) -> Evaluation:
        """Evaluate; all ranks call this. The result is complete on ranks that read data."""
        batches = self._batches() if self._step.reads_data else None
        loss, tokens = self._step.evaluate(batches, self._count)
        return Evaluation(loss / max(tokens, 1), tokens)

    def _batches(self) -> Iterator[Batch]:
        """This replica's micro-batches, one at a time: a whole set may not fit into memory."""
        for number in range(self._count):
            yield from self._loader.step(number * self._share, self._share)
