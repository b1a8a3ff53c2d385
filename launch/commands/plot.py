"""``ds-engine plot``: figures of one run or of several."""

from pathlib import Path

import click


def _references(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    del context, parameter
    references = {}
    for text in values:
        name, separator, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            separator = ""
        if not separator or not name.strip():
            raise click.BadParameter(f'"{text}" is not NAME=NUMBER, such as "unigram entropy=6.3"')
        references[name.strip()] = value
    return references


@click.command(short_help="Draw the curves of one or more runs.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--metric", help="Draw this metric of all runs into one figure [train/loss for several runs]."
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Where the figure goes."
)
@click.option(
    "--reference",
    "references",
    multiple=True,
    callback=_references,
    metavar="NAME=VALUE",
    help="A horizontal line in the loss; may be repeated.",
)
def command(
    runs: tuple[Path, ...], metric: str | None, output: Path | None, references: dict[str, float]
) -> None:
    """Draw the curves of RUNS (run folders or log.jsonl files) and print the figures' paths.

    One run: loss, learning rate, gradient norm and throughput, in RUN/curves/training.png.
    Several runs: that figure for each, and one that compares them.

    Example: ds-engine plot runs/t5_tiny runs/bert_tiny --metric validation/loss
    """
    from ds_engine.training.plot import plot_comparison, plot_run

    several = len(runs) > 1
    if metric is None:
        for run in runs:
            own = None if several else output
            click.echo(plot_run(run, output=own, references=references))
    if several or metric is not None:
        click.echo(
            plot_comparison(
                runs, metric=metric or "train/loss", output=output, references=references
            )
        )
