"""Reader of Megatron's tokenized data: a ``.bin`` of ids and an ``.idx`` beside it.

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

A document is one or more sequences: usually one, else its sentences, or the fields of a record.
``ds_engine.data.indexed_writer`` writes the pair.
"""

import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_engine.errors import DataError

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.generic]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = dict(enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1))
HEADER = struct.Struct("<9sQBQQ")
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

        start = HEADER.size
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

    def document_sequences(self) -> IntArray:
        """Return (D+1,) int64: the sequence at which each document starts, and the last one's end.

        Document ``d`` is the sequences ``[d] .. [d + 1] - 1``; there may be none. The array is a
        read-only view of the index.
        """
        return self.document_starts

    def sequence_token_offsets(self) -> IntArray:
        """Return (N+1,) int64: the start of each sequence in ``tokens``, and the last one's end."""
        offsets = np.empty(len(self._offsets) + 1, dtype=np.int64)
        np.floor_divide(self._offsets, self.dtype.itemsize, out=offsets[:-1])
        offsets[-1] = self.num_tokens
        return offsets

    def document_offsets(self) -> IntArray:
        """Return (D+1,) int64: the start of each document in ``tokens``, and the last one's end."""
        offsets = self.sequence_token_offsets()
        if len(offsets) == len(self.document_starts) and bool(
            (self.document_starts == np.arange(len(offsets))).all()
        ):
            return offsets  # one sequence a document, the usual case: no gather
        return offsets[self.document_starts]

    def _read_header(self, raw: npt.NDArray[np.uint8]) -> tuple[int, int, int]:
        if len(raw) < HEADER.size:
            raise DataError(
                f"{self._idx} holds {len(raw)} bytes but the header alone takes {HEADER.size}: "
                "the file is empty or truncated; write the pair again"
            )
        magic, version, code, sequences, boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise DataError(f"{self._idx} starts with {magic!r}, not {MAGIC!r}: not an index file")
        if version != VERSION:
            raise DataError(f"{self._idx} has format version {version}; only {VERSION} is known")
        if code not in DTYPES:
            raise DataError(f"{self._idx} has type code {code}; known codes are {sorted(DTYPES)}")
        if boundaries < 1:
            raise DataError(f"{self._idx} lists no document boundary; even no document needs one")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
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


def _map_bytes(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file read-only; an empty file, which cannot be mapped, gives an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
