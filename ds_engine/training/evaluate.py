"""Loss on held-out text, in any layout, at any moment, without touching training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_engine.data.dataset import ValidationDataset
from ds_engine.data.loader import Batch, BatchLoader
from ds_engine.data.objective import Objective
from ds_engine.parallel.context import ParallelContext
from ds_engine.pipeline.sequential import SequentialModel
from ds_engine.pipeline.targets import count_targets
from ds_engine.training.metrics import perplexity


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        loss: mean over tokens, nats; of several loss terms the sum of their means.
        tokens: target tokens that counted (of the first term).
        terms: means of the terms by name, where there are several.
    """

    loss: float
    tokens: int
    terms: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Under the trackers' names; perplexity is of the first term, the words."""
        words = next(iter(self.terms.values()), self.loss)
        found = {"validation/loss": self.loss, "validation/perplexity": perplexity(words)}
        return found | {f"validation/{name}": value for name, value in self.terms.items()}


@dataclass(frozen=True)
class TermTotals:
    """Loss terms summed over a validation set.

    Attributes:
        names: of the terms.
        sums: of the losses of the valid targets.
        counts: of the valid targets.
    """

    names: tuple[str, ...]
    sums: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, names: tuple[str, ...], sums: Tensor, counts: Tensor) -> TermTotals:
        """From (terms,) tensors."""
        return cls(names, tuple(sums.tolist()), tuple(map(int, counts.tolist())))

    def evaluation(self) -> Evaluation:
        """The means."""
        means = [total / max(count, 1) for total, count in zip(self.sums, self.counts, strict=True)]
        terms = dict(zip(self.names, means, strict=True)) if len(means) > 1 else {}
        return Evaluation(sum(means), self.counts[0], terms)


class ModelStep:
    """A bare model as something that an ``Evaluator`` can evaluate, without DeepSpeed.

    Args:
        call: runs the model, in evaluation mode: the model itself or an engine around it.
        model: a ``SequentialModel``, whole or tensor-parallel.
        context: the live groups.
        device: where the model computes; its parameters may lie elsewhere (offload).
    """

    reads_data = True

    def __init__(
        self, call: Any, model: SequentialModel, context: ParallelContext, device: torch.device
    ) -> None:
        self.call, self.model, self.context, self.device = call, model, context, device

    def evaluate(self, batches: Iterable[Any], count: int) -> TermTotals:
        """Sums and counts of the loss terms over all replicas."""
        device, names = self.device, self.model.plan.loss_names
        counts = torch.zeros(len(names), dtype=torch.float64, device=device)
        with torch.no_grad():
            for inputs, targets in batches:
                moved = tuple(t.to(device) for t in targets)
                self.call(tuple(t.to(device) for t in inputs), moved)
                counts += count_targets([moved])
        total = torch.stack([self.model.terms.take(len(names), device), counts])
        if self.context.get_data_parallel_world_size() > 1:
            dist.all_reduce(total, group=self.context.data_group)
        return TermTotals.of(names, total[0], total[1])


class _First:
    """The first ``count`` samples of a validation set; behind them, samples without a token."""

    def __init__(self, dataset: ValidationDataset, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index if index < self._count else len(self._dataset) + index]


class Evaluator:
    """Evaluates a ``TrainStep`` on the first samples of a validation set.

    The set is cut into whole micro-batches for all replicas; what is missing at the end is filled
    with samples that count for nothing, so every layout sees the same tokens.

    Args:
        dataset: validation samples.
        objective: turns samples into rows.
        step: the ``TrainStep``.
        micro_batch_size: samples in a micro-batch.
        max_samples: samples to use at most.
    """

    def __init__(
        self,
        dataset: ValidationDataset,
        objective: Objective,
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
        totals: TermTotals = self._step.evaluate(batches, self._count)
        return totals.evaluation()

    def _batches(self) -> Iterator[Batch]:
        """This replica's micro-batches, one at a time: a whole set may not fit into memory."""
        for number in range(self._count):
            yield from self._loader.step(number * self._share, self._share)
