"""Which files an input argument stands for, and how each is read.

A file is read by its ending: JSON lines (``.jsonl .json .ndjson``) or text (``.txt .text .md``),
each also with ``.gz``. A folder stands for the files below it that match a pattern, in the order of
their paths; files in it with another ending are one document each, like text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_engine.errors import DataError
from preprocessing.document import Format, Record
from preprocessing.sources import jsonl, text


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read.

    Attributes:
        path: the file.
        format: how it is read.
        argument: number of the input argument it came from.
        size: bytes on disk.
    """

    path: Path
    format: Format
    argument: int
    size: int


def find_inputs(
    inputs: Sequence[str], *, pattern: str = "*", format: Format | None = None
) -> list[InputFile]:
    """Return the files of all ``inputs``, in order.

    Args:
        inputs: files and folders.
        pattern: which files of a folder, at any depth, such as ``*.txt``.
        format: reads every file this way, whatever its ending.

    Raises:
        DataError: an input is missing, unreadable or of unknown ending, or a folder has no match.
    """
    if not inputs:
        raise DataError("no input file is given")
    found: list[InputFile] = []
    for argument, name in enumerate(inputs):
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.rglob(pattern) if file.is_file())
            if not files:
                raise DataError(f"folder {path} has no file that matches {pattern!r}")
            found += [_input(file, format or _format(file) or "text", argument) for file in files]
        elif path.is_file():
            chosen = format or _format(path)
            if chosen is None:
                raise DataError(
                    f"{path}: the ending does not tell how to read it; use one of "
                    f"{' '.join(jsonl.ENDINGS + text.ENDINGS)} (also with .gz) or give --format"
                )
            found.append(_input(path, chosen, argument))
        else:
            raise DataError(f"input {path} does not exist")
    return found


def read_records(
    files: Sequence[InputFile], *, split_lines: bool, on_progress: Callable[[int], None]
) -> Iterator[Record]:
    """Yield the records of all files in order.

    Args:
        files: as found by ``find_inputs``.
        split_lines: text files hold one document a line.
        on_progress: told how many bytes on disk were read of all files together.

    Raises:
        DataError: a file cannot be read to its end.
    """
    before = 0
    for file in files:

        def on_position(position: int, before: int = before) -> None:
            on_progress(before + position)

        if file.format == "jsonl":
            yield from jsonl.read_jsonl(file.path, file.argument, on_position)
        else:
            yield from text.read_text(
                file.path, file.argument, on_position, split_lines=split_lines
            )
        before += file.size


def _format(path: Path) -> Format | None:
    name = path.name.removesuffix(".gz").lower()
    if name.endswith(jsonl.ENDINGS):
        return "jsonl"
    return "text" if name.endswith(text.ENDINGS) else None


def _input(path: Path, format: Format, argument: int) -> InputFile:
    try:
        return InputFile(path, format, argument, path.stat().st_size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
