"""One rank of a training run: the composition root. Read this page to know what happens.

Started by ``ds-engine train``, by ``deepspeed launch/train.py --config C`` or by anything else that
sets RANK, LOCAL_RANK and WORLD_SIZE. Example:

    deepspeed --num_gpus 2 launch/train.py --config ds_configs/runs/gpt_tiny.json
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
# Run as a script, Python puts launch/ first in the path; its modules must not shadow anybody's.
if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == HOME / "launch":
    sys.path[0] = str(HOME)

import click  # noqa: E402

from ds_engine.errors import DsEngineError  # noqa: E402
from launch.guard import check_rank_imports  # noqa: E402
from launch.rank import fail, follow_starter, record_exit  # noqa: E402


def train(config: str, overrides: tuple[str, ...]) -> int:
    """Train as this rank; return the exit code.

    Raises:
        DsEngineError: whatever a user can act on.
    """
    from ds_engine.config.load import load_run
    from ds_engine.parallel.context import ParallelContext, RankInfo, prepare_rendezvous
    from launch.check import check_files, check_run

    rank = RankInfo.from_environment()
    resolved = check_run(load_run(config, overrides), rank.world_size, "the launcher")
    run, dims, batch = resolved.run, resolved.dims, resolved.batch
    check_files(run)

    # Heavy imports come after the checks, so that a typing error costs a second and not ten.
    from launch.objective import make_objective

    # Also before the run folder: a tokenizer or a length that does not fit leaves nothing behind.
    objective = make_objective(run, resolved.model)

    import torch

    from ds_engine.data.dataset import build_dataset, build_validation
    from ds_engine.data.loader import BatchLoader
    from ds_engine.training.batch_warmup import global_batch_size
    from ds_engine.training.checkpoint.checkpointer import Checkpointer
    from ds_engine.training.engine import (
        build_train_step,
        check_optimizer,
        check_precision,
        gather_parameter,
        init_distributed,
    )
    from ds_engine.training.evaluate import Evaluator
    from ds_engine.training.lr_schedules import learning_rate
    from ds_engine.training.metrics import StepTimer
    from ds_engine.training.run_folder import RunFolder
    from ds_engine.training.state import TrainState
    from ds_engine.training.stop import EXIT_STOPPED
    from ds_engine.training.tracking.build import build_tracker
    from ds_engine.training.trainer import Trainer, TrainerSettings, accelerator_memory
    from launch.compose import initial_weights, plan_of, run_dtype
    from launch.doctor_probes import has_wandb_key
    from launch.labels import keep_classes
    from preprocessing.tokenize import tokenizer_files

    def report(text: str) -> None:
        if rank.rank == 0:
            print(text, flush=True)

    check_precision(run_dtype(resolved.deepspeed))
    check_optimizer(resolved.deepspeed["optimizer"]["type"])
    prepare_rendezvous(rank)
    init_distributed()
    torch.manual_seed(run.seed)
    context = ParallelContext.create(dims)
    folder = RunFolder(Path(run.checkpoint.directory))
    settled = resolved.to_dict()
    run_id = ""
    if rank.rank == 0:
        folder.create()
        run_id = folder.run_id()
        for warning in resolved.warnings:
            report(f"warning: {warning}")

    # The model, its engine, and where it stood.
    tp = context.tensor_parallel(sequence_parallel=run.parallel.sequence)
    plan = plan_of(resolved, tp)
    step = build_train_step(
        plan,
        context,
        resolved.deepspeed,
        partition=run.parallel.partition,
        recompute_every=run.training.activation_checkpointing.every or 0,
        initial=initial_weights(run, resolved.model, report),
    )
    report(f"{resolved.model.num_parameters():,} parameters, {dims.describe()}; {batch.explain()}")
    checkpointer = Checkpointer(
        folder.checkpoints,
        step,
        config=settled,
        keep_last=run.checkpoint.keep_last,
        report=report,
        gather=gather_parameter,
    )
    state = checkpointer.resume() or TrainState()
    if rank.rank == 0:
        # Not before: a refused resume must leave the run as it was.
        folder.write_config(settled)
        if run.data.tokenizer is not None:
            folder.keep_tokenizer(tokenizer_files(run.data.tokenizer))
        keep_classes(folder.path, run)

    # The data, from where it stood.
    dataset = build_dataset(
        run.data.train,
        objective,
        seed=run.seed,
        vocab_size=resolved.model.vocab_size,
        state=state.blend or None,
        first_sample=state.consumed_samples,
    )
    state.blend = dataset.state()
    loader = BatchLoader(
        dataset,
        objective,
        micro_batch_size=batch.micro_batch_size,
        data_parallel_rank=context.get_data_parallel_rank(),
        data_parallel_size=context.get_data_parallel_world_size(),
        prefetch=run.data.prefetch,
    )
    evaluator = None
    if run.data.validation:
        validation = build_validation(
            run.data.validation, objective, vocab_size=resolved.model.vocab_size
        )
        evaluator = Evaluator(
            validation,
            objective,
            step,
            plan,
            micro_batch_size=batch.micro_batch_size,
            max_samples=run.training.evaluate_batches * batch.train_batch_size,
        )

    peak = float(resolved.deepspeed["optimizer"]["params"]["lr"])
    steps, warmup = run.training.steps, run.training.batch_size_warmup
    tracker = build_tracker(
        run.tracking,
        run_folder=folder,
        run_id=run_id,
        resolved_config=settled,
        total_steps=steps,
        first_step=state.step,
        rank=rank.rank,
        has_wandb_key=has_wandb_key(os.environ),
    )
    trainer = Trainer(
        step=step,
        loader=loader,
        learning_rate=lambda done: learning_rate(
            done, config=run.training.lr_schedule, peak=peak, total_steps=steps
        ),
        batch_size=lambda samples: (
            batch.train_batch_size
            if warmup is None
            else global_batch_size(samples, config=warmup, final=batch.train_batch_size)
        ),
        settings=TrainerSettings(
            total_steps=steps,
            log_every=run.training.log_every,
            evaluate_every=run.training.evaluate_every,
            checkpoint_every=run.checkpoint.every,
            max_nonfinite_steps=run.training.max_nonfinite_steps,
        ),
        checkpointer=checkpointer,
        evaluator=evaluator,
        tracker=tracker,
        timer=StepTimer(
            devices=dims.world,
            flops_per_sample=resolved.model.flops_per_sample(
                run.data.sequence_length, run.data.decoder_sequence_length
            ),
            peak_tflops=run.tracking.peak_tflops,
            memory=lambda: accelerator_memory(step.engine),
        ),
        report=report,
    )
    exit_code = 1
    try:
        with loader:
            outcome = trainer.run(state)
        exit_code = EXIT_STOPPED if outcome.stopped_by else 0
    finally:
        tracker.close(exit_code)
    if rank.rank == 0:
        _finish(folder.path, report)
    if outcome.stopped_by:
        report(
            f"stopped by {outcome.stopped_by} after step {state.step} of {steps}, checkpoint "
            f"saved; the same command goes on from here (exit code {exit_code})"
        )
    else:
        report(f"finished step {state.step} of {steps}; everything lies in {folder.path}")
    if dims.world > 1:
        # The launcher ends everybody as soon as one rank leaves with a code other than 0 (such as
        # "stopped, resume me"), and rank 0 has just had more to do than the others.
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return exit_code


def _finish(folder: Path, report: Callable[[str], None]) -> None:
    """Draw the curves; a picture that fails must not fail the run."""
    from ds_engine.training.plot import plot_run

    try:
        plot_run(folder)
    except (DsEngineError, OSError, ValueError) as error:
        report(f"no curves were drawn: {error}")


@click.command()
@click.option("--config", required=True, type=click.Path(dir_okay=False), help="The run file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value.")
@click.option(
    "--local_rank", hidden=True, type=int, help="Given by launchers, read from LOCAL_RANK."
)
def main(config: str, overrides: tuple[str, ...], local_rank: int | None) -> None:
    """Train as one rank.

    Example: deepspeed launch/train.py --config ds_configs/runs/gpt_tiny.json
    """
    try:
        check_rank_imports()
        follow_starter()
        code = train(config, overrides)
    except DsEngineError as error:
        fail(error)
    record_exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
