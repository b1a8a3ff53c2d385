"""The run file as frozen dataclasses: every key that ds-engine reads, with its unit and default.

The ``Attributes`` sections are the reference: ``ds_configs/README.md`` is generated from them.
Two sections stay plain dictionaries here: ``model``, read by its family's own configuration class
(``models/config.py``), and ``deepspeed``, which DeepSpeed owns (``ds_engine/config/deepspeed.py``).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from ds_engine.config.objective import ObjectiveConfig
from ds_engine.config.reader import (
    AboveZero,
    Count,
    NonNegative,
    Positive,
    Probability,
    join_path,
)


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is split over ranks; what is left of the world is data parallelism.

    Attributes:
        tensor: Tensor-parallel degree: ranks that share each weight matrix.
        pipeline: Pipeline stages: ranks that share the depth of the model.
        virtual_pipeline: Model chunks on each pipeline rank (interleaved schedule).
        sequence: Sequence parallelism: the tensor-parallel ranks also split norms and dropout
            along the sequence. Needs tensor > 1.
        context: Context-parallel degree: ranks that share each sequence in attention.
        expert: Expert-parallel degree of mixture-of-experts layers.
        schedule: Order of forward and backward passes in the pipeline.
        partition: How layers are dealt to stages: "balanced" weighs them by their matmul FLOPs,
            "uniform" counts them.
    """

    tensor: Positive = 1
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    sequence: bool = False
    context: Positive = 1
    expert: Positive = 1
    schedule: Literal["1f1b"] = "1f1b"
    partition: Literal["balanced", "uniform"] = "balanced"

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context

    def check_fields(self, where: str) -> list[str]:
        """Rules between the fields of this section."""
        if self.sequence and self.tensor == 1:
            path = join_path(where, "sequence")
            return [f"{path} = true needs parallel.tensor > 1, which is 1; set {path} to false"]
        return []


@dataclass(frozen=True)
class SourceConfig:
    """One source of training or validation text.

    Attributes:
        path: Prefix of an indexed dataset (`PATH.bin` and `PATH.idx`), relative to the working
            directory.
        weight: Share of the blend, relative to the other sources' weights.
    """

    path: str
    weight: AboveZero = 1.0


@dataclass(frozen=True)
class DataConfig:
    """What the model reads.

    Attributes:
        sequence_length: Tokens in one sample; for t5 of its encoder.
        decoder_sequence_length: Tokens of the decoder in one sample, t5 only; null: for
            "span_corruption" what the longest text that fits the encoder needs, rounded up to a
            multiple of 8.
        objective: What the model learns to predict.
        train: Training sources, blended by weight.
        validation: Validation sources; none: no evaluation.
        tokenizer: Path of the tokenizer file or folder; needed for generation, and by every
            objective but "causal_lm".
        isolate_documents: Whether packed documents cannot attend to each other; positions then
            restart at each document. False for "causal_lm" and "masked_lm" without sentences only.
        prefetch: Batches prepared ahead by the loader's thread; 0: none.
    """

    sequence_length: Positive
    decoder_sequence_length: Positive | None = None
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: tuple[SourceConfig, ...] = ()
    validation: tuple[SourceConfig, ...] = ()
    tokenizer: str | None = None
    isolate_documents: bool = True
    prefetch: Count = 2

    def check_fields(self, where: str) -> list[str]:
        """No source twice in one blend: its samples would be counted as two sources."""
        problems = []
        for name, sources in (("train", self.train), ("validation", self.validation)):
            paths = [source.path for source in sources]
            for path in dict.fromkeys(path for path in paths if paths.count(path) > 1):
                place = join_path(where, name)
                problems.append(f'{place} lists "{path}" twice; list it once and add the weights')
        return problems


@dataclass(frozen=True)
class LRScheduleConfig:
    """The learning rate as a function of the step; its peak is the optimizer's ``lr``.

    Attributes:
        type: Shape after warm-up. "wsd" (warm-up, stable, decay) holds the peak and falls over the
            last decay_steps steps.
        warmup_steps: Optimizer steps over which the rate rises linearly to the peak.
        min_lr: Smallest rate after decay, absolute (not relative to the peak).
        decay_steps: Steps over which "cosine", "linear" and "wsd" fall; null: from the end of
            warm-up to training.steps (for "wsd": a tenth of training.steps).
        decay_shape: How "wsd" falls; "sqrt" is 1 - sqrt(progress).
    """

    type: Literal["constant", "cosine", "linear", "inverse_sqrt", "wsd"] = "cosine"
    warmup_steps: Count = 0
    min_lr: NonNegative = 0.0
    decay_steps: Positive | None = None
    decay_shape: Literal["linear", "sqrt", "cosine"] = "linear"

    def check_fields(self, where: str) -> list[str]:
        """Keys that the chosen type does not read are refused."""
        problems = []
        kind = f"{join_path(where, 'type')} = {self.type}"
        if self.decay_steps is not None and self.type in ("constant", "inverse_sqrt"):
            problems.append(
                f"{join_path(where, 'decay_steps')} has no effect with {kind}; remove it"
            )
        if self.decay_shape != "linear" and self.type != "wsd":
            problems.append(
                f"{join_path(where, 'decay_shape')} has no effect with {kind}; remove it"
            )
        return problems


@dataclass(frozen=True)
class BatchSizeWarmupConfig:
    """A global batch that grows in steps until train_batch_size.

    Attributes:
        start: First global batch size, samples.
        increment: Samples added at each growth.
        samples: Samples over which the batch grows from start to train_batch_size.
    """

    start: Positive
    increment: Positive
    samples: Positive


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """Recomputation of activations in the backward pass, to save memory.

    Attributes:
        every: 0: off; 1: every transformer layer is recomputed; k: every k-th layer. null: 1 if
            the DeepSpeed section has an activation_checkpointing block, else 0.
    """

    every: Count | None = None


@dataclass(frozen=True)
class TrainingConfig:
    """The loop.

    Attributes:
        steps: Optimizer steps of the whole run.
        lr_schedule: Learning rate over the steps.
        evaluate_every: Optimizer steps between evaluations; 0: none.
        evaluate_batches: Global batches in one evaluation.
        log_every: Optimizer steps between log rows.
        label_smoothing: Probability mass spread over the other tokens.
        z_loss: Weight of the squared log partition function in the loss.
        max_nonfinite_steps: Consecutive steps skipped for non-finite gradients before the run
            stops.
        batch_size_warmup: Growing batch; null: constant.
        activation_checkpointing: Recomputation of activations.
    """

    steps: Positive
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    evaluate_every: Count = 0
    evaluate_batches: Positive = 20
    log_every: Positive = 10
    label_smoothing: Probability = 0.0
    z_loss: NonNegative = 0.0
    max_nonfinite_steps: Positive = 20
    batch_size_warmup: BatchSizeWarmupConfig | None = None
    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the run lives and when it saves.

    Attributes:
        directory: Run folder, relative to the working directory: configuration, logs, curves and
            `checkpoints/step_00000100`.
        every: Optimizer steps between checkpoints; 0: only at the end.
        keep_last: Complete checkpoints kept, newest first; null: all.
        initialize_from: Run folder or checkpoint folder whose weights a new run starts from, to
            fine-tune; a run that goes on takes its own. null: random weights.
    """

    directory: str
    every: Count = 1000
    keep_last: Positive | None = 3
    initialize_from: str | None = None


@dataclass(frozen=True)
class WandbConfig:
    """One Weights & Biases run for the whole job.

    Attributes:
        project: Project name.
        name: Run name; null: chosen by wandb.
        group: Group of runs.
        mode: "online" sends, "offline" writes below the run folder, "disabled" does nothing; "auto"
            is "online" with an API key and "offline" without.
        entity: Team or user.
        tags: Tags of the run.
    """

    project: str
    name: str | None = None
    group: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    entity: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go.

    Attributes:
        wandb: Weights & Biases; null: off.
        jsonl: Whether rows are written to `log.jsonl` in the run folder.
        progress: Whether a progress line is shown on the terminal.
        peak_tflops: Peak dense TFLOP/s of one device for the model FLOPs utilisation; null: not
            reported.
    """

    wandb: WandbConfig | None = None
    jsonl: bool = True
    progress: bool = True
    peak_tflops: AboveZero | None = None


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        model: The model, by its family's own keys.
        data: What the model reads.
        training: The loop.
        checkpoint: Run folder and saving.
        deepspeed: DeepSpeed JSON: optimizer, precision, ZeRO, clipping and batch sizes.
        seed: Seed of weights, dropout and data order.
        parallel: How the model is split over ranks.
        tracking: Where metrics go.
    """

    model: dict[str, Any]
    data: DataConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    deepspeed: dict[str, Any]
    seed: Count = 1234
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
