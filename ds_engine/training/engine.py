"""From a layer plan to a training step on a live world: the only door to DeepSpeed's engines.

The loss of a batch is the sum over its valid target tokens divided by their number in the *whole*
batch: all micro-batches, all replicas; where it has several terms, each by its own number. The
masks are known before the first forward pass, so they are counted first, and a token weighs ``mask
* accumulation * replicas / count``: DeepSpeed's own division by accumulation steps and replicas
then leaves the exact mean. It does not depend on micro-batch size, accumulation or data
parallelism. A batch without valid tokens has loss 0.

Legend: ``B`` micro-batch, ``S`` sequence.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_engine.errors import ConfigError
from ds_engine.parallel.context import ParallelContext, RankInfo
from ds_engine.pipeline.engine import make_engine
from ds_engine.pipeline.plan import Batch, LayerPlan
from ds_engine.pipeline.sequential import SequentialModel
from ds_engine.pipeline.stage import StageModule
from ds_engine.pipeline.targets import count_targets, weigh_targets
from ds_engine.training.evaluate import ModelStep, TermTotals

GPU_OPTIMIZERS = ("lamb", "lion")


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: mean over the batch's valid tokens (objective terms such as z-loss included).
        grad_norm: global gradient norm before clipping; infinite when not finite.
        tokens: valid target tokens in the whole batch (0 on stages that read no data).
        skipped: whether the update was left out because a gradient was not finite.
        terms: the loss's terms by name, where there are several.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    terms: dict[str, float] = field(default_factory=dict)


def init_distributed(timeout_seconds: float = 1800.0) -> None:
    """Join the world that the launcher's environment describes, through DeepSpeed's accelerator."""
    # The shared-memory op serves only inference_all_reduce; building it takes minutes and leaves
    # 69 MB per rank in /dev/shm for ever (DeepSpeed 0.19.8).
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not dist.is_initialized():
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            timeout=timedelta(seconds=timeout_seconds),
            verbose=False,
        )
    elif not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(verbose=False)
    # Before the first collective: else every rank would talk through device 0.
    get_accelerator().set_device(RankInfo.from_environment().local_rank)


def check_precision(dtype: torch.dtype) -> None:
    """Refuse a precision that this machine's accelerator cannot train in.

    Raises:
        ConfigError: naming the device and the precision to use instead.
    """
    accelerator = get_accelerator()
    if dtype is torch.float16 and not accelerator.is_fp16_supported():
        raise ConfigError(
            f"deepspeed.fp16.enabled = true, but the device here is {accelerator.device_name()}, "
            "which has no fp16 training; use ds_configs/deepspeed/bf16.json"
        )
    if dtype is torch.bfloat16 and not accelerator.is_bf16_supported():
        raise ConfigError(
            f"deepspeed.bf16.enabled = true, but the device here is {accelerator.device_name()}, "
            "which has no bf16; use ds_configs/deepspeed/fp16.json or fp32.json"
        )


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that this machine's accelerator has no kernel for.

    Args:
        name: ``deepspeed.optimizer.type``.

    Raises:
        ConfigError: naming the optimizer and those to use instead.
    """
    if get_accelerator().device_name() == "cpu" and name.lower() in GPU_OPTIMIZERS:
        raise ConfigError(
            f"deepspeed.optimizer.type = {name}, but the device here is cpu, and DeepSpeed's "
            f"{name} is a GPU kernel; use AdamW, Adam, Adagrad or SGD"
        )


def full_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's whole reduced gradient in float32, collected from ZeRO's partitions."""
    return deepspeed.utils.safe_get_full_grad(parameter)


def full_weight(parameter: Tensor) -> Tensor:
    """This rank's whole weight in float32: the master copy where ZeRO or bf16 keep one."""
    master = deepspeed.utils.safe_get_full_fp32_param(parameter)
    return (parameter if master is None else master).detach()


def gather_parameter(parameter: Tensor) -> Tensor:
    """A copy of the weight that ZeRO-3 has cut over the replicas; every replica must call."""
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def parameter_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices with weight decay; norms and biases (one dimension) without, as in GPT-3."""
    decayed = [p for p in parameters.values() if p.requires_grad and p.ndim > 1]
    rest = [p for p in parameters.values() if p.requires_grad and p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_train_step(
    plan: LayerPlan,
    context: ParallelContext,
    config: dict[str, Any],
    *,
    partition: str = "balanced",
    recompute_every: int = 0,
    initial: Callable[[dict[str, nn.Parameter]], None] | None = None,
) -> TrainStep:
    """Build this rank's part of the model and wrap it in a DeepSpeed engine.

    With pipeline stages a ``StageModule`` (ZeRO 0 and 1), otherwise a ``SequentialModel`` (all
    ZeRO stages, offload). ``init_distributed`` must have been called.

    Args:
        plan: the model, made with this context's tensor-parallel handle.
        context: the live groups.
        config: DeepSpeed's JSON, normalised by ``ds_engine.config.deepspeed``.
        partition: how layers are cut into stages.
        recompute_every: activation checkpointing, see ``recomputed_layers``.
        initial: changes this rank's parameters (by canonical name) before training.
    """
    module: StageModule | SequentialModel
    if context.dims.pipeline > 1:
        module = StageModule(
            plan, context.dims, partition=partition, recompute_every=recompute_every
        )
    else:
        module = SequentialModel(plan, recompute_every)
    parameters = module.canonical_parameters()
    if initial is not None:
        initial(parameters)
    groups = parameter_groups(parameters)
    engine = make_engine(module, groups, config, context)
    return (_PipelineStep if context.dims.pipeline > 1 else _PlainStep)(engine, module, context)


class TrainStep(ABC):
    """Forward, backward and update on one rank: one interface for both engines.

    Attributes:
        engine: DeepSpeed's.
        module: this rank's part of the model.
        context: the live groups.
    """

    def __init__(self, engine: Any, module: Any, context: ParallelContext) -> None:
        self.engine, self.module, self.context = engine, module, context

    @property
    @abstractmethod
    def reads_data(self) -> bool:
        """Whether this rank needs batches (first and last stages do)."""

    def train_batch(
        self,
        batches: Sequence[Batch] | None,
        learning_rate: float,
        *,
        samples: int | None = None,
    ) -> StepResult:
        """Train on this replica's micro-batches of one step.

        Args:
            batches: None on stages that read no data.
            learning_rate: of this update.
            samples: in the global batch. A stage without data cannot count them, so it is needed
                where the batch grows; None: as in the step before.
        """
        self._prepare(batches, learning_rate, samples)
        weighted, tokens = None, 0
        if self.reads_data:
            assert batches is not None
            weighted, tokens = self._weighted(batches)
        loss = self._train(weighted)
        terms = self._terms(micro_batches=self.engine.gradient_accumulation_steps())
        skipped = not self.engine.was_step_applied()
        norm = self.engine.get_global_grad_norm()
        norm = float("nan") if norm is None else float(norm)
        return StepResult(loss, norm, tokens, skipped, terms)

    @abstractmethod
    def _train(self, batches: Sequence[Batch] | None) -> float:
        """Run the step on weighted micro-batches; return the loss of the whole batch."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch] | None, count: int) -> TermTotals:
        """Sums and counts of the loss terms over ``count`` micro-batches of each replica."""

    def _terms(self, *, micro_batches: int) -> dict[str, float]:
        """The means of the loss terms over the step, where there are several."""
        names = [term.name for term in self.module.plan.losses]
        sums = self.module.terms.take(len(names), self._device())
        if len(names) == 1:
            return {}
        share = micro_batches * self.context.get_data_parallel_world_size()
        means = self._from_last_stage(self._sum_over_replicas(sums / share))
        return dict(zip(names, means.tolist(), strict=True))

    def _from_last_stage(self, value: Tensor) -> Tensor:
        """What the last stage's tensor-parallel ranks know alike; the other stages have zeros."""
        if self.context.dims.pipeline > 1:
            value = value / self.context.dims.tensor
            dist.all_reduce(value, group=self.context.model_group)
        return value

    def _device(self) -> torch.device:
        return self.engine.device

    def _prepare(
        self, batches: Sequence[Batch] | None, learning_rate: float, samples: int | None
    ) -> None:
        """Set the step's learning rate and, during batch-size warm-up, its accumulation."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        before = self.engine.gradient_accumulation_steps()
        replicas = self.context.get_data_parallel_world_size()
        share = self.engine.train_micro_batch_size_per_gpu() * replicas
        micro_batches = before if samples is None else samples // share
        if batches is not None:
            assert samples is None or len(batches) == micro_batches
            micro_batches = len(batches)
        if micro_batches != before:
            self.engine.set_train_batch_size(micro_batches * share)
            # The boundary is found by counting micro-steps modulo their number: start at zero.
            self.engine.micro_steps = 0
            # ZeRO's optimizers keep their own copy of the number.
            if hasattr(self.engine.optimizer, "gradient_accumulation_steps"):
                self.engine.optimizer.gradient_accumulation_steps = micro_batches

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        if self.context.get_data_parallel_world_size() > 1:
            dist.all_reduce(value, group=self.context.data_group)
        return value

    def _weighted(self, batches: Sequence[Batch]) -> tuple[list[Batch], int]:
        """Turn masks into weights; return the number of valid tokens (of the first term) in all."""
        device = self._device()
        moved = [
            (tuple(t.to(device) for t in inputs), tuple(t.to(device) for t in targets))
            for inputs, targets in batches
        ]
        counts = self._sum_over_replicas(count_targets([targets for _, targets in moved])).tolist()
        replicas = self.context.get_data_parallel_world_size()
        scales = [len(batches) * replicas / max(count, 1) for count in counts]
        weighted = [(inputs, weigh_targets(targets, scales)) for inputs, targets in moved]
        return weighted, int(counts[0])


class _PlainStep(TrainStep):
    @property
    def reads_data(self) -> bool:
        return True

    def _train(self, batches: Sequence[Batch] | None) -> float:
        assert batches is not None
        self.engine.train()
        total = torch.zeros((), device=self._device())
        for inputs, labels in batches:
            loss = self.engine(inputs, labels)
            self.engine.backward(loss)
            total += loss.detach()
            self.engine.step()
        replicas = self.context.get_data_parallel_world_size()
        return float(self._sum_over_replicas(total / len(batches)) / replicas)

    def evaluate(self, batches: Iterable[Batch] | None, count: int) -> TermTotals:
        assert batches is not None
        self.engine.eval()
        step = ModelStep(self.engine, self.module, self.context, self._device())
        return step.evaluate(batches, count)


class _PipelineStep(TrainStep):
    @property
    def reads_data(self) -> bool:
        return self.module.is_first or self.module.is_last

    def _train(self, batches: Sequence[Batch] | None) -> float:
        return float(self.engine.train_batch(None if batches is None else iter(batches)))

    def evaluate(self, batches: Iterable[Batch] | None, count: int) -> TermTotals:
        plan = self.module.plan
        counts = torch.zeros(len(plan.losses), dtype=torch.float64)

        def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
            for inputs, targets in batches:
                counts.add_(count_targets([targets]))
                yield inputs, targets

        self.engine.total_loss = None  # left over from training, else added to (DeepSpeed 0.19.8)
        self.engine.eval_batch(
            None if batches is None else counted(batches), num_micro_batches=count
        )
        sums = self._sum_over_replicas(self.module.terms.take(len(plan.measures), self._device()))
        if self.reads_data:
            counts = self._sum_over_replicas(counts.to(self._device()))
        return TermTotals.of(self._from_last_stage(sums), counts)
