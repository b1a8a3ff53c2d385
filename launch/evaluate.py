"""Loss of a trained model on indexed data, in any tensor- and data-parallel layout."""

from __future__ import annotations

from pathlib import Path

from ds_engine.config.reader import raise_problems
from ds_engine.config.schema import SourceConfig
from ds_engine.data.dataset import build_validation
from ds_engine.errors import ConfigError, DataError
from ds_engine.training.evaluate import Evaluation, Evaluator, ModelStep
from launch.inference import SavedRun, connect, load_model, open_run
from launch.labels import check_data, run_classes
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
        DsEngineError: no checkpoint, or no data, or data whose classes are not the run's.
    """
    saved = open_run(run)
    sources = _sources(saved, data)
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


def _sources(saved: SavedRun, data: tuple[str, ...]) -> tuple[SourceConfig, ...]:
    """What to evaluate on, which exists and means what the run has learned."""
    sources = tuple(SourceConfig(path) for path in data) or saved.run.data.validation
    if not sources:
        raise ConfigError("the run has no data.validation; name indexed data with --data PREFIX")
    for source in sources:
        if not Path(f"{source.path}.idx").is_file():
            origin = "--data" if data else "the run's data.validation"
            hint = " without the ending" if source.path.endswith((".bin", ".idx")) else ""
            raise DataError(
                f"{origin} = {source.path}: no file {source.path}.idx (relative to {Path.cwd()}); "
                f"give --data PREFIX{hint}, or create it with `ds-engine preprocess`"
            )
    if getattr(saved.model, "num_labels", None) is not None:
        classes = run_classes(saved.home, saved.run)
        if classes is not None:
            raise_problems(
                problem for source in sources for problem in check_data(source.path, classes)
            )
    return sources
