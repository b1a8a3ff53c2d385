"""Reader and writer of Megatron's tokenized data: a ``.bin`` of ids and an ``.idx`` beside it.

The format, little endian throughout::

    PREFIX.bin   the token ids of all sequences, one after another, without separators
    PREFIX.idx   9 bytes  "MMIDIDX\\0\\0"
                 u64      version, 1
                 u8       type of an id: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
                 u64      number of sequences N
                 u64      number of document boundaries D + 1
                 i32[N]   tokens in each sequence
                 i64[N]   byte offset of each sequence in the .bin
                 i64[D+1] sequence number at which each document starts; the last entry is N

A file that we write is byte for byte what Megatron-LM's own builder writes for the same ids and
type.
"""

import contextlib
import os
import secrets
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ds_engine.errors import DataError

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.generic]
Tokens = Sequence[int] | npt.NDArray[np.generic]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = dict(enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1))
_HEADER = struct.Struct("<9sQBQQ")
_MAX_LENGTH = 2**31 - 1  # lengths are stored as i32
_CHUNK = 1 << 22  # sequences validated at a time: bounds the memory of opening a huge index


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the token file of ``prefix``."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the index file of ``prefix``."""
    return Path(f"{os.fspath(prefix)}.idx")


def smallest_dtype_code(vocab_size: int) -> int:
    """Return the type code that holds every id below ``vocab_size``: 8 (u16) or 4 (i32).

    Raises:
        DataError: the vocabulary does not fit i32, or has no entry.
    """
    if not 1 <= vocab_size <= 2**31:
        raise DataError(f"vocab_size = {vocab_size} is outside 1..2147483648, the ids an i32 holds")
    return 8 if vocab_size <= 65536 else 4


def sequence_offsets(lengths: npt.NDArray[np.generic], itemsize: int) -> IntArray:
    """Return the byte offset of each sequence, in 64 bits: i32 overflows after 2 GiB of tokens."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= itemsize
    return offsets


class IndexedDataset:
    """The sequences and documents of one ``PREFIX.bin``/``PREFIX.idx`` pair, memory-mapped.

    Both files are checked when they are opened. Arrays that are handed out are read-only views
    which keep the mapping alive, so they stay valid after the dataset object is gone. Pickling
    keeps only the prefix; the other process opens the files again.

    Attributes:
        prefix: path without the ``.bin``/``.idx`` ending.
        dtype: type of the token ids.
        num_tokens: number of tokens in all sequences.
        document_starts: (D+1,) int64, sequence number at which each document starts.
        tokens: (num_tokens,) all ids as one read-only array of ``dtype``.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Open and check the pair.

        Raises:
            DataError: a file is missing, truncated, of another format or inconsistent.
        """
        self.prefix = os.fspath(prefix)
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                hint = ""
                if self.prefix.endswith((".bin", ".idx")):
                    hint = f"; give the path without its ending: {self.prefix[:-4]}"
                raise DataError(f"{path} is missing: a data set is a .bin and an .idx file{hint}")
        raw = _map_bytes(self._idx)
        code, num_sequences, num_boundaries = self._read_header(raw)
        self.dtype = np.dtype(DTYPES[code])

        start = _HEADER.size
        self._lengths = np.frombuffer(raw, "<i4", num_sequences, start)
        start += 4 * num_sequences
        self._offsets = np.frombuffer(raw, "<i8", num_sequences, start)
        start += 8 * num_sequences
        self.document_starts: IntArray = np.frombuffer(raw, "<i8", num_boundaries, start)
        self.num_tokens = self._check_sequences()
        self._check_documents()
        data = _map_bytes(self._bin)
        expected = self.num_tokens * self.dtype.itemsize
        if len(data) != expected:
            raise DataError(
                f"{self._bin} holds {len(data)} bytes but {self._idx} describes {expected} "
                f"({self.num_tokens} tokens of {self.dtype.itemsize} bytes): the file is "
                "truncated or belongs to another index; write the pair again"
            )
        self.tokens: TokenArray = np.frombuffer(data, self.dtype)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return type(self), (self.prefix,)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> TokenArray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> TokenArray:
        """Return tokens ``offset .. offset+length`` of sequence ``index`` (to its end by default).

        Raises:
            IndexError: no such sequence, or the range leaves it.
        """
        size = len(self._lengths)
        if not -size <= index < size:
            raise IndexError(f"sequence {index} of {self.prefix}: it has {size} sequences")
        total = int(self._lengths[index])
        end = total if length is None else offset + length
        if not 0 <= offset <= end <= total:
            raise IndexError(
                f"tokens {offset}..{end} of sequence {index} of {self.prefix}: it has {total} "
                "tokens"
            )
        first = int(self._offsets[index]) // self.dtype.itemsize
        return self.tokens[first + offset : first + end]

    @property
    def lengths(self) -> IntArray:
        """(N,) int64, number of tokens in each sequence."""
        return self._lengths.astype(np.int64)

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_starts) - 1

    def document_offsets(self) -> IntArray:
        """Return (D+1,) int64: the start of each document in ``tokens``, and the last one's end."""
        offsets = np.empty(len(self._offsets) + 1, dtype=np.int64)
        np.floor_divide(self._offsets, self.dtype.itemsize, out=offsets[:-1])
        offsets[-1] = self.num_tokens
        if len(offsets) == len(self.document_starts) and bool(
            (self.document_starts == np.arange(len(offsets))).all()
        ):
            return offsets  # one sequence a document, the usual case: no gather
        return offsets[self.document_starts]

    def _read_header(self, raw: npt.NDArray[np.uint8]) -> tuple[int, int, int]:
        if len(raw) < _HEADER.size:
            raise DataError(
                f"{self._idx} holds {len(raw)} bytes but the header alone takes {_HEADER.size}: "
                "the file is empty or truncated; write the pair again"
            )
        magic, version, code, sequences, boundaries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        if magic != MAGIC:
            raise DataError(f"{self._idx} starts with {magic!r}, not {MAGIC!r}: not an index file")
        if version != VERSION:
            raise DataError(f"{self._idx} has format version {version}; only {VERSION} is known")
        if code not in DTYPES:
            raise DataError(f"{self._idx} has type code {code}; known codes are {sorted(DTYPES)}")
        if boundaries < 1:
            raise DataError(f"{self._idx} lists no document boundary; even no document needs one")
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if len(raw) != expected:
            raise DataError(
                f"{self._idx} holds {len(raw)} bytes but its header describes {expected} "
                f"({sequences} sequences, {boundaries} document boundaries): truncated or "
                "damaged; write it again"
            )
        return code, sequences, boundaries

    def _check_sequences(self) -> int:
        """Check that sequences lie one after another from byte 0; return the number of tokens."""
        position = 0
        for low in range(0, len(self._lengths), _CHUNK):
            lengths = self._lengths[low : low + _CHUNK]
            negative = np.flatnonzero(lengths < 0)
            if len(negative):
                at = int(negative[0])
                raise DataError(
                    f"{self._idx}: sequence {low + at} has {lengths[at]} tokens, below 0"
                )
            expected = position + sequence_offsets(lengths, self.dtype.itemsize)
            wrong = np.flatnonzero(self._offsets[low : low + _CHUNK] != expected)
            if len(wrong):
                at = int(wrong[0])
                raise DataError(
                    f"{self._idx}: sequence {low + at} is said to start at byte "
                    f"{self._offsets[low + at]}, but the lengths before it end at byte "
                    f"{expected[at]}: the index is damaged (an overflow of its writer looks like "
                    "this); write it again"
                )
            position = int(expected[-1]) + int(lengths[-1]) * self.dtype.itemsize
        return position // self.dtype.itemsize

    def _check_documents(self) -> None:
        starts = self.document_starts
        if starts[0] != 0 or starts[-1] != len(self) or bool((starts[1:] < starts[:-1]).any()):
            raise DataError(
                f"{self._idx}: document boundaries must rise from 0 to the {len(self)} sequences, "
                f"but run from {starts[0]} to {starts[-1]} or fall in between: the index is damaged"
            )


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

    def add_documents(self, tokens: Tokens, lengths: Sequence[int]) -> None:
        """Add many documents of one sequence each, given as one run of ids and their lengths.

        Raises:
            DataError: as ``add_sequence``, or the lengths do not add up to the ids.
        """
        if sum(lengths) != len(tokens):
            raise DataError(f"lengths add up to {sum(lengths)} tokens but {len(tokens)} were given")
        for length in lengths:
            self._check_length(length)
        self._write(self._checked(tokens))
        first = len(self._lengths)
        self._lengths.extend(lengths)
        self._starts.extend(range(first + 1, first + 1 + len(lengths)))

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
            file.write(_HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(starts)))
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


def _map_bytes(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file read-only; an empty file, which cannot be mapped, gives an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
