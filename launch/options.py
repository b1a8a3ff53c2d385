"""Command-line options that several commands share."""

from pathlib import Path

import click

CONFIG = click.option(
    "--config", required=True, type=click.Path(dir_okay=False), help="The run file."
)
OVERRIDES = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value, such as training.steps=10; may be repeated.",
)
CHECKPOINT = click.option(
    "--checkpoint",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A run folder, or one of its checkpoints.",
)
