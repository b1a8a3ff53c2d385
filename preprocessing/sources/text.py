"""Plain text: one file is one document, or with ``split_lines`` one line is one document."""

from collections.abc import Callable, Iterator
from pathlib import Path

from preprocessing.document import Record
from preprocessing.sources.opening import open_input

ENDINGS = (".txt", ".text", ".md")


def read_text(
    path: Path, argument: int, on_position: Callable[[int], None], *, split_lines: bool
) -> Iterator[Record]:
    """Yield the records of one text file.

    Args:
        path: a text file, perhaps ``.gz``.
        argument: stored in the records.
        on_position: told the position in the file on disk, in bytes.
        split_lines: one document a line; its line feed (and a carriage return before) is not text.
            A blank line is an empty document.

    Raises:
        DataError: the file cannot be read to its end.
    """
    with open_input(path) as stream:
        if not split_lines:
            yield Record(stream.data.read(), str(path), 0, "text", argument)
            on_position(stream.raw.tell())
            return
        for number, line in enumerate(stream.data, start=1):
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            yield Record(text, str(path), number, "text", argument)
            on_position(stream.raw.tell())
