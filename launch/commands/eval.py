"""``ds-engine eval``: loss, perplexity and accuracies of a checkpoint."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launch.options import CHECKPOINT
from launch.rank import is_rank

if TYPE_CHECKING:
    from ds_engine.training.evaluate import Evaluation


@click.command()
@CHECKPOINT
@click.option(
    "--data",
    multiple=True,
    help="Prefix of indexed data, may be repeated; default: the run's own.",
)
@click.option("--max-samples", type=click.IntRange(min=1), help="Stop after so many samples.")
@click.option(
    "--micro-batch-size",
    default=4,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples in a forward pass; changes the speed alone.",
)
@click.option(
    "--tensor",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Ranks that share the model.",
)
@click.option("--nproc", type=click.IntRange(min=1), help="Processes; default: --tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    checkpoint: Path,
    data: tuple[str, ...],
    max_samples: int | None,
    micro_batch_size: int,
    tensor: int,
    nproc: int | None,
    as_json: bool,
) -> None:
    """Evaluate a checkpoint on validation data: loss, perplexity, accuracies.

    Example: ds-engine eval --checkpoint runs/gpt_tiny

    Example: ds-engine eval --checkpoint runs/bert_classify_tiny --data data/test --json
    """
    ranks = nproc or tensor
    if ranks > 1 and not is_rank():
        from launch.local import run_command_as_ranks

        sys.exit(run_command_as_ranks(sys.argv[1:], ranks))
    from launch.evaluate import evaluate_run

    result, rank = evaluate_run(
        checkpoint,
        data,
        tensor=tensor,
        micro_batch_size=micro_batch_size,
        max_samples=max_samples,
    )
    if rank == 0:
        metrics = {**result.metrics(), "validation/tokens": result.tokens}
        click.echo(json.dumps(metrics) if as_json else in_words(result))


def in_words(result: "Evaluation") -> str:
    """An evaluation as a line for people."""
    parts = [f"loss {result.loss:.4f} nats"]
    if result.words is not None:
        parts = [f"loss {result.loss:.4f} nats per token"]
        parts.append(f"perplexity {result.metrics()['validation/perplexity']:,.1f}")
    for name, value in result.measures.items():
        number = f"{value:.1%}" if name.endswith("accuracy") else f"{value:.4f}"
        parts.append(f"{name.replace('_', ' ')} {number}")
    return f"{', '.join(parts)}, {result.tokens:,} targets"
