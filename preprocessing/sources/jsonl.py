"""JSON lines: one object a line, one document an object."""

from collections.abc import Callable, Iterator
from pathlib import Path

from preprocessing.document import Record
from preprocessing.sources.opening import open_input

ENDINGS = (".jsonl", ".json", ".ndjson")


def read_jsonl(path: Path, argument: int, on_position: Callable[[int], None]) -> Iterator[Record]:
    """Yield one record a line, split at line feeds only; the last line needs none.

    Args:
        path: a ``.jsonl`` file, perhaps ``.gz``.
        argument: stored in the records.
        on_position: told the position in the file on disk, in bytes, after each line.

    Raises:
        DataError: the file cannot be read to its end.
    """
    with open_input(path) as stream:
        for number, line in enumerate(stream.data, start=1):
            yield Record(line, str(path), number, "jsonl", argument)
            on_position(stream.raw.tell())
