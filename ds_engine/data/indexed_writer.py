"""Writer of Megatron's tokenized data, in the format of ``ds_engine.data.indexed``.

A file that we write is byte for byte what Megatron-LM's own builder writes for the same ids and
type.
"""

import contextlib
import itertools
import os
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    TokenArray,
    bin_path,
    idx_path,
    sequence_offsets,
    smallest_dtype_code,
)
from ds_engine.errors import DataError

Tokens = Sequence[int] | npt.NDArray[np.generic]

_MAX_LENGTH = 2**31 - 1  # lengths are stored as i32


class IndexedWriter:
    """Writes one ``.bin``/``.idx`` pair that appears under its name only when it is complete.

    A context manager: leaving it normally commits (fsync, then rename, the ``.idx`` last); leaving
    it by an exception removes what was written. Documents may be empty.

    Example::

        with IndexedWriter("data/pile", vocab_size=50257) as writer:
            writer.add_document([17, 4, 50256])
    """

    def __init__(
        self, prefix: str | os.PathLike[str], *, vocab_size: int, overwrite: bool = False
    ) -> None:
        """Open temporary files beside ``prefix``; folders are made as needed.

        Args:
            prefix: output path without ending.
            vocab_size: ids must be below it; up to 65,536 they are stored as u16, else as i32.
            overwrite: replace an existing pair instead of refusing.

        Raises:
            DataError: the pair exists, the vocabulary is unusable or the folder is not writable.
        """
        self._code = smallest_dtype_code(vocab_size)
        self.dtype = np.dtype(DTYPES[self._code])
        self.vocab_size = vocab_size
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        existing = [str(path) for path in (self._bin, self._idx) if path.exists()]
        if existing and not overwrite:
            raise DataError(
                f"{' and '.join(existing)} exist; choose another output or overwrite them"
            )
        self._lengths = array("i")
        self._starts = array("q", [0])
        # Random, because two nodes that share a file system may have the same process number.
        ending = f".partial-{secrets.token_hex(4)}"
        self._bin_partial = Path(f"{self._bin}{ending}")
        self._idx_partial = Path(f"{self._idx}{ending}")
        try:
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self._bin_partial, "xb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"cannot write {self._bin}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as error:
            raise DataError(f"cannot write {self._bin} and {self._idx}: {error}") from error
        finally:
            self._remove_partial()

    def add_document(self, tokens: Tokens) -> None:
        """Add a document of one sequence; ``tokens`` may be empty."""
        self.add_sequence(tokens)
        self.end_document()

    def add_sequence(self, tokens: Tokens) -> None:
        """Add a sequence to the current document.

        Raises:
            DataError: an id is not an integer in 0..vocab_size-1, or the length exceeds an i32.
        """
        self._check_length(len(tokens))
        self._write(self._checked(tokens))
        self._lengths.append(len(tokens))

    def end_document(self) -> None:
        """Close the current document; one without a sequence is an empty document."""
        self._starts.append(len(self._lengths))

    def add_documents(
        self,
        tokens: Tokens,
        lengths: Sequence[int],
        sequences_per_document: Sequence[int] | None = None,
    ) -> None:
        """Add many documents, given as one run of ids and the lengths of their sequences.

        Args:
            tokens: the ids of all sequences.
            lengths: tokens in each sequence.
            sequences_per_document: how many sequences each document has; 0 is an empty document.
                None: every sequence is a document.

        Raises:
            DataError: as ``add_sequence``, the lengths do not add up to the ids, or the numbers of
                sequences not to the lengths.
        """
        if sum(lengths) != len(tokens):
            raise DataError(f"lengths add up to {sum(lengths)} tokens but {len(tokens)} were given")
        for length in lengths:
            self._check_length(length)
        counts = [1] * len(lengths) if sequences_per_document is None else sequences_per_document
        if sum(counts) != len(lengths) or min(counts, default=0) < 0:
            raise DataError(
                f"documents of {sum(counts)} sequences in all (the smallest has "
                f"{min(counts, default=0)}) do not divide the {len(lengths)} sequences given"
            )
        if self._starts[-1] != len(self._lengths):
            raise DataError(f"{self._where()} was not ended; call end_document() before others")
        self._write(self._checked(tokens))
        first = len(self._lengths)
        self._lengths.extend(lengths)
        self._starts.extend(first + total for total in itertools.accumulate(counts))

    def _where(self) -> str:
        return f"{self._bin}: document {len(self._starts) - 1}"

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= _MAX_LENGTH:
            raise DataError(
                f"{self._where()} has a sequence of {length} tokens; the format stores lengths in "
                f"32 bits, at most {_MAX_LENGTH}: split the document"
            )

    def _checked(self, tokens: Tokens) -> TokenArray:
        ids = np.asarray(tokens) if len(tokens) else np.empty(0, dtype=np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"{self._where()}: token ids must be a flat list of 64-bit integers, not "
                f"{ids.dtype} of shape {ids.shape}"
            )
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise DataError(
                f"{self._where()}: token id {bad} is outside 0..{self.vocab_size - 1}, the "
                "vocabulary this file is written for; use the tokenizer whose size was given"
            )
        return ids.astype(self.dtype, copy=False)

    def _write(self, ids: TokenArray) -> None:
        try:
            self._file.write(np.ascontiguousarray(ids).data)
        except OSError as error:
            raise DataError(f"cannot write {self._bin}: {error}") from error

    def _commit(self) -> None:
        if self._starts[-1] != len(self._lengths):
            raise DataError(
                f"{self._where()} was not ended; call end_document() after its sequences"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        lengths = np.array(self._lengths, dtype="<i4")
        starts = np.array(self._starts, dtype="<i8")
        with open(self._idx_partial, "xb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(starts)))
            file.write(lengths.data)
            file.write(sequence_offsets(lengths, self.dtype.itemsize).astype("<i8").data)
            file.write(starts.data)
            file.flush()
            os.fsync(file.fileno())
        # An old index must never stand beside a new .bin; without an .idx the pair is absent.
        self._idx.unlink(missing_ok=True)
        os.replace(self._bin_partial, self._bin)
        os.replace(self._idx_partial, self._idx)
        folder = os.open(self._bin.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def _remove_partial(self) -> None:
        # A close that cannot flush (disk full) has reported itself already or follows an exception.
        with contextlib.suppress(OSError):
            self._file.close()
        self._bin_partial.unlink(missing_ok=True)
        self._idx_partial.unlink(missing_ok=True)
