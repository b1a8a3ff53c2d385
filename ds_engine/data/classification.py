"""Classification of texts or pairs of texts, to fine-tune BERT.

The data holds documents of two sequences, (text, label), or of three, (text, pair, label)
(``ds-engine preprocess --fields text,label --label label``). A label is a sequence of one id, the
number of the class. A row holds one example, ``[CLS] text [SEP]`` or ``[CLS] text [SEP] pair
[SEP]``.

Shapes: ``S`` sequence length, ``D`` documents, which are the examples.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.masked_lm import BertIds, check_length, pair_inputs, pair_tokens
from ds_engine.data.objective import Row, SpecialIds
from ds_engine.data.samples import RandomOrder
from ds_engine.errors import ConfigError, DataError

IntArray = npt.NDArray[np.int64]

_ORDER = 0x434C4153  # keeps the order of examples apart from every other random stream of a seed


@dataclass(frozen=True, slots=True)
class ClassificationSample:
    """One example.

    Attributes:
        tokens: ``[CLS] text [SEP]`` or ``[CLS] text [SEP] pair [SEP]``.
        second: place where the pair begins; ``len(tokens)`` without one.
        label: number of the class; None in a sample that does not count.
    """

    tokens: IntArray
    second: int
    label: int | None


@dataclass(frozen=True)
class Classification:
    """Predict the class of a text or a pair of texts.

    Attributes:
        sequence_length: ``S``.
        ids: special tokens; cls, sep and pad are needed.
        num_labels: number of classes.
        seed: not used for rows, where nothing is random; orders are drawn from the seed of
            ``samples``.
        truncate: cut examples that are too long, the longer of text and pair first, from the end;
            otherwise they are refused when the data is opened.
    """

    sequence_length: int
    ids: SpecialIds
    num_labels: int
    seed: int = 0
    truncate: bool = False
    _bert: BertIds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a special token is missing, or a number is too small.
        """
        check_length(self.sequence_length)
        if self.num_labels < 2:
            raise ConfigError(
                f"model.num_labels = {self.num_labels} must be at least 2: with fewer classes "
                "there is nothing to tell apart"
            )
        object.__setattr__(self, "_bert", BertIds.of(self.ids))

    def samples(self, data: IndexedDataset, *, seed: int) -> "ShuffledExamples":
        """Training samples: each epoch all examples in a new order.

        Raises:
            DataError: the data holds something else than examples, a label that is no class, or an
                example that is too long.
        """
        return ShuffledExamples(self._reader(data), seed)

    def validation(self, data: IndexedDataset) -> "SequentialExamples":
        """Validation samples: each example once, in file order.

        Raises:
            DataError: as for ``samples``.
        """
        return SequentialExamples(self._reader(data))

    def _reader(self, data: IndexedDataset) -> "ExampleReader":
        return ExampleReader(
            data,
            sequence_length=self.sequence_length,
            num_labels=self.num_labels,
            truncate=self.truncate,
            ids=self._bert,
        )

    def empty(self) -> ClassificationSample:
        """A sample without text or class."""
        tokens, second = pair_tokens(np.zeros(0, dtype=np.int64), None, self._bert)
        return ClassificationSample(tokens, second, None)

    def __call__(self, sample: ClassificationSample, number: int) -> Row:
        """The row of a sample: (tokens, positions, segments, token types), (label, mask)."""
        size = self.sequence_length
        inputs = pair_inputs(sample.tokens, sample.second, size=size, pad=self._bert.pad)
        label = np.array(sample.label or 0, dtype=np.int64)
        return Row(inputs, (label, np.array(sample.label is not None, dtype=np.float32)))


def truncated_lengths(text: int, pair: int, room: int) -> tuple[int, int]:
    """Return how many tokens to keep of each text, cutting the longer one until both fit."""
    if text + pair <= room:
        return text, pair
    half = room // 2
    if pair <= half:
        return room - pair, pair
    if text < room - half:
        return text, room - text
    return room - half, half


class ExampleReader:
    """The examples of one data set; safe to use from several threads.

    Attributes:
        num_tokens: tokens in the data set, labels included.
        num_examples: ``D``.
    """

    def __init__(
        self,
        data: IndexedDataset,
        *,
        sequence_length: int,
        num_labels: int,
        truncate: bool,
        ids: BertIds,
    ) -> None:
        """Check every example of ``data``, but for its text.

        Raises:
            DataError: a document is no example, a label is no class, or an example is too long.
        """
        self._prefix = data.prefix
        if data.dtype.kind not in "iu":
            raise DataError(f"{data.prefix} holds {data.dtype} values, not integer token ids")
        if not data.num_documents:
            raise DataError(f"{data.prefix} holds no document: nothing to train on")
        self._tokens = data.tokens
        self._starts = data.document_sequences()
        self._offsets = data.sequence_token_offsets()
        self._sequence_length = sequence_length
        self._ids = ids
        self.num_tokens = data.num_tokens
        self.num_examples = data.num_documents
        self._check_labels(num_labels)
        if not truncate:
            self._check_lengths()

    def _check_labels(self, num_labels: int) -> None:
        parts = np.diff(self._starts)
        wrong = np.flatnonzero((parts != 2) & (parts != 3))
        if len(wrong):
            raise DataError(
                f"{self._prefix}: document {wrong[0]} has {parts[wrong[0]]} sequences, but an "
                "example has two (text, label) or three (text, pair, label); write the data with "
                "ds-engine preprocess --fields text,label --label label, or --fields "
                "text,pair,label --label label"
            )
        last = self._starts[1:] - 1
        begin = self._offsets[last]
        sizes = self._offsets[last + 1] - begin
        wrong = np.flatnonzero(sizes != 1)
        if len(wrong):
            raise DataError(
                f"{self._prefix}: the label of document {wrong[0]} has {sizes[wrong[0]]} tokens, "
                "but a label is one id, the number of the class; name the field of the label last "
                "in ds-engine preprocess --fields, and again with --label"
            )
        labels = self._tokens[begin].astype(np.int64)
        wrong = np.flatnonzero((labels < 0) | (labels >= num_labels))
        if len(wrong):
            raise DataError(
                f"{self._prefix}: {len(wrong)} labels are outside 0..{num_labels - 1}; the first "
                f"is {labels[wrong[0]]}, of document {wrong[0]}. Raise model.num_labels = "
                f"{num_labels}, correct the labels, or, if they are ids of words, write the data "
                "with ds-engine preprocess --label"
            )

    def _check_lengths(self) -> None:
        text = self._offsets[self._starts[1:] - 1] - self._offsets[self._starts[:-1]]
        lengths = text + np.diff(self._starts)  # [CLS], and a [SEP] for each text
        wrong = np.flatnonzero(lengths > self._sequence_length)
        if len(wrong):
            raise DataError(
                f"{self._prefix}: {len(wrong)} of {self.num_examples} examples are longer than "
                f"data.sequence_length = {self._sequence_length}; the first is document "
                f"{wrong[0]} with {lengths[wrong[0]]} tokens, and the longest has "
                f"{lengths.max()}. Raise data.sequence_length, or set data.objective.truncate to "
                "true to cut them"
            )

    def read(self, example: int) -> ClassificationSample:
        """Return an example."""
        first, stop = int(self._starts[example]), int(self._starts[example + 1])
        bounds = self._offsets[first:stop].tolist()
        texts = [
            self._tokens[begin:end].astype(np.int64) for begin, end in itertools.pairwise(bounds)
        ]
        text, pair = texts if len(texts) == 2 else (texts[0], None)
        room = self._sequence_length - 1 - len(texts)
        kept = truncated_lengths(len(text), 0 if pair is None else len(pair), room)
        text = text[: kept[0]]
        if pair is not None:
            pair = pair[: kept[1]]
        tokens, second = pair_tokens(text, pair, self._ids)
        return ClassificationSample(tokens, second, int(self._tokens[bounds[-1]]))  # type: ignore[call-overload]


class ShuffledExamples:
    """Endless training samples: all examples in an order drawn anew for each epoch.

    Attributes:
        num_tokens: tokens in one epoch.
        epoch_samples: samples in one epoch.
    """

    def __init__(self, reader: ExampleReader, seed: int) -> None:
        """Read from ``reader`` in an order drawn from ``seed``."""
        self._reader = reader
        self._seed = seed
        self.num_tokens = reader.num_tokens
        self.epoch_samples = float(reader.num_examples)

    def __getitem__(self, index: int) -> ClassificationSample:
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        epoch, place = divmod(index, self._reader.num_examples)
        order = RandomOrder(self._reader.num_examples, (self._seed, epoch, _ORDER))
        return self._reader.read(order[place])


class SequentialExamples:
    """Validation samples in file order."""

    def __init__(self, reader: ExampleReader) -> None:
        """Read from ``reader``."""
        self._reader = reader

    def __len__(self) -> int:
        return self._reader.num_examples

    def __getitem__(self, index: int) -> ClassificationSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: the set has {len(self)} samples")
        return self._reader.read(index)
