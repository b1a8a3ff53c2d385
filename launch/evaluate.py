"""Loss of a trained model on indexed data, in any tensor- and data-parallel layout."""

from __future__ import annotations

from pathlib import Path

from ds_engine.config.schema import SourceConfig
from ds_engine.data.dataset import build_validation
from ds_engine.errors import ConfigError
from ds_engine.training.evaluate import Evaluation, Evaluator, ModelStep
from launch.inference import connect, load_model, open_run
from launch.objective import make_objective


def evaluate_run(
    run: Path,
    data: tuple[str, ...],
    *,
    tensor: int,
    micro_batch_size: int,
    max_samples: int | None,
) -> tuple[Evaluation, int]:
    """Evaluate a checkpoint; returns the result and this process's rank.

    Args:
        run: run folder or checkpoint folder.
        data: prefixes of indexed data sets; empty: the run's own validation data.
        tensor: tensor-parallel degree; what is left of the processes is data parallelism.
        micro_batch_size: samples in a forward pass.
        max_samples: use at most so many; None: all.

    Raises:
        DsEngineError: no checkpoint, or no data.
    """
    saved = open_run(run)
    sources = tuple(SourceConfig(path) for path in data) or saved.run.data.validation
    if not sources:
        raise ConfigError("the run has no data.validation; name indexed data with --data PREFIX")
    context = connect(tensor)
    model = load_model(saved, context.tensor_parallel(sequence_parallel=False))
    objective = make_objective(saved.run, saved.model, saved.tokenizer)
    dataset = build_validation(sources, objective, vocab_size=saved.model.vocab_size)
    evaluator = Evaluator(
        dataset,
        objective,
        ModelStep(model, model, context, next(model.parameters()).device),
        model.plan,
        micro_batch_size=micro_batch_size,
        max_samples=max_samples or len(dataset),
    )
    return evaluator.run(), context.rank
