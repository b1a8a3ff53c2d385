"""Opening input files, plain or gzip, with errors that name the file and the place in it."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from ds_engine.errors import DataError


@dataclass(slots=True)
class InputStream:
    """An open input.

    Attributes:
        data: the bytes, decompressed.
        raw: the file as it is on disk; its position is the progress.
    """

    data: BinaryIO
    raw: BinaryIO


@contextmanager
def open_input(path: Path) -> Iterator[InputStream]:
    """Open ``path``; a name that ends in ``.gz`` is decompressed.

    Raises:
        DataError: the file cannot be read, or is truncated or damaged; the offset is named. It is
            never taken for a shorter file.
    """
    raw: BinaryIO | None = None
    data: BinaryIO | None = None
    try:
        raw = open(path, "rb")  # noqa: SIM115
        data = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        yield InputStream(data, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        offset = data.tell() if data is not None else 0
        raise DataError(
            f"{path} is truncated or damaged after {offset} decompressed bytes ({error}); fetch "
            "it again"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    finally:
        if raw is not None:
            raw.close()
