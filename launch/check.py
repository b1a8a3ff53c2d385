"""All that can be said against a run before a process starts, without torch.

``check_run`` looks at the whole run and the world, gathers every problem and raises them together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ds_engine.config.batch import (
    BatchPlan,
    check_warmup,
    data_parallel_degree,
    explain_data_parallel,
    solve_batch,
)
from ds_engine.config.deepspeed import (
    check_deepspeed,
    check_rules,
    fold_deepspeed,
    normalise_deepspeed,
    precision,
    zero_stage,
)
from ds_engine.config.load import run_to_dict
from ds_engine.config.reader import problems_of, raise_problems
from ds_engine.config.schema import ParallelConfig, RunConfig
from ds_engine.errors import ConfigError
from ds_engine.parallel.dims import ParallelDims
from ds_engine.training.lr_schedules import check_schedule
from launch.check_objective import resolve_data, short_decoder
from launch.labels import check_classes
from models.registry import ModelConfig, read_model

T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedRun:
    """A run that passed all checks, with everything that follows from it.

    Attributes:
        run: The run; DeepSpeed blocks that ds-engine carries out itself are folded into its own
            sections (``training.activation_checkpointing.every`` is a number, ``tracking.wandb``
            is final), and the type of the objective and the decoder's length are filled in.
        model: The family's configuration.
        dims: Degrees of parallelism.
        batch: The solved batch triangle.
        deepspeed: The JSON to hand to DeepSpeed.
        warnings: Legal but doubtful settings, to be shown once.
    """

    run: RunConfig
    model: ModelConfig
    dims: ParallelDims
    batch: BatchPlan
    deepspeed: dict[str, Any]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The run as plain JSON values with the solved batch triangle; ``load_run`` reads it."""
        plain = run_to_dict(self.run)
        plain["deepspeed"].update(self.batch.to_deepspeed())
        return plain


def check_run(run: RunConfig, world_size: int, world_source: str) -> ResolvedRun:
    """Checks a run against a world size.

    Args:
        run: From ``load_run``.
        world_size: Number of ranks.
        world_source: Where that number comes from, for messages: "--world-size", "the hostfile".

    Raises:
        ConfigError: Listing all problems, numbered.
    """
    problems: list[str] = []
    parallel = run.parallel
    resolved = run

    def attempt(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except ConfigError as error:
            problems.extend(problems_of(error))
            return None

    model = attempt(lambda: read_model(run.model))
    if model is not None:
        data = resolve_data(run, model)
        problems.extend(data.problems)
        resolved = data.run
    # Rules read values, so they wait until the kinds of values are right.
    section_problems = check_deepspeed(run.deepspeed) or check_rules(run.deepspeed, parallel)
    problems.extend(section_problems)
    problems.extend(check_layout(resolved))
    problems.extend(_check_training(run))
    problems.extend(_check_initial(run))
    degree = attempt(lambda: data_parallel_degree(parallel, world_size, world_source))
    dims = batch = None
    if degree is not None:
        dims = _dims(parallel, world_size)
        origin = explain_data_parallel(parallel, world_size, world_source)
        batch = attempt(lambda: solve_batch(run.deepspeed, degree, origin))
    if model is not None:
        lengths = resolved.data.sequence_length, resolved.data.decoder_sequence_length
        problems.extend(model.check_sequence(*lengths))
        # The layout of the model does not depend on the world.
        problems.extend(model.check(_dims(parallel, parallel.model_ranks)))
    if batch is not None and run.training.batch_size_warmup is not None:
        problems.extend(check_warmup(run.training.batch_size_warmup, batch))
    raise_problems(problems)
    assert model is not None and dims is not None and batch is not None
    folded = fold_deepspeed(resolved)
    return ResolvedRun(
        run=folded,
        model=model,
        dims=dims,
        batch=batch,
        deepspeed=normalise_deepspeed(folded.deepspeed, batch),
        warnings=(*_warnings(run, dims, batch), *short_decoder(resolved)),
    )


def check_layout(run: RunConfig) -> list[str]:
    """Why no world and no model could train in the layout that a run asks for; empty: one could."""
    return [*_not_available(run.parallel), *_check_sequence(run)]


def check_files(run: RunConfig) -> None:
    """Checks that the files which a run reads exist.

    Raises:
        ConfigError: Listing every missing file.
    """
    problems = []
    if not run.data.train:
        problems.append('data.train is empty; add a source: [{"path": "data/my_text"}]')
    for name in ("train", "validation"):
        for number, source in enumerate(getattr(run.data, name)):
            missing = [
                ending for ending in (".bin", ".idx") if not Path(source.path + ending).is_file()
            ]
            if missing:
                problems.append(
                    f"data.{name}.{number}.path = {source.path}: no file "
                    f"{' and '.join(source.path + ending for ending in missing)} (relative to "
                    f"{Path.cwd()}); create it with `ds-engine preprocess`"
                )
    if run.data.tokenizer is not None and not Path(run.data.tokenizer).exists():
        problems.append(
            f"data.tokenizer = {run.data.tokenizer} does not exist (relative to {Path.cwd()}); "
            "create it with `ds-engine tokenizer train`"
        )
    problems.extend(check_classes(run))
    problems.extend(_check_start(run))
    raise_problems(problems)


def _check_start(run: RunConfig) -> list[str]:
    start, folder = run.checkpoint.initialize_from, Path(run.checkpoint.directory)
    # A run that goes on has its weights, and may outlive those that it started from.
    if start is None or Path(start).is_dir() or any((folder / "checkpoints").glob("step_*")):
        return []
    return [
        f"checkpoint.initialize_from = {start} is not a folder (relative to {Path.cwd()}); name "
        "the folder of a run or of one of its checkpoints, or remove it"
    ]


def _dims(parallel: ParallelConfig, world_size: int) -> ParallelDims:
    return ParallelDims(
        world=world_size,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
        virtual_pipeline=parallel.virtual_pipeline,
    )


def _not_available(parallel: ParallelConfig) -> list[str]:
    """Degrees that have their place in the configuration but no implementation yet."""
    return [
        f"parallel.{name} = {getattr(parallel, name)} is not available in this version; set it to 1"
        for name in ("virtual_pipeline", "context", "expert")
        if getattr(parallel, name) > 1
    ]


def _check_sequence(run: RunConfig) -> list[str]:
    tensor, problems = run.parallel.tensor, []
    for name in ("sequence_length", "decoder_sequence_length"):
        length = getattr(run.data, name)
        if not run.parallel.sequence or length is None or length % tensor == 0:
            continue
        below = length - length % tensor
        problems.append(
            f"data.{name} = {length} is not a multiple of parallel.tensor = {tensor}, which "
            f"parallel.sequence = true splits it by; use {below or tensor} or {below + tensor}"
        )
    return problems


def _check_initial(run: RunConfig) -> list[str]:
    start, folder = run.checkpoint.initialize_from, run.checkpoint.directory
    # Also a checkpoint below the run's own folder.
    if start is None or not Path(start).absolute().is_relative_to(Path(folder).absolute()):
        return []
    return [
        f"checkpoint.initialize_from = {start} lies in checkpoint.directory = {folder}, the run's "
        "own folder, which it goes on from by itself; use another directory for the new run"
    ]


def _check_training(run: RunConfig) -> list[str]:
    problems, training = [], run.training
    if training.evaluate_every > 0 and not run.data.validation:
        problems.append(
            f"training.evaluate_every = {training.evaluate_every} needs data.validation, which is "
            "empty; add a source or set evaluate_every to 0"
        )
    params = (run.deepspeed.get("optimizer") or {}).get("params") or {}
    peak = params.get("lr") if isinstance(params, Mapping) else None
    # Without a peak that is a rate, which check_rules asks for, a schedule means nothing.
    if isinstance(peak, (int, float)) and peak > 0:
        try:
            check_schedule(training.lr_schedule, peak=peak, total_steps=training.steps)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _warnings(run: RunConfig, dims: ParallelDims, batch: BatchPlan) -> list[str]:
    warnings = []
    schedule, steps = run.training.lr_schedule, run.training.steps
    if schedule.warmup_steps >= steps:
        warnings.append(
            f"training.lr_schedule.warmup_steps = {schedule.warmup_steps} is not below "
            f"training.steps = {steps}, so the peak learning rate is never reached"
        )
    if dims.tensor > 8:
        warnings.append(
            f"parallel.tensor = {dims.tensor} is more than the 8 devices of a common node; tensor "
            "parallelism between nodes is slow"
        )
    if batch.accumulation < dims.pipeline:
        idle = (dims.pipeline - 1) / (batch.accumulation + dims.pipeline - 1)
        warnings.append(
            f"{batch.accumulation} micro-batches do not fill parallel.pipeline = {dims.pipeline} "
            f"stages: each idles {idle:.0%} of the time; raise train_batch_size or lower "
            "train_micro_batch_size_per_gpu"
        )
    name = str(run.deepspeed["optimizer"]["type"]).lower()
    if name in ("lamb", "lion"):
        warnings.append(f"deepspeed.optimizer.type = {name} has no kernel for CPU, only for GPU")
    if precision(run.deepspeed) != "fp32" and zero_stage(run.deepspeed) == 0:
        warnings.append(
            f"{precision(run.deepspeed)} without ZeRO is run as ZeRO stage 1: the same "
            "mathematics, with gradients accumulated in fp32, which DeepSpeed's stage 0 cannot"
        )
    return warnings
