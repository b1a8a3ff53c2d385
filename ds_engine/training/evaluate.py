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
from ds_engine.pipeline.plan import LayerPlan
from ds_engine.pipeline.sequential import SequentialModel
from ds_engine.pipeline.targets import count_targets
from ds_engine.training.metrics import perplexity


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        loss: mean over tokens, nats; of several loss terms the sum of their means.
        tokens: target tokens that counted (of the first term).
        measures: means by name where there is more to say: several loss terms, accuracies.
        words: mean of the term whose perplexity means something, or None.
    """

    loss: float
    tokens: int
    measures: dict[str, float] = field(default_factory=dict)
    words: float | None = None

    def metrics(self) -> dict[str, float]:
        """Under the trackers' names."""
        found = {"validation/loss": self.loss}
        if self.words is not None:
            found["validation/perplexity"] = perplexity(self.words)
        return found | {f"validation/{name}": value for name, value in self.measures.items()}


@dataclass(frozen=True)
class TermTotals:
    """A plan's measures summed over a validation set.

    Attributes:
        sums: of the measures over the valid targets.
        counts: valid targets of each loss term.
    """

    sums: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sums: Tensor, counts: Tensor) -> TermTotals:
        """From (measures,) and (terms,) tensors."""
        return cls(tuple(sums.tolist()), tuple(map(int, counts.tolist())))

    def evaluation(self, plan: LayerPlan) -> Evaluation:
        """The means."""
        means = {
            measure.name: total / max(self.counts[measure.term], 1)
            for measure, total in zip(plan.measures, self.sums, strict=True)
        }
        losses = [means[term.name] for term in plan.losses]
        words = losses[0] if plan.losses[0].num_classes is None else None
        return Evaluation(sum(losses), self.counts[0], means if len(means) > 1 else {}, words)


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
        device, plan = self.device, self.model.plan
        counts = torch.zeros(len(plan.losses), dtype=torch.float64, device=device)
        with torch.no_grad():
            for inputs, targets in batches:
                moved = tuple(t.to(device) for t in targets)
                self.call(tuple(t.to(device) for t in inputs), moved)
                counts += count_targets([moved])
        sums = self.model.terms.take(len(plan.measures), device)
        if self.context.get_data_parallel_world_size() > 1:
            for value in (sums, counts):
                dist.all_reduce(value, group=self.context.data_group)
        return TermTotals.of(sums, counts)


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
        plan: of its model.
        micro_batch_size: samples in a micro-batch.
        max_samples: samples to use at most.
    """

    def __init__(
        self,
        dataset: ValidationDataset,
        objective: Objective,
        step: Any,
        plan: LayerPlan,
        *,
        micro_batch_size: int,
        max_samples: int,
    ) -> None:
        context = step.context
        self._step, self._plan = step, plan
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
        return totals.evaluation(self._plan)

    def _batches(self) -> Iterator[Batch]:
        """This replica's micro-batches, one at a time: a whole set may not fit into memory."""
        for number in range(self._count):
            yield from self._loader.step(number * self._share, self._share)
