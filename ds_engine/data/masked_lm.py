"""The masked language-model objective without a sentence objective, as RoBERTa trains.

A sample is a piece of the shuffled stream of documents. Each document fragment in it becomes one
example, ``[CLS] fragment [SEP]``, and the examples share the row without seeing each other. Where
the special tokens of all fragments do not fit, neighbours become one example, the shortest first:
no token is ever lost.

Shapes: ``S`` sequence length, ``L`` raw tokens of a sample; every array of a row is ``(S,)``.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.masking import Masker, MaskingOptions, masking_random
from ds_engine.data.objective import Row, SpecialIds
from ds_engine.data.packing import document_lengths, join_until_fits, place, slack
from ds_engine.data.samples import Sample, SequentialSamples, ShuffledSamples
from ds_engine.errors import ConfigError

IntArray = npt.NDArray[np.int64]

_SHORTEST = 8  # tokens of a row that has room for more than special tokens


class BertIds(NamedTuple):
    """Ids that lay out BERT's rows.

    Attributes:
        cls: begins an example.
        sep: ends a part of it.
        pad: fills rows up.
    """

    cls: int
    sep: int
    pad: int

    @classmethod
    def of(cls, ids: SpecialIds) -> "BertIds":
        """Return those of a tokenizer.

        Raises:
            ConfigError: it has not got them all.
        """
        return cls(*(ids.require(name, kind="wordpiece") for name in cls._fields))


def check_length(sequence_length: int) -> None:
    """Check that a row can hold text.

    Raises:
        ConfigError: it cannot.
    """
    if sequence_length < _SHORTEST:
        raise ConfigError(
            f"data.sequence_length = {sequence_length} must be at least {_SHORTEST}: [CLS] and "
            "[SEP] take up to three tokens of a row"
        )


@dataclass(frozen=True)
class MaskedLM:
    """Predict the masked tokens of documents.

    ``L`` is ``S - 2``, with ``isolate_documents`` a few less (8 of a row of 512), which hold the
    special tokens of further examples. Where a piece has fewer documents, that room is padding.
    A separator that ends a document in the data is its [SEP]; no second one follows.

    Attributes:
        sequence_length: ``S``.
        ids: special tokens; mask, cls, sep and pad are needed.
        vocab_size: words of the tokenizer.
        seed: seeds the masks.
        masking: how tokens are masked.
        isolate_documents: fragments are examples of their own; otherwise the whole piece is one.
    """

    sequence_length: int
    ids: SpecialIds
    vocab_size: int
    seed: int
    masking: MaskingOptions = MaskingOptions()  # noqa: RUF009 - frozen
    isolate_documents: bool = True
    _bert: BertIds = field(init=False, repr=False, compare=False)
    _masker: Masker = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the masks.

        Raises:
            ConfigError: a special token is missing, or the row is too short to hold text.
        """
        check_length(self.sequence_length)
        object.__setattr__(self, "_bert", BertIds.of(self.ids))
        masker = Masker(self.ids, vocab_size=self.vocab_size, options=self.masking)
        object.__setattr__(self, "_masker", masker)

    @property
    def piece_length(self) -> int:
        """Raw tokens in a sample."""
        spare = slack(self.sequence_length) if self.isolate_documents else 0
        return self.sequence_length - 2 - spare

    def samples(self, data: IndexedDataset, *, seed: int) -> ShuffledSamples:
        """Training samples: pieces of the endless shuffled stream, without overlap."""
        return ShuffledSamples(data, sequence_length=self.piece_length, seed=seed, overlap=0)

    def validation(self, data: IndexedDataset) -> SequentialSamples:
        """Validation samples: pieces in file order, without overlap."""
        return SequentialSamples(data, sequence_length=self.piece_length, overlap=0)

    def empty(self) -> Sample:
        """A piece without a token."""
        nothing = np.zeros(0, dtype=np.int64)
        return Sample(np.full(self.piece_length, self._bert.pad, dtype=np.int64), nothing, 0)

    def __call__(self, sample: Sample, number: int) -> Row:
        """The row of a piece: (tokens, positions, segments, token types), (labels, loss mask)."""
        size = self.sequence_length
        piece = sample.tokens[: sample.num_valid]
        lengths = document_lengths(sample, isolate_documents=self.isolate_documents)
        ends = np.cumsum(lengths)
        costs = np.arange(2, self.piece_length + 3)[None]
        closed = (piece[ends - 1] == self._bert.sep).astype(np.int64)
        lengths = join_until_fits(lengths, costs, (size,), dropped=closed)
        text, lengths, places = self._examples(piece, lengths)
        tokens, positions, segments = place(text, lengths, size, pad=self._bert.pad)
        boundaries = np.zeros(size, dtype=np.bool_)
        boundaries[places[sample.starts[sample.starts < len(piece)]]] = True
        masked = self._masker(
            tokens, segments >= 0, random=masking_random(self.seed, number), boundaries=boundaries
        )
        return Row(
            (masked.tokens, positions, segments, np.zeros(size, dtype=np.int64)),
            (masked.labels, masked.mask.astype(np.float32)),
        )

    def _examples(self, piece: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Wrap each run of ``lengths`` tokens of ``piece`` in [CLS] and [SEP].

        Returns:
            Tokens of all examples, tokens of each example, and the place of each token of the piece
            among them.
        """
        ends = np.cumsum(lengths)
        before = np.zeros(len(piece), dtype=np.int64)  # special tokens put in before each token
        opened = 1 + (piece[ends - 1] != self._bert.sep)
        before[ends[:-1]] = opened[:-1]
        before[:1] = 1
        places = np.arange(len(piece)) + np.cumsum(before)
        lengths = lengths + opened
        ends = np.cumsum(lengths)
        text = np.empty(int(lengths.sum()), dtype=np.int64)
        text[ends - lengths] = self._bert.cls
        text[places] = piece
        text[ends - 1] = self._bert.sep
        return text, lengths, places


def pair_tokens(first: IntArray, second: IntArray | None, ids: BertIds) -> tuple[IntArray, int]:
    """Join parts to ``[CLS] first [SEP]``, or ``[CLS] first [SEP] second [SEP]``.

    Returns:
        The tokens, and the place of the first one of type 1 (their number where there is none).
    """
    begin = len(first) + 2
    size = begin if second is None else begin + len(second) + 1
    tokens = np.full(size, ids.sep, dtype=np.int64)
    tokens[0] = ids.cls
    tokens[1 : begin - 1] = first
    if second is not None:
        tokens[begin:-1] = second
    return tokens, begin


def pair_inputs(
    tokens: IntArray, second: int, *, size: int, pad: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Pad one example to a row and number it.

    Args:
        tokens: what ``pair_tokens`` gave.
        second: place of the first token of type 1.
        size: ``S``.
        pad: id of the padding.

    Returns:
        Tokens, positions, segments (padding: -1, positions from 0) and token types.
    """
    row, positions, segments = place(tokens, np.array([len(tokens)]), size, pad=pad)
    types = np.zeros(size, dtype=np.int64)
    types[second : len(tokens)] = 1
    return row, positions, segments, types
