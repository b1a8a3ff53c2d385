"""``ds-engine quickstart``: from text to a model that does something."""

import sys
from pathlib import Path
from typing import Any

import click

from launch.options import OVERRIDES


@click.command()
@click.option(
    "--family",
    default="gpt",
    show_default=True,
    type=click.Choice(("gpt", "t5", "bert")),
    help="Which model to train.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .txt or .jsonl file; default: the sources of Python's standard library.",
)
@click.option("--nproc", default=2, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="Text to continue (gpt), or to fill where it says <extra_id_0> (t5) or [MASK] (bert); "
    "may be repeated. Default: something that suits the text.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="For prepared data; replaced. Default: data/quickstart, data/quickstart_t5, "
    "data/quickstart_bert.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path, file_okay=False),
    help="The run folder. Default: runs/FAMILY_tiny.",
)
@click.option(
    "--prepare-only",
    is_flag=True,
    help="Write text, tokenizer and data, print the command that trains, and stop.",
)
@OVERRIDES
def command(
    family: Any,
    data: Path | None,
    nproc: int,
    prompts: tuple[str, ...],
    folder: Path | None,
    run: Path | None,
    prepare_only: bool,
    overrides: tuple[str, ...],
) -> None:
    """Prepare data, train a small model for some minutes, and show what it learned.

    Example: ds-engine quickstart --family t5 --data my.txt
    """
    from launch.quickstart import Quickstart, run_quickstart

    settings = Quickstart(
        family=family,
        data=data,
        folder=folder or Path("data/quickstart" + ("" if family == "gpt" else f"_{family}")),
        run=run or Path(f"runs/{family}_tiny"),
        nproc=nproc,
        overrides=overrides,
        prompts=prompts,
        prepare_only=prepare_only,
    )
    sys.exit(run_quickstart(settings))
