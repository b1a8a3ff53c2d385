"""``ds-engine quickstart``: from text to generated text."""

import sys
from pathlib import Path

import click

from launch.options import OVERRIDES


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .txt or .jsonl file; default: the sources of Python's standard library.",
)
@click.option("--nproc", default=2, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@click.option("--prompt", default="def main(", show_default=True, help="Text to continue.")
@click.option(
    "--folder",
    default=Path("data/quickstart"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="For prepared data; replaced.",
)
@click.option(
    "--run",
    default=Path("runs/quickstart"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The run folder.",
)
@OVERRIDES
def command(
    data: Path | None,
    nproc: int,
    prompt: str,
    folder: Path,
    run: Path,
    overrides: tuple[str, ...],
) -> None:
    """Prepare data, train a small GPT for some minutes, and generate text with it.

    Example: ds-engine quickstart --data my.txt
    """
    from launch.quickstart import Quickstart, run_quickstart

    sys.exit(run_quickstart(Quickstart(data, folder, run, nproc, overrides, prompt)))
