"""The masked language-model objective with a sentence objective, as BERT and ALBERT train.

The data holds sentences: documents of several sequences (``ds-engine preprocess
--split-sentences``). A chunk is as many consecutive sentences of one document as fit into a row,
and each token of the data lies in exactly one chunk; a sentence longer than a row is cut. A row is
``[CLS] A [SEP] B [SEP]``, where A and B are a chunk divided at a random sentence boundary:

* sentence order (Lan et al., "ALBERT", 2020): half of the rows have the parts swapped. Every token
  is read in every epoch.
* next sentence (Devlin et al., "BERT", 2019): in half of the rows B is text of another document.
  The part that it replaces is not read in that epoch, as in BERT's and in Megatron's data; which
  parts these are is drawn anew in each epoch.

A chunk of a single sentence cannot be divided. It is read as ``[CLS] A [SEP]``, counts for the
masked tokens and not for the sentence loss, so that it says nothing about the labels.

Shapes: ``S`` sequence length, ``D`` documents, ``N`` sentences, ``C`` chunks.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.masked_lm import BertIds, check_length, pair_inputs, pair_tokens
from ds_engine.data.masking import Masker, MaskingOptions, masking_random, uniform
from ds_engine.data.objective import Row, SpecialIds
from ds_engine.data.origin import refuse_fields
from ds_engine.data.samples import RandomOrder
from ds_engine.errors import DataError

IntArray = npt.NDArray[np.int64]
SentenceKind = Literal["next_sentence", "sentence_order"]

_PAIR, _ORDER = 0x50414952, 0x4F524452  # purposes: keep the random streams of a seed apart
_SPECIAL = 3  # [CLS] and two [SEP]
_FEW_DOCUMENTS = 64  # below it, a numpy call for all of them costs more than a loop over each


@dataclass(frozen=True, slots=True)
class PairSample:
    """One example before masking.

    Attributes:
        tokens: ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``.
        second: place where B begins; ``len(tokens)`` without B.
        label: 1 if B was replaced (next sentence) or comes before A (sentence order), else 0.
    """

    tokens: IntArray
    second: int
    label: int


@dataclass(frozen=True)
class SentencePairs:
    """Predict masked tokens, and whether two parts of a text belong together or in this order.

    Attributes:
        kind: the sentence objective.
        sequence_length: ``S``; a chunk has at most ``S - 3`` tokens.
        ids: special tokens; mask, cls, sep and pad are needed.
        vocab_size: words of the tokenizer.
        seed: seeds the masks, and the pairs of validation sets.
        masking: how tokens are masked.
    """

    kind: SentenceKind
    sequence_length: int
    ids: SpecialIds
    vocab_size: int
    seed: int
    masking: MaskingOptions = MaskingOptions()  # noqa: RUF009 - frozen
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

    def samples(self, data: IndexedDataset, *, seed: int) -> "ShuffledPairs":
        """Training samples: each epoch all chunks in a new order, with new pairs.

        Raises:
            DataError: the data holds no sentences, or too few documents for random pairs.
        """
        return ShuffledPairs(self._reader(data, seed))

    def validation(self, data: IndexedDataset) -> "SequentialPairs":
        """Validation samples: each chunk once, in file order, always with the same pairs.

        Raises:
            DataError: the data holds no sentences, or too few documents for random pairs.
        """
        return SequentialPairs(self._reader(data, self.seed))

    def _reader(self, data: IndexedDataset, seed: int) -> "PairReader":
        limit = self.sequence_length - _SPECIAL
        return PairReader(data, kind=self.kind, limit=limit, ids=self.ids, seed=seed)

    def empty(self) -> PairSample:
        """A sample without text."""
        tokens, second = pair_tokens(np.zeros(0, dtype=np.int64), None, self._bert)
        return PairSample(tokens, second, 0)

    def __call__(self, sample: PairSample, number: int) -> Row:
        """The row of a sample: (tokens, positions, segments, token types), (labels, loss mask,
        sentence label, sentence mask).
        """
        size = self.sequence_length
        tokens, positions, segments, types = pair_inputs(
            sample.tokens, sample.second, size=size, pad=self._bert.pad
        )
        # The special ids between the parts end words and spans.
        masked = self._masker(tokens, segments == 0, random=masking_random(self.seed, number))
        has_label = sample.second < len(sample.tokens)
        return Row(
            (masked.tokens, positions, segments, types),
            (
                masked.labels,
                masked.mask.astype(np.float32),
                np.array(sample.label, dtype=np.int64),
                np.array(has_label, dtype=np.float32),
            ),
        )


def chunk_offsets(sentences: IntArray, documents: IntArray, limit: int) -> IntArray:
    """Divide each document into chunks of whole sentences.

    Each chunk takes as many sentences as fit; one that is longer than ``limit`` is cut there.

    Args:
        sentences: (N+1,) token at which each sentence begins, and the end of the last one.
        documents: (D+1,) the same of documents; a subset of ``sentences``.
        limit: most tokens in a chunk.

    Returns:
        (C+1,) token at which each chunk begins, and the end of the last one. No chunk is empty or
        spans two documents.
    """
    begin, end = documents[:-1], documents[1:]
    done = [documents[:1], end[(end > begin) & (end - begin <= limit)]]
    long = end - begin > limit
    begin, end = begin[long], end[long]
    # All documents go on by one chunk at a time, until only a few long ones are left.
    while len(begin) > _FEW_DOCUMENTS:
        place = np.searchsorted(sentences, begin + limit, side="right") - 1
        reached = sentences[place]
        reached = np.where(reached > begin, reached, begin + limit)
        np.minimum(reached, end, out=reached)
        done.append(reached)
        left = reached < end
        begin, end = reached[left], end[left]
    for at, stop in zip(begin.tolist(), end.tolist(), strict=True):
        done.append(_chunk_ends(sentences, at, stop, limit))
    offsets = np.concatenate(done)
    offsets.sort()
    return offsets


def _chunk_ends(sentences: IntArray, begin: int, end: int, limit: int) -> IntArray:
    """Return the ends of the chunks of the tokens ``begin..end`` of one document."""
    place, high = np.searchsorted(sentences, (begin, end), side="right").tolist()
    bounds = np.ascontiguousarray(sentences).data  # Python numbers on demand, no copy
    ends: list[int] = []
    while begin < end:
        target = begin + limit
        # Near by, unless there are many empty sentences.
        near = min(place + limit, high)
        place = bisect_right(bounds, target, place, near)
        if place == near:
            place = bisect_right(bounds, target, near, high)
        # bounds[place - 1] is `begin` itself, or lies before it, if the next sentence does not fit.
        reached = bounds[place - 1]
        begin = reached if reached > begin else target
        ends.append(begin)
    return np.array(ends, dtype=np.int64)


class PairReader:
    """The chunks of one data set, and the pairs that are made of them.

    Safe to use from several threads. Memory: 8 bytes a sentence, and as much a document and a
    chunk.

    Attributes:
        num_tokens: tokens in the data set.
        num_chunks: ``C``.
        seed: seeds the pairs and their order.
    """

    def __init__(
        self, data: IndexedDataset, *, kind: SentenceKind, limit: int, ids: SpecialIds, seed: int
    ) -> None:
        """Divide the documents of ``data`` into chunks of at most ``limit`` tokens.

        Raises:
            DataError: no token, ids that are not integers, fields of records, no document of two
                sentences, or only one document for next sentence.
        """
        if data.dtype.kind not in "iu":
            raise DataError(f"{data.prefix} holds {data.dtype} values, not integer token ids")
        if data.num_tokens == 0:
            raise DataError(
                f"{data.prefix} holds no token ({data.num_documents} empty documents): nothing to "
                "train on"
            )
        refuse_fields(data)
        self._sentences = data.sequence_token_offsets()
        self._documents = self._sentences[data.document_sequences()]
        filled = int(np.count_nonzero(np.diff(self._documents)))
        if kind == "next_sentence" and filled < 2:
            raise DataError(
                f"{data.prefix} holds one document with text; next_sentence takes random text from "
                'another one: add documents, or set data.objective.sentence to "sentence_order"'
            )
        self._chunks = chunk_offsets(self._sentences, self._documents, limit)
        # Sentences that begin inside of a chunk: where it can be divided.
        inner = np.searchsorted(self._sentences, self._chunks[1:], side="left")
        inner -= np.searchsorted(self._sentences, self._chunks[:-1], side="right")
        if not bool((inner > 0).any()):
            raise DataError(
                f"{data.prefix}: no document has two sentences that fit into {limit} tokens, so "
                f"there is nothing for {kind} to learn; write the data with ds-engine preprocess "
                "--split-sentences, raise data.sequence_length, or set data.objective.sentence to "
                '"none"'
            )
        self._tokens = data.tokens
        self._kind = kind
        self._limit = limit
        self._bert = BertIds.of(ids)
        self._ends = tuple(one for one in (ids.sep, ids.eos) if one is not None)
        self.seed = seed
        self.num_tokens = data.num_tokens
        self.num_chunks = len(self._chunks) - 1

    def read(self, chunk: int, number: int) -> PairSample:
        """Return the pair of ``chunk`` whose random part is drawn from ``number``.

        An end-of-document token at the end of a chunk is left out: [SEP] stands for it, and within
        a swapped part it would tell the order.
        """
        begin, end = int(self._chunks[chunk]), int(self._chunks[chunk + 1])
        end = self._trim(begin, end)
        inner = self._bounds(begin, end)[1:-1]
        text = self._tokens[begin:end].astype(np.int64)
        if not len(inner):
            return self._sample(text, None, 0)
        random = np.random.Philox(np.random.SeedSequence((self.seed, _PAIR, number)))
        which, coin, partner, place = uniform(random, 4).tolist()
        cut = int(inner[int(which * len(inner))]) - begin
        first, second = text[:cut], text[cut:]
        label = int(coin < 0.5)
        if not label:
            return self._sample(first, second, 0)
        if self._kind == "sentence_order":
            return self._sample(second, first, 1)
        other = self._other(begin, partner)
        replacement = self._random_text(other, place, len(second), len(first))
        if not len(replacement):  # the other document holds nothing but its end
            return self._sample(text, None, 0)
        return self._sample(first, replacement, 1)

    def _sample(self, first: IntArray, second: IntArray | None, label: int) -> PairSample:
        tokens, place = pair_tokens(first, second, self._bert)
        return PairSample(tokens, place, label)

    def _trim(self, begin: int, end: int) -> int:
        """Return where the text of ``begin..end`` ends without end-of-document tokens."""
        while end > begin and int(self._tokens[end - 1]) in self._ends:  # type: ignore[call-overload]
            end -= 1
        return end

    def _other(self, begin: int, drawn: float) -> int:
        """Return a random chunk of another document than the one that token ``begin`` is in."""
        document = int(np.searchsorted(self._documents, begin, side="right"))
        own = self._documents[document - 1 : document + 1]
        low, high = np.searchsorted(self._chunks, own).tolist()
        other = int(drawn * (self.num_chunks - (high - low)))
        return other if other < low else other + high - low

    def _random_text(self, chunk: int, drawn: float, wanted: int, used: int) -> IntArray:
        """Return text that begins at a random sentence of ``chunk``.

        It ends with the sentence, or with the document, whose end comes nearest to ``wanted``
        tokens: the text that it replaces is as long, so that neither the length of a row nor a
        broken sentence tells the label. Sentences are preferred that fit beside ``used`` tokens
        and have so much text behind them; one is cut only if none of the chunk fits.
        """
        room = self._limit - used
        begin = int(self._chunks[chunk])
        bounds = self._bounds(begin, self._trim(begin, int(self._chunks[chunk + 1])))
        if len(bounds) < 2:
            return self._tokens[:0].astype(np.int64)
        document = int(np.searchsorted(self._documents, begin, side="right"))
        stop = self._trim(begin, int(self._documents[document]))
        starts = bounds[:-1]
        fitting = starts[np.diff(bounds) <= room]
        starts = fitting if len(fitting) else starts
        enough = starts[stop - starts >= wanted]
        starts = enough if len(enough) else starts[:1]
        begin = int(starts[int(drawn * len(starts))])
        # No more than what fits and one sentence are looked at: the document may be long.
        ends = self._bounds(begin, min(stop, begin + room + 1))[1:]
        ends = ends[ends - begin <= room] if stop - begin > room else ends
        if len(ends):
            end = int(ends[np.argmin(np.abs(ends - begin - wanted))])
        else:
            end = begin + room
        return self._tokens[begin:end].astype(np.int64)

    def _bounds(self, begin: int, end: int) -> IntArray:
        """Return ``begin``, where sentences begin between it and ``end``, and ``end``.

        The places differ: an empty sentence has none, and without text there is one.
        """
        low, high = np.searchsorted(self._sentences, (begin, end), side="right")
        bounds = self._sentences[low:high]
        return np.unique(np.concatenate(([begin], bounds[bounds < end], [end])))


class ShuffledPairs:
    """Endless training samples: chunk order and pairs are drawn anew for each epoch.

    Attributes:
        num_tokens: tokens in one epoch.
        epoch_samples: samples in one epoch.
    """

    def __init__(self, reader: PairReader) -> None:
        """Read from ``reader``."""
        self._reader = reader
        self.num_tokens = reader.num_tokens
        self.epoch_samples = float(reader.num_chunks)

    def __getitem__(self, index: int) -> PairSample:
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        epoch, place = divmod(index, self._reader.num_chunks)
        order = RandomOrder(self._reader.num_chunks, (self._reader.seed, epoch, _ORDER))
        return self._reader.read(order[place], index)


class SequentialPairs:
    """Validation samples in file order."""

    def __init__(self, reader: PairReader) -> None:
        """Read from ``reader``."""
        self._reader = reader

    def __len__(self) -> int:
        return self._reader.num_chunks

    def __getitem__(self, index: int) -> PairSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: the set has {len(self)} samples")
        return self._reader.read(index, index)
