"""Command-line options that several commands share."""

from pathlib import Path

import click

from ds_engine.errors import DataError

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


def read_lines(path: Path) -> list[str]:
    """The lines of a text file; an empty one at the end does not count.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        # Not splitlines: texts may hold the rarer signs that it takes for ends of lines.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from error
    return text.removesuffix("\n").split("\n") if text else []
