"""Text-to-text fine-tuning: the model is given a document's first field and predicts its second.

Each document holds two sequences, the input and the target (`ds-engine preprocess --fields
input,target`), and makes one row.

Shapes: ``S``, ``T`` sequence lengths of encoder and decoder, ``D`` documents.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.objective import Row, SpecialIds
from ds_engine.data.origin import refuse_classes
from ds_engine.data.packing import BoolArray, IntArray, encoder_decoder_row
from ds_engine.data.samples import RandomOrder
from ds_engine.errors import ConfigError, DataError

_PURPOSE = 2  # beside the two random streams of an epoch in ``samples``


@dataclass(frozen=True, slots=True)
class TextPair:
    """One example.

    Attributes:
        tokens: (N,) the input and behind it the target, both ended by EOS.
        num_inputs: how many of them are the input; 0: an empty sample, whose ids are padding.
    """

    tokens: IntArray
    num_inputs: int


@dataclass(frozen=True, kw_only=True)
class TextToText:
    """Predict the target from the input.

    EOS ends both; if the field ends with it (or with ``drop_final``) already, it is not doubled.

    Attributes:
        encoder_length: ``S``.
        decoder_length: ``T``.
        ids: needs ``pad``, ``eos`` and ``start``.
        seed: kept for the interface of objectives: nothing about a row is random.
        truncate: cut fields that are too long at their end, keeping EOS; otherwise a data set with
            such a field is refused.
        drop_final: a second id, beside ``ids.eos``, that EOS replaces at the end of a field.
    """

    encoder_length: int
    decoder_length: int
    ids: SpecialIds
    seed: int = 0
    truncate: bool = False
    drop_final: int | None = None

    def __post_init__(self) -> None:
        """Check ids and lengths.

        Raises:
            ConfigError: an id is missing or a length leaves no room for a token and EOS.
        """
        for name in ("pad", "eos", "start"):
            self.ids.require(name, kind="t5")
        for key, length in (
            ("sequence_length", self.encoder_length),
            ("decoder_sequence_length", self.decoder_length),
        ):
            if length < 2:
                raise ConfigError(
                    f"data.{key} = {length} must be at least 2: room for a token and its EOS"
                )

    def samples(self, data: IndexedDataset, *, seed: int) -> "ShuffledPairs":
        """Endless examples, each once an epoch, in an order drawn from (seed, epoch).

        Raises:
            DataError: a document has not two fields, or is too long (without ``truncate``).
        """
        return ShuffledPairs(TextPairs(data, self), seed=seed)

    def validation(self, data: IndexedDataset) -> "TextPairs":
        """The examples in file order.

        Raises:
            DataError: as ``samples``.
        """
        return TextPairs(data, self)

    def empty(self) -> TextPair:
        """A sample without tokens."""
        return TextPair(np.array([self.ids.require("pad", kind="t5")], dtype=np.int64), 0)

    def __call__(self, sample: TextPair, number: int) -> Row:
        """Return the row of an example; ``number`` has no effect."""
        middle = sample.num_inputs
        inputs, targets = sample.tokens[:middle], sample.tokens[middle:]
        if not middle:
            targets = targets[:0]
        count = int(middle > 0)
        return encoder_decoder_row(
            (inputs, np.array([len(inputs)][:count], dtype=np.int64)),
            (targets, np.array([len(targets)][:count], dtype=np.int64)),
            encoder_length=self.encoder_length,
            decoder_length=self.decoder_length,
            pad=self.ids.require("pad", kind="t5"),
            start=self.ids.require("start", kind="t5"),
        )

    def replaced(self, last: IntArray) -> BoolArray:
        """Return whether EOS takes the place of each of these last ids of a field."""
        replaced: BoolArray = last == self.ids.eos
        if self.drop_final is not None:
            replaced |= last == self.drop_final
        return replaced


class TextPairs:
    """The examples of a data set in file order; ``pairs[k]`` is document ``k``.

    Attributes:
        num_tokens: tokens of all fields, as they are stored.
    """

    def __init__(self, data: IndexedDataset, objective: TextToText) -> None:
        """Check the fields of all documents.

        Raises:
            DataError: no document, documents without exactly two sequences, ids that are not
                integers, or (without ``truncate``) fields that are too long.
        """
        _check_fields(data)
        self._tokens = data.tokens
        self._ends = data.sequence_token_offsets()
        self._objective = objective
        self.num_tokens = data.num_tokens
        if not objective.truncate:
            self._check_lengths(data.prefix, 0, "input", objective.encoder_length)
            self._check_lengths(data.prefix, 1, "target", objective.decoder_length)

    def __len__(self) -> int:
        return len(self._ends) // 2

    def __getitem__(self, index: int) -> TextPair:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: the set has {len(self)} samples")
        inputs = self._field(2 * index, self._objective.encoder_length)
        targets = self._field(2 * index + 1, self._objective.decoder_length)
        return TextPair(np.concatenate([inputs, targets]), len(inputs))

    def _field(self, sequence: int, limit: int) -> IntArray:
        """Return the ids of a field with EOS, cut to ``limit``."""
        begin, end = int(self._ends[sequence]), int(self._ends[sequence + 1])
        ids = self._tokens[begin:end].astype(np.int64)
        if len(ids) and self._objective.replaced(ids[-1:])[0]:
            ids = ids[:-1]
        return np.append(ids[: limit - 1], self._objective.ids.require("eos", kind="t5"))

    def _check_lengths(
        self, prefix: str, field: int, name: Literal["input", "target"], limit: int
    ) -> None:
        ends = self._ends[1 + field :: 2]
        lengths = ends - self._ends[field:-1:2]
        too_long = lengths > limit
        # Exactly as long as the row: it fits if its last id is replaced by EOS.
        exact = np.flatnonzero(lengths == limit)
        last = self._tokens[ends[exact] - 1].astype(np.int64)
        too_long[exact[~self._objective.replaced(last)]] = True
        if not too_long.any():
            return
        first = int(np.argmax(too_long))
        key = "sequence_length" if field == 0 else "decoder_sequence_length"
        raise DataError(
            f"{prefix}: the {name} of {int(too_long.sum())} of {len(self)} documents is too long, "
            f"first that of document {first} with {lengths[first]} tokens; data.{key} = {limit} "
            f"holds {limit - 1} and EOS. Raise data.{key}, or set data.objective.truncate = true "
            "to cut such texts at their end"
        )


class ShuffledPairs:
    """Endless training examples; ``pairs[i]`` for any ``i >= 0``, each document once an epoch.

    Attributes:
        num_tokens: tokens in one epoch.
        epoch_samples: samples in one epoch: the number of documents.
    """

    def __init__(self, pairs: TextPairs, *, seed: int) -> None:
        """Shuffle ``pairs`` anew in each epoch."""
        self._pairs = pairs
        self._seed = seed
        self.num_tokens = pairs.num_tokens
        self.epoch_samples = float(len(pairs))

    def __getitem__(self, index: int) -> TextPair:
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        epoch, place = divmod(index, len(self._pairs))
        # Made anew each time: some microseconds, and no state to share between threads.
        order = RandomOrder(len(self._pairs), (self._seed, epoch, _PURPOSE))
        return self._pairs[order[place]]


def _check_fields(data: IndexedDataset) -> None:
    fix = (
        "text-to-text training needs an input and a target in each; write it with "
        "`ds-engine preprocess --fields input,target`"
    )
    if data.dtype.kind not in "iu":
        raise DataError(f"{data.prefix} holds {data.dtype} values, not integer token ids; {fix}")
    refuse_classes(data)
    counts = np.diff(data.document_sequences())
    if not len(counts):
        raise DataError(f"{data.prefix} holds no document; {fix}")
    wrong = np.flatnonzero(counts != 2)
    if len(wrong):
        raise DataError(
            f"{data.prefix}: {len(wrong)} of {len(counts)} documents have not two sequences, first "
            f"document {wrong[0]} with {counts[wrong[0]]}; {fix}"
        )
