import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.masking import Masker, MaskingOptions, masking_random
from ds_engine.data.objective import SpecialIds
from ds_engine.errors import ConfigError, DataError

VOCAB = 50
PAD, CLS, SEP, MASK, EOD = 0, 1, 2, 3, 4
CONTINUES = np.arange(VOCAB) % 3 == 0
IDS = SpecialIds(
    pad=PAD, cls=CLS, sep=SEP, mask=MASK, special=frozenset({EOD}), continues_word=CONTINUES
)
BIG = 200_000


def masker(**options):
    return Masker(IDS, vocab_size=VOCAB, options=MaskingOptions(**options))


def words_of(tokens, maskable, boundaries):
    """The word number of each token, -1 where none may be masked; written as a plain loop."""
    numbers, word = [], -1
    inside = False
    for token, may, boundary in zip(tokens, maskable, boundaries, strict=True):
        if not may or token <= EOD:
            numbers.append(-1)
            inside = False
            continue
        if not inside or boundary or not CONTINUES[token]:
            word += 1
        inside = True
        numbers.append(word)
    return np.array(numbers)


rows = st.lists(
    st.tuples(st.integers(0, VOCAB - 1), st.booleans(), st.booleans()), min_size=1, max_size=60
)


@given(
    rows,
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from([0.01, 0.15, 0.5, 1.0]),
    st.integers(0, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_what_is_masked(row, whole_word, max_ngram, probability, number):
    tokens, maskable, boundaries = (np.array(part) for part in zip(*row, strict=True))
    given_tokens = tokens.copy()
    mask = masker(whole_word=whole_word, max_ngram=max_ngram, mask_probability=probability)
    masked = mask(tokens, maskable, random=masking_random(5, number), boundaries=boundaries)
    again = mask(tokens, maskable, random=masking_random(5, number), boundaries=boundaries)
    assert (masked.tokens == again.tokens).all() and (masked.mask == again.mask).all()

    assert (tokens == given_tokens).all() and (masked.labels == tokens).all()
    may = maskable & (tokens > EOD)
    assert not masked.mask[~may].any()
    assert (masked.tokens[~masked.mask] == tokens[~masked.mask]).all()
    changed = masked.tokens[masked.mask]
    assert ((changed == MASK) | (changed > EOD)).all()

    words = words_of(tokens, maskable, boundaries)
    chosen = int(masked.mask.sum())
    budget = max(1, int(probability * may.sum() + 0.5)) if may.any() else 0
    longest = max(np.bincount(words[words >= 0]), default=0)
    if whole_word:
        for word in range(words.max() + 1):
            assert len(set(masked.mask[words == word].tolist())) == 1
        assert budget - longest < chosen < budget + longest or chosen == budget
        assert bool(chosen) == bool(budget)
    else:
        assert chosen == budget


def test_shares_are_those_of_the_paper():
    tokens = np.random.default_rng(0).integers(EOD + 1, VOCAB, BIG)
    masked = masker()(tokens, np.ones(BIG, bool), random=masking_random(1, 2))
    chosen = int(masked.mask.sum())
    assert chosen == round(0.15 * BIG)
    became = masked.tokens[masked.mask]
    ordinary = VOCAB - EOD - 1
    kept = became == masked.labels[masked.mask]
    # A random word is the same word once in `ordinary` draws.
    for share, found in (
        (0.8, (became == MASK).sum()),
        (0.1 * (1 - 1 / ordinary), ((became != MASK) & ~kept).sum()),
        (0.1 + 0.1 / ordinary, kept.sum()),
    ):
        assert abs(found - share * chosen) < 4 * np.sqrt(chosen * share * (1 - share))
    drawn = became[(became != MASK) & ~kept]
    counts = np.bincount(drawn, minlength=VOCAB)
    assert not counts[: EOD + 1].any()
    expected = len(drawn) / ordinary
    assert (np.abs(counts[EOD + 1 :] - expected) < 5 * np.sqrt(expected)).all()


def test_other_shares_are_kept():
    tokens = np.full(BIG, 7)
    whole = np.ones(BIG, bool)
    none = masker(mask_token_share=0.0, random_token_share=0.0)
    assert (none(tokens, whole, random=masking_random(0, 0)).tokens == 7).all()
    all_masked = masker(mask_token_share=1.0, random_token_share=0.0, mask_probability=1.0)
    assert (all_masked(tokens, whole, random=masking_random(0, 0)).tokens == MASK).all()


def test_every_token_is_equally_likely():
    """Also in short rows, and whole words whatever their length (so no bias for short words)."""
    # words of 1, 4, 2, 1, 1, 3, 1, 1 tokens
    tokens = np.array([5, 5, 6, 6, 6, 5, 6, 5, 5, 5, 6, 6, 5, 5])
    draws = 3000
    for options in ({}, {"whole_word": True}):
        mask = masker(mask_probability=3 / 14, **options)
        counts = np.zeros(len(tokens))
        for number in range(draws):
            counts += mask(tokens, np.ones(14, bool), random=masking_random(3, number)).mask
        expected = draws * 3 / 14
        # The four-token word is above the budget and yet taken when it is drawn first.
        assert abs(counts.mean() - expected) < 0.05 * expected
        assert counts.min() > 0.7 * expected, (options, counts / draws)
        if not options:
            assert np.abs(counts - expected).max() < 4 * np.sqrt(expected)


@pytest.mark.parametrize("whole_word", [False, True])
def test_spans_have_the_lengths_of_the_paper(whole_word):
    """With a small budget spans stand alone, so that their lengths can be read off the mask."""
    tokens = np.random.default_rng(1).integers(EOD + 1, VOCAB, BIG)
    mask = masker(max_ngram=3, mask_probability=0.01, whole_word=whole_word)
    masked = mask(tokens, np.ones(BIG, bool), random=masking_random(2, 0)).mask
    words = words_of(tokens, np.ones(BIG, bool), np.zeros(BIG, bool))
    chosen = words[masked] if whole_word else np.flatnonzero(masked)
    chosen = np.unique(chosen)
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
    lengths = np.bincount([min(len(run), 4) for run in runs], minlength=5)
    assert lengths[4] < 0.1 * len(runs)  # two spans side by side
    for length, share in ((1, 6 / 11), (2, 3 / 11), (3, 2 / 11)):
        assert abs(lengths[length] / len(runs) - share) < 0.05


def test_spans_stop_at_boundaries_and_special_ids():
    tokens = np.array([5, 7, SEP, 8, 10, 11, 13] * 20)
    boundaries = np.zeros(len(tokens), bool)
    boundaries[5::7] = True  # before 11
    mask = masker(max_ngram=8, mask_probability=0.01)
    for number in range(200):
        chosen = np.flatnonzero(
            mask(tokens, tokens != 0, random=masking_random(1, number), boundaries=boundaries).mask
        )
        assert 1 <= len(chosen) <= 2
        parts = np.cumsum(boundaries | (tokens == SEP))[chosen]
        assert len(set(parts.tolist())) == 1, chosen


def test_masks_differ_from_sample_to_sample():
    tokens = np.full(64, 7)
    whole = np.ones(64, bool)
    first, second, other = (
        masker()(tokens, whole, random=masking_random(*key)).mask
        for key in ((1, 0), (1, 1), (2, 0))
    )
    assert (first != second).any() and (first != other).any()


def test_rows_without_words_stay():
    for ids in ([], [PAD, CLS, SEP, EOD]):
        tokens = np.array(ids, dtype=np.int64)
        masked = masker()(tokens, np.ones(len(tokens), bool), random=masking_random(0, 0))
        assert masked.tokens.tolist() == tokens.tolist() and not masked.mask.any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask_probability": 0.0}, "mask_probability = 0.0"),
        ({"mask_probability": float("nan")}, "mask_probability"),
        ({"mask_token_share": 0.95}, "more than 1"),
        ({"random_token_share": -0.1}, "random_token_share"),
        ({"max_ngram": 0}, "max_ngram = 0"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        MaskingOptions(**options)


def test_unusable_tokenizers_are_refused():
    plain = MaskingOptions()
    with pytest.raises(ConfigError, match=r"no mask token.*wordpiece"):
        Masker(SpecialIds(pad=0), vocab_size=9, options=plain)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        Masker(SpecialIds(mask=9), vocab_size=9, options=plain)
    with pytest.raises(ConfigError, match="nothing to mask"):
        Masker(SpecialIds(mask=0), vocab_size=1, options=plain)
    for continues in (None, np.zeros(8, bool)):
        with pytest.raises(ConfigError, match="whole_word"):
            Masker(
                SpecialIds(mask=0, continues_word=continues),
                vocab_size=9,
                options=MaskingOptions(whole_word=True),
            )
    with pytest.raises(DataError, match="vocabulary"):
        masker()(np.array([VOCAB]), np.ones(1, bool), random=masking_random(0, 0))
