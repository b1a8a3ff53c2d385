"""Which tokens form sample ``i``: a pure function of (seed, i), so that resuming needs no state.

Training. The documents of each epoch are put in an order drawn from (seed, epoch) and joined to a
stream of ``T`` tokens an epoch. Piece ``j`` is the tokens ``j*S .. j*S+S`` of that endless stream:
``S + 1`` tokens, of which the last is the first of the next piece, so that each token is predicted
once an epoch. With ``overlap = 0``, for objectives that predict words of the piece itself, it is
``S`` tokens. Pieces run across the end of an epoch; no token is dropped. Sample ``i`` lies in
epoch ``e = i*S // T`` and is one of the pieces that start in that epoch, in an order drawn from
(seed, e).

Nothing is written to disk: each rank builds the order of the current epoch in memory (12 bytes a
document) when it is first needed.

Shapes: ``S`` sequence length, ``T`` tokens in the data set, ``D`` documents.
"""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.origin import refuse_records
from ds_engine.errors import DataError

IntArray = npt.NDArray[np.int64]

_DOCUMENT_ORDER, _PIECE_ORDER = 0, 1  # purposes: keep the two random streams of an epoch apart
_KEPT_EPOCHS = 2  # a piece may run into the next epoch


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one sample and where documents start in it.

    Attributes:
        tokens: (S + overlap,) int64 ids; the ids past ``num_valid`` are padding.
        starts: sorted int64 offsets in 0..num_valid-1 at which a document begins. Offset 0 is
            listed only if a document really begins there.
        num_valid: number of real tokens; all except at the end of a validation set.
    """

    tokens: IntArray
    starts: IntArray
    num_valid: int


def permutation(size: int, key: tuple[int, ...]) -> IntArray:
    """Return a random order of ``0..size-1`` drawn from ``key`` (non-negative integers).

    Sorting 64-bit words that hold random bits above the number itself: the words differ, so every
    sorting routine and every numpy release gives the same order (``Generator.permutation`` does not
    promise that; Philox's raw output does), and sorting is faster than a shuffle of many items.
    """
    words = np.random.Philox(np.random.SeedSequence(key)).random_raw(size)
    shift = np.uint64(max(size - 1, 1).bit_length())
    words <<= shift
    words |= np.arange(size, dtype=np.uint64)
    words.sort()
    words &= (np.uint64(1) << shift) - np.uint64(1)
    return words.view(np.int64)


class RandomOrder:
    """A random order of ``0..size-1`` drawn from ``key``; ``order[i]`` takes O(1) and no table.

    A Feistel network over the smallest even number of bits that holds ``size``, walked until the
    result is below ``size`` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): a
    bijection, so an order of 500 million samples costs no memory.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self._half = max((size - 1).bit_length() + 1, 2) // 2
        words = np.random.SeedSequence(key).generate_state(6, np.uint64)
        self._round_keys = [int(word) for word in words]

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of an order of {self.size}")
        mask = (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & mask
            for round_key in self._round_keys:
                left, right = right, left ^ (_mix(right ^ round_key) & mask)
            index = left << self._half | right
            if index < self.size:
                return index


def _mix(value: int) -> int:
    """Scramble 64 bits (the finalizer of splitmix64; Steele, Lea and Flood 2014)."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


@dataclass(frozen=True, slots=True)
class _Epoch:
    documents: npt.NDArray[np.signedinteger]  # (D,) order of the documents; i32 when it fits
    ends: IntArray  # (D,) stream position, within the epoch, at which each of them ends
    pieces: RandomOrder  # of the pieces that start in the epoch


class ShuffledSamples:
    """Endless training samples of one indexed data set; ``samples[i]`` for any ``i >= 0``.

    Safe to use from several threads.

    Attributes:
        num_tokens: tokens in one epoch.
        sequence_length: ``S``; a sample has ``S + overlap`` tokens.
    """

    def __init__(
        self, data: IndexedDataset, *, sequence_length: int, seed: int, overlap: int = 1
    ) -> None:
        """Read the document boundaries of ``data``.

        Raises:
            DataError: the data set has no token, or its ids are not integers.
        """
        _check(data, sequence_length)
        self._tokens = data.tokens
        self._offsets = data.document_offsets()
        self._seed = seed
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()
        self._overlap = overlap
        self.num_tokens = data.num_tokens
        self.sequence_length = sequence_length

    @property
    def epoch_samples(self) -> float:
        """Samples in one epoch."""
        return self.num_tokens / self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        epoch = index * self.sequence_length // self.num_tokens
        first = self._first_piece(epoch)
        return self._piece(first + self._epoch(epoch).pieces[index - first])

    def _first_piece(self, epoch: int) -> int:
        """Return the number of the first piece that starts in ``epoch``."""
        return -(-epoch * self.num_tokens // self.sequence_length)

    def _piece(self, piece: int) -> Sample:
        epoch, position = divmod(piece * self.sequence_length, self.num_tokens)
        missing = self.sequence_length + self._overlap
        tokens = np.empty(missing, dtype=np.int64)
        starts: list[int] = []
        while missing:
            filled = len(tokens) - missing
            taken = self._copy(epoch, position, tokens[filled:], filled, starts)
            missing -= taken
            epoch, position = epoch + 1, 0
        return Sample(tokens, np.array(starts, dtype=np.int64), len(tokens))

    def _copy(
        self, number: int, position: int, out: IntArray, filled: int, starts: list[int]
    ) -> int:
        """Copy the stream of an epoch from ``position`` into ``out``; return how many tokens."""
        epoch = self._epoch(number)
        wanted = min(len(out), self.num_tokens - position)
        # side="right" steps over empty documents: they end where the one before them ends.
        low = int(np.searchsorted(epoch.ends, position, side="right"))
        high = int(np.searchsorted(epoch.ends, position + wanted, side="left"))
        documents = epoch.documents[low : high + 1]
        begins = self._offsets[documents].tolist()
        ends = self._offsets[documents + 1].tolist()
        skip = position - (int(epoch.ends[low]) - (ends[0] - begins[0]))
        done = 0
        for begin, end in zip(begins, ends, strict=True):
            if begin == end:
                continue
            if not skip:
                starts.append(filled + done)
            length = min(end - begin - skip, wanted - done)
            out[done : done + length] = self._tokens[begin + skip : begin + skip + length]
            done += length
            skip = 0
        return wanted

    def _epoch(self, number: int) -> _Epoch:
        with self._lock:
            if number not in self._epochs:
                while len(self._epochs) >= _KEPT_EPOCHS:
                    del self._epochs[max(self._epochs, key=lambda kept: abs(kept - number))]
                self._epochs[number] = self._build(number)
            return self._epochs[number]

    def _build(self, number: int) -> _Epoch:
        size = len(self._offsets) - 1
        documents: npt.NDArray[np.signedinteger] = permutation(
            size, (self._seed, number, _DOCUMENT_ORDER)
        )
        lengths = np.diff(self._offsets)
        if lengths.max() < 2**31:  # half the memory traffic of the gather, which dominates
            lengths = lengths.astype(np.int32)
        ends = np.cumsum(np.take(lengths, documents), dtype=np.int64)
        if size < 2**31 - 1:
            documents = documents.astype(np.int32)
        pieces = self._first_piece(number + 1) - self._first_piece(number)
        return _Epoch(documents, ends, RandomOrder(pieces, (self._seed, number, _PIECE_ORDER)))


class SequentialSamples:
    """The samples of a validation set: file order, no shuffle, each token predicted at most once.

    Sample ``i`` is the tokens ``i*S .. i*S+S`` (with ``overlap = 0`` one less). The last one is
    padded with id 0 (``num_valid`` says from where), so that even a set shorter than one sample
    counts whole.
    """

    def __init__(self, data: IndexedDataset, *, sequence_length: int, overlap: int = 1) -> None:
        """Read the document boundaries of ``data``.

        Raises:
            DataError: no more tokens than ``overlap`` (nothing to predict), or ids that are not
                integers.
        """
        _check(data, sequence_length)
        self._overlap = overlap
        if data.num_tokens < 1 + overlap:
            raise DataError(f"{data.prefix} holds one token; predicting the next needs two")
        self._tokens = data.tokens
        # Empty documents would list their start twice.
        self._starts = np.unique(data.document_offsets()[:-1])
        self.sequence_length = sequence_length
        self.num_tokens = data.num_tokens

    def __len__(self) -> int:
        return (self.num_tokens - 1 - self._overlap) // self.sequence_length + 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: the set has {len(self)} samples")
        begin = index * self.sequence_length
        tokens = np.zeros(self.sequence_length + self._overlap, dtype=np.int64)
        found = self._tokens[begin : begin + len(tokens)]
        tokens[: len(found)] = found
        low, high = np.searchsorted(self._starts, (begin, begin + len(found)))
        return Sample(tokens, self._starts[low:high] - begin, len(found))


def _check(data: IndexedDataset, sequence_length: int) -> None:
    if sequence_length < 1:
        raise DataError(f"sequence_length = {sequence_length} must be at least 1")
    if data.dtype.kind not in "iu":
        raise DataError(f"{data.prefix} holds {data.dtype} values, not integer token ids")
    if data.num_tokens == 0:
        raise DataError(
            f"{data.prefix} holds no token ({data.num_documents} empty documents): nothing to "
            "train on"
        )
    refuse_records(data)
