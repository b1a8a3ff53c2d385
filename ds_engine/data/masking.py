"""Masking of tokens for BERT's masked language-model objective.

Of a row's words a share (15 %) is chosen; of the chosen tokens 80 % become [MASK], 10 % a random
word and 10 % stay (Devlin et al., "BERT", 2019, section 3.1). What is drawn together is a token, a
whole word, or a span of several of them with p(k) proportional to 1/k (Lan et al., "ALBERT", 2020,
section 4.1).

Shapes: ``S`` tokens, ``M`` tokens that may be masked, ``U`` units (tokens or whole words), ``V``
words of the vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_engine.data.objective import SpecialIds
from ds_engine.errors import ConfigError, DataError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_PURPOSE = 0x4D41534B  # keeps masks apart from every other random stream of the seed


@dataclass(frozen=True, slots=True)
class MaskingOptions:
    """How tokens are chosen and what becomes of them.

    Attributes:
        mask_probability: share of the maskable tokens that are chosen, above 0 and at most 1.
        mask_token_share: share of the chosen tokens that become [MASK].
        random_token_share: share of the chosen tokens that become a random word; the rest stays.
        whole_word: choose words whole, by ``SpecialIds.continues_word``, instead of tokens.
        max_ngram: longest span of consecutive tokens (or words) that is chosen together.
    """

    mask_probability: float = 0.15
    mask_token_share: float = 0.8
    random_token_share: float = 0.1
    whole_word: bool = False
    max_ngram: int = 1

    def __post_init__(self) -> None:
        """Check the shares.

        Raises:
            ConfigError: a value out of range.
        """
        if not 0 < self.mask_probability <= 1:
            raise ConfigError(
                f"mask_probability = {self.mask_probability} must be above 0 and at most 1; 0.15 "
                "is usual"
            )
        shares = (self.mask_token_share, self.random_token_share)
        if not (min(shares) >= 0 and sum(shares) <= 1 + 1e-9):
            raise ConfigError(
                f"mask_token_share = {shares[0]} and random_token_share = {shares[1]} must not be "
                "negative nor add up to more than 1; 0.8 and 0.1 are usual"
            )
        if self.max_ngram < 1:
            raise ConfigError(f"max_ngram = {self.max_ngram} must be at least 1 (no spans)")


class Masked(NamedTuple):
    """A masked row; every array is (S,).

    Attributes:
        tokens: what the model reads.
        labels: the tokens as they were, at every place.
        mask: where a token was chosen, whatever became of it: there the label counts.
    """

    tokens: IntArray
    labels: IntArray
    mask: BoolArray


def masking_random(seed: int, number: int) -> np.random.Philox:
    """Return the random words that mask sample ``number`` of a run.

    Only their raw output is used, which no release of numpy may change.
    """
    return np.random.Philox(np.random.SeedSequence((seed, _PURPOSE, number)))


def uniform(random: np.random.Philox, size: int) -> npt.NDArray[np.float64]:
    """Return (size,) numbers in [0, 1), of 53 random bits each."""
    return (random.random_raw(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Masker:
    """Chooses and masks the tokens of a row.

    The budget is ``max(1, round(mask_probability * M))``: so many tokens are chosen, exactly, when
    they are drawn one by one. Whole words are drawn until the budget is reached; one that would go
    beyond it is taken with probability (what is left) / (its length) and ends the choice. So the
    number is the budget on average, never above it by a whole word, and long words are not left
    out. The first word drawn is always taken, so that a row has something to predict.

    Spans end at a place that is not maskable, at a special id and at a boundary; one that begins
    nearer to such an end, or reaches the budget, is shorter than drawn. Spans do not overlap. What
    becomes of a chosen token is drawn token by token, also inside a word or span.
    """

    def __init__(self, ids: SpecialIds, *, vocab_size: int, options: MaskingOptions) -> None:
        """Prepare the tables of the vocabulary.

        Args:
            ids: the special tokens; none of them is ever masked or drawn as a random word.
            vocab_size: ``V``, the tokenizer's words.
            options: how to mask.

        Raises:
            ConfigError: no mask token, an id outside the vocabulary, no ordinary word, or whole
                words from a tokenizer that does not say which tokens continue a word.
        """
        self._mask_id = ids.require("mask", kind="wordpiece")
        named = (ids.pad, ids.eos, ids.start, ids.mask, ids.cls, ids.sep)
        special = {*ids.special, *ids.sentinels, *(one for one in named if one is not None)}
        outside = sorted(one for one in special if not 0 <= one < vocab_size)
        if outside:
            raise ConfigError(
                f"special token {outside[0]} is outside the vocabulary, 0..{vocab_size - 1}; use "
                "the tokenizer that the vocabulary size belongs to"
            )
        self._special = np.zeros(vocab_size, dtype=np.bool_)
        self._special[sorted(special)] = True
        self._ordinary = np.flatnonzero(~self._special)
        if not len(self._ordinary):
            raise ConfigError(f"all {vocab_size} words are special tokens: nothing to mask")
        self._begins_word: BoolArray | None = None
        if options.whole_word:
            if ids.continues_word is None or ids.continues_word.shape != (vocab_size,):
                raise ConfigError(
                    "whole_word = true needs a tokenizer that marks the tokens inside a word (as "
                    "wordpiece's ##ing does), one mark for each of its "
                    f"{vocab_size} words; set whole_word to false or use "
                    "ds-engine tokenizer train --kind wordpiece"
                )
            self._begins_word = ~ids.continues_word
        self._options = options
        weights = 1.0 / np.arange(1, options.max_ngram + 1)
        self._lengths = np.cumsum(weights) / weights.sum()
        self._lengths[-1] = 1.0  # whatever rounding made of it

    def __call__(
        self,
        tokens: IntArray,
        maskable: BoolArray,
        *,
        random: np.random.Philox,
        boundaries: BoolArray | None = None,
    ) -> Masked:
        """Mask a row.

        Args:
            tokens: (S,) ids.
            maskable: (S,) where a token may be chosen; special ids are not, whatever it says.
            random: drawn from; ``masking_random`` makes it.
            boundaries: (S,) where a document or part begins that no word or span may run into.

        Raises:
            DataError: an id outside the vocabulary.
        """
        if len(tokens) and (int(tokens.max()) >= len(self._special) or int(tokens.min()) < 0):
            raise DataError(
                f"token ids {int(tokens.min())}..{int(tokens.max())} are not all in the "
                f"tokenizer's vocabulary, 0..{len(self._special) - 1}; tokenize the data with the "
                "run's tokenizer"
            )
        mask = np.zeros(len(tokens), dtype=np.bool_)
        places = np.flatnonzero(maskable & ~self._special[tokens])
        if not len(places):
            return Masked(tokens.copy(), tokens, mask)
        budget = max(1, int(self._options.mask_probability * len(places) + 0.5))
        if self._begins_word is None and self._options.max_ngram == 1:
            chosen = places[_order(random, len(places))[:budget]]
            chosen.sort()
        else:
            chosen = places[self._choose_units(tokens, places, budget, random, boundaries)]
        mask[chosen] = True
        return Masked(self._replace(tokens, chosen, random), tokens, mask)

    def _replace(self, tokens: IntArray, chosen: IntArray, random: np.random.Philox) -> IntArray:
        """Return ``tokens`` with most of the ``chosen`` places overwritten."""
        masked = tokens.copy()
        fate, word = uniform(random, 2 * len(chosen)).reshape(2, -1)
        share = self._options.mask_token_share
        masked[chosen[fate < share]] = self._mask_id
        drawn = (fate >= share) & (fate < share + self._options.random_token_share)
        masked[chosen[drawn]] = self._ordinary[(word[drawn] * len(self._ordinary)).astype(np.int64)]
        return masked

    def _choose_units(
        self,
        tokens: IntArray,
        places: IntArray,
        budget: int,
        random: np.random.Philox,
        boundaries: BoolArray | None,
    ) -> BoolArray:
        """Return (M,) which of ``places`` are chosen, as whole units."""
        stretch = np.ones(len(places), dtype=np.bool_)  # where a run of maskable tokens begins
        np.not_equal(places[1:], places[:-1] + 1, out=stretch[1:])
        if boundaries is not None:
            stretch |= boundaries[places]
        begins = np.ones_like(stretch)
        if self._begins_word is not None:
            begins = stretch | self._begins_word[tokens[places]]
        first = np.append(np.flatnonzero(begins), len(places))
        sizes = np.diff(first)
        sequence = _order(random, len(sizes))
        if self._options.max_ngram > 1:
            sequence = self._spans(sequence, stretch[first[:-1]], first, budget, random)
        total = np.cumsum(sizes[sequence])
        fits = int(np.searchsorted(total, budget, side="right"))
        last = float(uniform(random, 1)[0])
        if fits < len(sequence):
            left = budget - (int(total[fits - 1]) if fits else 0)
            fits += not fits or last * int(sizes[sequence[fits]]) < left
        units = np.zeros(len(sizes), dtype=np.bool_)
        units[sequence[:fits]] = True
        return np.repeat(units, sizes)

    def _spans(
        self,
        order: IntArray,
        stretch: BoolArray,
        first: IntArray,
        budget: int,
        random: np.random.Philox,
    ) -> IntArray:
        """Return units in the order in which spans that start at units of ``order`` take them.

        Args:
            order: (U,) units as possible starts.
            stretch: (U,) units that no span may run into.
            first: (U+1,) first place of each unit, and the number of places.
            budget: tokens after which no more spans are made.
            random: draws the lengths.
        """
        size = len(order)
        drawn = np.searchsorted(self._lengths, uniform(random, size), side="right") + 1
        starts = np.append(np.flatnonzero(stretch), size)
        limit = np.repeat(starts[1:], np.diff(starts)).tolist()
        lengths, offsets = drawn.tolist(), first.tolist()
        taken = bytearray(size)
        sequence: list[int] = []
        covered = spans = 0
        possible: list[int] = order.tolist()
        # A start that is not free passes its length on to the next, lest long spans get rarer.
        for start in possible:
            end = min(start + lengths[spans], limit[start])
            if taken.find(1, start, end) >= 0:
                continue
            taken[start:end] = b"\1" * (end - start)
            sequence.extend(range(start, end))
            covered += offsets[end] - offsets[start]
            spans += 1
            if covered >= budget:
                break
        else:
            # A large budget may need the gaps too.
            sequence.extend(unit for unit in possible if not taken[unit])
        return np.array(sequence, dtype=np.int64)


def _order(random: np.random.Philox, size: int) -> IntArray:
    """Return a random order of ``0..size-1``."""
    return np.argsort(random.random_raw(size), kind="stable")
