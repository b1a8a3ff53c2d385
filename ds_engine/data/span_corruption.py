"""T5's objective: spans of the text are removed from the input and are what the decoder predicts.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
(2020), section 3.1.4 and the recipe published with it: of ``n`` tokens ``round(n * density)`` are
removed in ``round(removed / mean)`` spans of random lengths, with random lengths of text between
them. Text and removed spans take turns and the text comes first, so that an example with a single
span always loses its end. With the sentinels <0>, <1> the text ``a b c d e f`` may become

    inputs   a b <0> e <1> </s>
    targets  <0> c d <1> f </s>

Packing and what happens to end-of-document ids: see ``denoising``.

Shapes: ``K`` examples in a row, ``N`` tokens of them all, ``P`` spans in them all.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_engine.data.denoising import Denoising, Noise, Spans, Words, check_density
from ds_engine.data.packing import IntArray
from ds_engine.errors import ConfigError


def noise_counts(
    lengths: IntArray, noise_density: float, mean_span_length: float
) -> tuple[IntArray, IntArray]:
    """Return (K,) tokens to remove of examples of ``lengths``, and in how many spans each.

    An example of one token loses it. One without tokens has no span.
    """
    removed = np.rint(lengths * noise_density).astype(np.int64)
    removed = np.clip(removed, 1, np.maximum(lengths - 1, 1))
    spans = np.maximum(np.rint(removed / mean_span_length).astype(np.int64), 1)
    spans = np.minimum(spans, np.minimum(removed, np.maximum(lengths - removed, 1)))
    return np.where(lengths > 0, removed, 0), np.where(lengths > 0, spans, 0)


def random_parts(sizes: IntArray, parts: IntArray, words: Words) -> IntArray:
    """Return the lengths of random parts: group ``g`` is cut into ``parts[g]`` of at least 1.

    All ways of cutting a group are equally likely: of its tokens but the first, ``parts - 1`` are
    chosen (those with the smallest random words) to begin a part.

    Args:
        sizes: (G,) tokens of each group; empty groups give no part.
        parts: (G,) number of parts, 1..sizes.
        words: (>= sum of sizes) random bits.
    """
    total = int(sizes.sum())
    bits = np.uint64(len(sizes).bit_length())
    group = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes) << (np.uint64(64) - bits)
    first = np.cumsum(sizes) - sizes
    words = words[:total] >> bits
    words[first[sizes > 0]] = 0
    order = np.argsort(group | words, kind="stable")  # groups stay in place: sorted within
    rank = np.arange(total) - np.repeat(first, sizes)
    begins = np.sort(order[rank < np.repeat(parts, sizes)])
    return np.diff(begins, append=total)


@dataclass(frozen=True)
class SpanNoise:
    """Removes spans, for which sentinels stand.

    Attributes:
        noise_density: share of the tokens to remove.
        mean_span_length: mean tokens of a removed span.
        mode_id: begins the inputs of each example (UL2); None: nothing does.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0
    mode_id: int | None = None

    def __post_init__(self) -> None:
        check_density(self.noise_density)
        if not self.mean_span_length >= 1:
            raise ConfigError(
                f"mean_span_length = {self.mean_span_length} must be at least 1 token; T5 uses 3"
            )

    @property
    def has_sentinels(self) -> bool:
        """Always."""
        return True

    def costs(self, lengths: IntArray) -> IntArray:
        """Return (2, K): tokens, sentinels, EOS and mode of both sides; exact."""
        removed, spans = noise_counts(lengths, self.noise_density, self.mean_span_length)
        mode = int(self.mode_id is not None)
        return np.stack([lengths - removed + spans + 1 + mode, removed + spans + 1])

    def split(self, lengths: IntArray, words: Words) -> Spans:
        """Draw the spans."""
        removed, spans = noise_counts(lengths, self.noise_density, self.mean_span_length)
        kept = lengths - removed
        parts = random_parts(np.concatenate([kept, removed]), np.tile(spans, 2), words)
        examples = np.repeat(np.arange(len(lengths)), spans)
        num_spans = len(examples)
        kept_parts = np.zeros(num_spans, dtype=np.int64)
        kept_parts[(kept > 0)[examples]] = parts[: len(parts) - num_spans]
        return Spans(kept_parts, parts[len(parts) - num_spans :], examples)


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(Denoising):
    """Predict removed spans (T5). See ``Denoising`` for the other attributes.

    Attributes:
        noise_density: share of the tokens to remove.
        mean_span_length: mean tokens of a removed span.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0

    @cached_property
    def noises(self) -> tuple[Noise, ...]:
        """The one way to split."""
        return (SpanNoise(self.noise_density, self.mean_span_length),)
