"""Prefix language modelling, and UL2's mixture of it with several span corruptions.

Tay et al., "UL2: Unifying Language Learning Paradigms" (2022), section 3.1: regular denoising (R)
is T5's, extreme denoising (X) removes long spans or half of the text, sequential denoising (S)
removes the end of the text. Each row is given one denoiser, drawn from its number; a mode token at
the beginning of the inputs may say which kind it is.

Packing, lengths and what happens to end-of-document ids: see ``denoising``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ds_engine.data.denoising import Denoising, Noise, Spans, Words, check_density
from ds_engine.data.packing import IntArray
from ds_engine.data.span_corruption import SpanNoise
from ds_engine.errors import ConfigError


@dataclass(frozen=True)
class PrefixNoise:
    """Removes the end of the text: the inputs are a prefix, the targets the rest; no sentinels.

    The number of removed tokens is uniform around ``noise_density * n``: from 1 to twice that for
    densities up to a half, so that 0.5 makes all split points equally likely; above a half it is
    the prefix that has 1 to twice its mean. Both sides have at least one token, but an example of
    one token is all target.

    Attributes:
        noise_density: mean share of the text that is predicted.
        mode_id: begins the inputs of each example (UL2); None: nothing does.
    """

    noise_density: float = 0.5
    mode_id: int | None = None

    def __post_init__(self) -> None:
        check_density(self.noise_density)

    @property
    def has_sentinels(self) -> bool:
        """Never."""
        return False

    def costs(self, lengths: IntArray) -> IntArray:
        """Return (2, K): the longest prefix and the longest rest with EOS, and the mode."""
        low, high = self._bounds(lengths)
        mode = int(self.mode_id is not None)
        return np.stack([lengths - low + 1 + mode, high + 1])

    def split(self, lengths: IntArray, words: Words) -> Spans:
        """Draw the split points."""
        low, high = self._bounds(lengths)
        choices = (high - low + 1).astype(np.uint64)
        shift = np.uint64(32)  # the upper half of a word, scaled to 0..choices-1
        drawn = (words[: len(lengths)] >> shift) * choices >> shift
        removed = low + drawn.astype(np.int64)
        return Spans(lengths - removed, removed, np.arange(len(lengths)))

    def _bounds(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Return (K,) the least and the most tokens to remove."""
        rare = min(self.noise_density, 1 - self.noise_density)
        most = np.rint(lengths * 2 * rare).astype(np.int64) - 1
        most = np.clip(most, 1, np.maximum(lengths - 1, 1))
        low, high = np.ones_like(most), most
        if self.noise_density > 0.5:
            low, high = lengths - most, lengths - 1
        single = lengths <= 1
        return np.where(single, lengths, low), np.where(single, lengths, high)


@dataclass(frozen=True, kw_only=True)
class PrefixLM(Denoising):
    """Predict the rest of each document from its beginning, cut at a random point.

    Since the cut may fall anywhere, a row has no more raw tokens than fit on either side: equal
    lengths of encoder and decoder waste least. See ``Denoising`` for the attributes.
    """

    @cached_property
    def noises(self) -> tuple[Noise, ...]:
        """The one way to split."""
        return (PrefixNoise(),)


@dataclass(frozen=True, kw_only=True)
class Denoiser:
    """One part of a mixture.

    Attributes:
        type: "span" (T5's) or "prefix" (the end of the text is predicted).
        noise_density: share of the text to predict; of a prefix denoiser the mean share.
        mean_span_length: mean tokens of a removed span; not read by a prefix denoiser.
        weight: relative frequency of its rows.
        mode_id: id that begins each example's inputs; None: nothing does.
    """

    type: Literal["span", "prefix"]
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    weight: float = 1.0
    mode_id: int | None = None

    def __post_init__(self) -> None:
        if self.type not in ("span", "prefix"):
            raise ConfigError(f'denoiser type = "{self.type}" must be "span" or "prefix"')
        if not 0 < self.weight < float("inf"):
            raise ConfigError(
                f"denoiser weight = {self.weight} must be above 0; leave a denoiser out to switch "
                "it off"
            )
        _ = self.noise  # checks the density and the span

    @property
    def noise(self) -> Noise:
        """How it splits examples."""
        if self.type == "prefix":
            return PrefixNoise(self.noise_density, self.mode_id)
        return SpanNoise(self.noise_density, self.mean_span_length, self.mode_id)


UL2_DENOISERS = (
    Denoiser(type="span", noise_density=0.15, mean_span_length=3.0),  # R
    Denoiser(type="span", noise_density=0.15, mean_span_length=8.0),
    Denoiser(type="prefix", noise_density=0.25),  # S
    Denoiser(type="span", noise_density=0.5, mean_span_length=3.0),  # X
    Denoiser(type="span", noise_density=0.5, mean_span_length=8.0),
    Denoiser(type="span", noise_density=0.15, mean_span_length=64.0),
    Denoiser(type="span", noise_density=0.5, mean_span_length=64.0),
)
"""The seven of the paper's table 1, equally frequent, without mode tokens."""


@dataclass(frozen=True, kw_only=True)
class MixtureOfDenoisers(Denoising):
    """Each row has one of several denoisers, drawn by weight from (seed, number).

    ``L`` is the least of what the denoisers hold. See ``Denoising`` for the other attributes.

    Attributes:
        denoisers: the parts; at least one.
    """

    denoisers: tuple[Denoiser, ...] = UL2_DENOISERS

    def __post_init__(self) -> None:
        """Check the parts, ids and lengths.

        Raises:
            ConfigError: no part, or as ``Denoising``.
        """
        if not self.denoisers:
            raise ConfigError("data.objective.denoisers is empty; list at least one denoiser")
        super().__post_init__()

    @cached_property
    def noises(self) -> tuple[Noise, ...]:
        """The way to split of each denoiser."""
        return tuple(denoiser.noise for denoiser in self.denoisers)

    def choose(self, word: int) -> int:
        """Return the denoiser whose share of 0..1 the random bits fall into."""
        point = (word >> 11) * 2.0**-53  # 53 bits, all that a float holds; below 1
        return int(np.searchsorted(self._thresholds, point, side="right"))

    @cached_property
    def _thresholds(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The upper end of each share but the last, which is 1."""
        ends = np.cumsum([denoiser.weight for denoiser in self.denoisers])
        return np.asarray(ends[:-1] / ends[-1])
