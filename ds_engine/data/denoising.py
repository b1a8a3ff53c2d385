"""What objectives share that remove text from the encoder's input and predict it in the decoder.

A row starts from ``L`` raw tokens of the stream of documents. Each document in it is an example
(``packing`` joins short ones where the row would overflow). A ``Noise`` splits the example into
spans that are kept and spans that are removed; the inputs are the kept spans, the targets the
removed ones, both ended by EOS and with a sentinel for each removed span if the noise has them.

Nothing of the text is lost: putting the spans of the targets in the place of the sentinels gives
each example back, but for one thing. An end-of-document id (``ids.eos`` or ``drop_final``) that is
the last token of an example is left out, since the example's own EOS says the same; inside an
example (documents that were joined, or without isolation) it stays. An example of this id alone has
nothing but EOS on both sides.

Shapes: ``L`` raw tokens of a row, ``S``, ``T`` sequence lengths of encoder and decoder, ``K``
examples in a row, ``N`` tokens of them all, ``P`` spans in them all.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.objective import Row, SpecialIds
from ds_engine.data.packing import (
    BoolArray,
    IntArray,
    document_lengths,
    encoder_decoder_row,
    join_until_fits,
    longest_example,
    slack,
)
from ds_engine.data.samples import Sample, SequentialSamples, ShuffledSamples
from ds_engine.errors import ConfigError

Words = npt.NDArray[np.uint64]

_PURPOSE = 0x4E4F4953  # no number of an epoch comes near it, so no other random stream is repeated


class Spans(NamedTuple):
    """How examples are split: kept and removed spans take turns, a kept one first; all ``(P,)``.

    Attributes:
        kept: tokens of each kept span; 0 only for the first span of an example.
        removed: tokens of each removed span, behind the kept one.
        examples: number of the example that the two belong to, not decreasing.
    """

    kept: IntArray
    removed: IntArray
    examples: IntArray


class Noise(Protocol):
    """A way to split examples."""

    @property
    def mode_id(self) -> int | None:
        """Id that begins the inputs of each example; None: no such id."""
        ...

    @property
    def has_sentinels(self) -> bool:
        """Whether a sentinel stands for each removed span."""
        ...

    def costs(self, lengths: IntArray) -> IntArray:
        """Return (2, K): the most room that examples of ``lengths`` take on both sides."""
        ...

    def split(self, lengths: IntArray, words: Words) -> Spans:
        """Split examples of ``lengths``; ``words`` (>= N and >= K) are random bits."""
        ...


def check_density(noise_density: float) -> None:
    """Refuse a share of removed tokens that is not strictly between 0 and 1.

    Raises:
        ConfigError: it is not.
    """
    if not 0 < noise_density < 1:
        raise ConfigError(
            f"noise_density = {noise_density} must be between 0 and 1, both excluded: the share "
            "of the tokens that the decoder predicts; T5 uses 0.15"
        )


def raw_length(
    encoder_length: int, decoder_length: int, noise: Noise, *, isolate_documents: bool = True
) -> int:
    """Return ``L``: how many raw tokens make a row.

    The most that fit as one example into both lengths, less ``packing.slack`` on each side (8
    tokens, or a sixteenth of a length below 128) for the EOS and sentinels of further documents in
    the row; without isolation a row is one example and needs no slack. Negative if nothing fits.
    """
    limits = [encoder_length, decoder_length]
    if isolate_documents:
        limits = [length - slack(length) for length in limits]
    # Each token is on one side at least, so more than this cannot fit.
    return longest_example(noise.costs(np.arange(sum(limits) + 2)), limits)


@dataclass(frozen=True, kw_only=True)
class Denoising(ABC):
    """What objectives share that predict removed text. Rows are those of ``encoder_decoder_row``.

    Attributes:
        encoder_length: ``S``.
        decoder_length: ``T``.
        ids: needs ``pad``, ``eos``, ``start`` and, if any noise has them, sentinels.
        seed: what is removed from row ``number`` is drawn from (seed, number).
        isolate_documents: each document in a row is an example of its own; short ones are joined
            where the row would overflow. Otherwise a row is one example.
        drop_final: a second id, beside ``ids.eos``, that is left out at the end of an example: the
            end-of-document id of the data if that is another one.
    """

    encoder_length: int
    decoder_length: int
    ids: SpecialIds
    seed: int
    isolate_documents: bool = True
    drop_final: int | None = None

    def __post_init__(self) -> None:
        """Check the ids and lengths.

        Raises:
            ConfigError: an id is missing, the lengths are too small or sentinels too few.
        """
        self.ids.require("pad", kind="t5")
        self.ids.require("eos", kind="t5")
        self.ids.require("start", kind="t5")
        if self.raw_length < 2:
            raise ConfigError(
                f"data.sequence_length = {self.encoder_length} and data.decoder_sequence_length = "
                f"{self.decoder_length} hold no example of two tokens with its EOS"
                f"{' and sentinels' if self._need_sentinels else ''}; use longer ones, such as 512 "
                "and 128"
            )
        for noise in self.noises:
            if noise.has_sentinels:
                self._check_sentinels(noise)

    @property
    @abstractmethod
    def noises(self) -> tuple[Noise, ...]:
        """The ways to split, one of which is chosen for each row."""

    def choose(self, word: int) -> int:
        """Return which of ``noises`` a row has, from 64 random bits."""
        return 0

    @cached_property
    def raw_length(self) -> int:
        """``L``: raw tokens of a row, the same for all ``noises``."""
        return min(
            raw_length(
                self.encoder_length,
                self.decoder_length,
                noise,
                isolate_documents=self.isolate_documents,
            )
            for noise in self.noises
        )

    def samples(self, data: IndexedDataset, *, seed: int) -> ShuffledSamples:
        """Pieces of ``L`` tokens of the shuffled stream of documents, each token once an epoch."""
        return ShuffledSamples(data, sequence_length=self.raw_length, seed=seed, overlap=0)

    def validation(self, data: IndexedDataset) -> SequentialSamples:
        """Pieces of ``L`` tokens in file order."""
        return SequentialSamples(data, sequence_length=self.raw_length, overlap=0)

    def empty(self) -> Sample:
        """A sample without tokens."""
        pad = self.ids.require("pad", kind="t5")
        return Sample(np.full(self.raw_length, pad, dtype=np.int64), np.zeros(0, np.int64), 0)

    def __call__(self, sample: Sample, number: int) -> Row:
        """Split the text of a sample; what is removed depends on ``number``.

        Raises:
            ValueError: the sample holds more than ``L`` tokens.
        """
        if sample.num_valid > self.raw_length:
            raise ValueError(f"{sample.num_valid} raw tokens in a row of {self.raw_length}")
        key = np.random.SeedSequence((self.seed, _PURPOSE, number))
        words = np.random.Philox(key).random_raw(self.raw_length + 1)
        chosen = self.choose(int(words[0]))
        noise = self.noises[chosen]
        text, lengths = self._examples(sample, self._costs[chosen])
        spans = noise.split(lengths, words[1:])
        sides = np.stack([spans.kept, spans.removed], axis=1).ravel()
        removed = np.repeat(np.arange(len(sides)) % 2 == 1, sides)
        sentinels = None
        if noise.has_sentinels:
            counts = np.bincount(spans.examples, minlength=len(lengths))
            first = np.cumsum(counts) - counts
            rank = np.arange(len(spans.examples)) - first[spans.examples]
            sentinels = self._sentinels[rank]
        return encoder_decoder_row(
            self._side(text[~removed], spans.kept, spans, sentinels, len(lengths), noise.mode_id),
            self._side(text[removed], spans.removed, spans, sentinels, len(lengths), None),
            encoder_length=self.encoder_length,
            decoder_length=self.decoder_length,
            pad=self.ids.require("pad", kind="t5"),
            start=self.ids.require("start", kind="t5"),
        )

    def _examples(self, sample: Sample, costs: IntArray) -> tuple[IntArray, IntArray]:
        """Return (N,) the text of all examples and (K,) how many tokens each has."""
        tokens = sample.tokens[: sample.num_valid]
        lengths = document_lengths(sample, isolate_documents=self.isolate_documents)
        lengths = join_until_fits(
            lengths,
            costs,
            (self.encoder_length, self.decoder_length),
            dropped=self._dropped(tokens, lengths).astype(np.int64),
        )
        dropped = self._dropped(tokens, lengths)
        if not dropped.any():
            return tokens, lengths
        text = np.ones(len(tokens), dtype=np.bool_)
        text[np.cumsum(lengths)[dropped] - 1] = False
        return tokens[text], lengths - dropped

    def _dropped(self, tokens: IntArray, lengths: IntArray) -> BoolArray:
        """Return (K,) whether the last token of each example is left out."""
        last = tokens[np.cumsum(lengths) - 1]
        dropped: BoolArray = last == self.ids.eos
        if self.drop_final is not None:
            dropped |= last == self.drop_final
        return dropped

    def _side(
        self,
        text: IntArray,
        parts: IntArray,
        spans: Spans,
        sentinels: IntArray | None,
        num_examples: int,
        mode_id: int | None,
    ) -> tuple[IntArray, IntArray]:
        """Put sentinels, EOS and mode between the tokens of the inputs or of the targets.

        Args:
            text: the tokens.
            parts: (P,) how many of them each span has: ``spans.kept`` (a sentinel follows each) or
                ``spans.removed`` (a sentinel precedes each).
            spans: the spans.
            sentinels: (P,) ids; None: no sentinels.
            num_examples: ``K``.
            mode_id: begins each example; None: nothing does.

        Returns:
            Ids of all examples and (K,) tokens of each.
        """
        front = int(mode_id is not None)
        lengths = np.bincount(spans.examples, weights=parts, minlength=num_examples)
        lengths = lengths.astype(np.int64) + 1 + front
        if sentinels is not None:
            lengths += np.bincount(spans.examples, minlength=num_examples)
        ends = np.cumsum(lengths)
        out = np.empty(int(lengths.sum()), dtype=np.int64)
        free = np.ones(len(out), dtype=np.bool_)
        out[ends - 1] = self.ids.require("eos", kind="t5")
        free[ends - 1] = False
        if mode_id is not None:
            out[ends - lengths] = mode_id
            free[ends - lengths] = False
        if sentinels is not None:
            before = np.cumsum(parts) + np.arange(len(parts)) + spans.examples * (1 + front) + front
            if parts is spans.removed:
                before -= parts
            out[before] = sentinels
            free[before] = False
        out[free] = text
        return out, lengths

    @cached_property
    def _costs(self) -> tuple[IntArray, ...]:
        lengths = np.arange(self.raw_length + 1)
        return tuple(noise.costs(lengths) for noise in self.noises)

    @cached_property
    def _sentinels(self) -> IntArray:
        return np.array(self.ids.sentinels, dtype=np.int64)

    @property
    def _need_sentinels(self) -> bool:
        return any(noise.has_sentinels for noise in self.noises)

    def _check_sentinels(self, noise: Noise) -> None:
        have = len(self.ids.sentinels)
        if not have:
            raise ConfigError(
                "the tokenizer has no sentinels (<extra_id_0>, <extra_id_1>, ...), which stand for "
                "removed spans; train one with `ds-engine tokenizer train --kind t5`, or name the "
                "pattern of yours in data.objective.special_tokens.sentinels"
            )
        words = np.zeros(self.raw_length, dtype=np.uint64)
        need = len(noise.split(np.array([self.raw_length]), words).examples)
        if need > have:
            raise ConfigError(
                f"a document of {self.raw_length} tokens, which is what data.sequence_length = "
                f"{self.encoder_length} and data.decoder_sequence_length = {self.decoder_length} "
                f"hold, is cut into {need} spans, but the tokenizer has only {have} sentinels; "
                "raise mean_span_length, lower noise_density or the lengths, or use a tokenizer "
                "with more sentinels (`ds-engine tokenizer train --kind t5`)"
            )
