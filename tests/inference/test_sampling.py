import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.errors import ConfigError, NumericsError
from ds_engine.inference.sampling import (
    GenerationSettings,
    choose,
    distribution,
    draw,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    row_generators,
)

WORDS = 12
logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=WORDS, max_size=WORDS).map(
    lambda row: torch.tensor([row])
)
batches = st.integers(0, 10**6).map(
    lambda seed: 3 * torch.randn(4, WORDS, generator=torch.Generator().manual_seed(seed))
)


def sample(**changes):
    return GenerationSettings(max_new_tokens=1, **{"temperature": 1.0, **changes})


def support(logits):
    return set(logits.isfinite().nonzero()[:, -1].tolist())


@given(logits=logit_rows, count=st.integers(1, WORDS + 3))
def test_top_k_keeps_exactly_k_words_and_none_that_is_less_likely(logits, count):
    kept = keep_top_k(logits, count)
    words = support(kept)
    assert len(words) == min(count, WORDS)
    assert torch.equal(kept[0, list(words)], logits[0, list(words)])
    left = [float(logits[0, w]) for w in range(WORDS) if w not in words]
    assert min(float(logits[0, w]) for w in words) >= max(left, default=-math.inf)


@given(logits=logit_rows, mass=st.floats(0.001, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(logits, mass):
    logits = logits.double()
    kept = keep_top_p(logits, mass)
    words = support(kept)
    probabilities = logits.softmax(-1)[0]
    inside = [float(probabilities[w]) for w in words]
    outside = [float(probabilities[w]) for w in range(WORDS) if w not in words]
    assert sum(inside) >= mass - 1e-12
    assert sum(inside) - min(inside) < mass + 1e-12  # one word fewer would not reach it
    assert min(inside) >= max(outside, default=0.0)
    assert torch.equal(kept[0, list(words)], logits[0, list(words)])


@given(logits=logit_rows)
def test_the_tiniest_mass_keeps_the_likeliest_word(logits):
    assert support(keep_top_p(logits.double(), 1e-300)) <= set(
        (logits[0] == logits.max()).nonzero()[:, 0].tolist()
    )
    assert len(support(keep_top_p(logits.double(), 1e-300))) == 1


@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.one_of(st.none(), st.integers(1, WORDS)),
    top_p=st.floats(0.05, 1.0),
    seed=st.integers(0, 1000),
)
def test_a_drawn_word_is_always_in_the_support(logits, temperature, top_k, top_p, seed):
    chosen = sample(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    probabilities = distribution(logits, chosen)
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-12)
    word = choose(logits, chosen, row_generators(seed, 1))
    assert probabilities[0, word] > 0


@given(logits=batches, temperature=st.sampled_from([1e-3, 1e-30, 5e-324]))
def test_low_temperatures_approach_greedy_choice_without_overflow(logits, temperature):
    gap = logits.topk(2).values
    logits = logits[(gap[:, 0] - gap[:, 1]) > 0.05]
    greedy = choose(logits, sample(temperature=0.0), row_generators(0, len(logits)))
    assert torch.equal(greedy, logits.argmax(-1))
    cold = choose(logits, sample(temperature=temperature), row_generators(0, len(logits)))
    assert torch.equal(cold, greedy)


@given(logits=batches)
def test_high_temperatures_approach_equal_chances(logits):
    probabilities = distribution(logits, sample(temperature=1e9))
    assert torch.allclose(probabilities, torch.full_like(probabilities, 1 / WORDS), atol=1e-6)


@given(logits=batches)
def test_top_k_of_one_is_greedy_at_any_temperature(logits):
    chosen = choose(logits, sample(temperature=5.0, top_k=1), row_generators(1, 4))
    assert torch.equal(chosen, logits.argmax(-1))


@given(logits=batches, seed=st.integers(0, 1000), keep=st.integers(1, 4))
def test_a_row_does_not_depend_on_its_neighbours(logits, seed, keep):
    whole = choose(logits, sample(top_p=0.9), row_generators(seed, 4))
    part = choose(logits[:keep], sample(top_p=0.9), row_generators(seed, keep))
    assert torch.equal(whole[:keep], part)


def test_the_seed_decides_and_rows_have_streams_of_their_own():
    logits = torch.zeros(6, 10_000)

    def words(seed):
        return choose(logits, sample(), row_generators(seed, 6)).tolist()

    assert words(1) == words(1)
    assert len(set(words(1))) == 6
    assert not set(words(1)) & set(words(2))


def test_each_choice_advances_a_stream():
    generators = row_generators(0, 1)
    words = [int(choose(torch.zeros(1, 10_000), sample(), generators)) for _ in range(5)]
    assert len(set(words)) == 5


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, -math.inf, 2.0, 0.5]])
    rows = 20_000
    words = draw(distribution(logits, sample()).expand(rows, -1), row_generators(0, rows))
    found = torch.bincount(words, minlength=5) / rows
    expected = logits.softmax(-1)[0]
    # Five standard deviations of a count.
    assert bool(((found - expected).abs() <= 5 * (expected / rows).sqrt()).all())


@pytest.mark.parametrize(
    ("number", "word"), [(0.0, 1), (0.25 - 2**-54, 1), (0.25, 3), (1 - 2**-53, 3)]
)
def test_the_ends_of_the_random_number_hit_possible_words(monkeypatch, number, word):
    monkeypatch.setattr(torch, "rand", lambda *_, dtype, **__: torch.tensor(number, dtype=dtype))
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    assert draw(probabilities, row_generators(0, 1)).tolist() == [word]


def test_a_mass_that_is_reached_exactly_needs_no_further_word():
    assert support(keep_top_p(torch.zeros(1, 4, dtype=torch.float64), 0.5)) == {0, 1}


def test_repetition_penalty_lowers_seen_words_of_either_sign():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]
    chosen = sample(temperature=0.0, repetition_penalty=2.0)
    assert choose(logits, chosen, row_generators(0, 1), seen).tolist() == [2]
    with pytest.raises(ValueError, match="words seen"):
        choose(logits, chosen, row_generators(0, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_not_a_word(bad, temperature):
    logits = torch.zeros(3, WORDS)
    logits[1, 4] = bad
    with pytest.raises(NumericsError, match="row 1"):
        choose(logits, sample(temperature=temperature), row_generators(0, 3))


@given(logits=batches, limit=st.integers(1, WORDS + 3), seed=st.integers(0, 100))
def test_no_word_beyond_the_limit_comes(logits, limit, seed):
    logits = logits + torch.arange(WORDS)  # the forbidden ones would be the likeliest
    fewer = logits[:, :limit]
    for changes in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {}):
        chosen = choose(logits, sample(vocab_limit=limit, **changes), row_generators(seed, 4))
        assert torch.equal(chosen, choose(fewer, sample(**changes), row_generators(seed, 4)))
        assert int(chosen.max()) < limit


def test_forbidding_all_words_is_an_error():
    with pytest.raises(NumericsError, match="row 0"):
        choose(torch.full((1, 3), -math.inf), sample(), row_generators(0, 1))


def test_one_generator_a_row():
    with pytest.raises(ValueError, match="2 rows need as many generators, not 1"):
        choose(torch.zeros(2, 3), sample(), row_generators(0, 1))


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"max_new_tokens": 0}, ["max_new_tokens = 0", "at least 1"]),
        ({"temperature": -0.5}, ["temperature = -0.5", "use 0 for greedy"]),
        ({"temperature": math.nan}, ["temperature = nan"]),
        ({"top_k": 0}, ["top_k = 0", "null"]),
        ({"top_p": 0.0}, ["top_p = 0.0", "use 1"]),
        ({"top_p": 1.1}, ["top_p = 1.1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty = 0.0", "use 1"]),
        ({"stop_ids": (3, -1)}, ["stop_ids = (3, -1)"]),
        ({"vocab_limit": 0}, ["vocab_limit = 0", "at least 1"]),
        ({"vocab_limit": 5, "stop_ids": (5,)}, ["vocab_limit = 5", "above all stop_ids"]),
        ({"top_k": -2, "top_p": 2.0}, ["top_k = -2", "top_p = 2.0"]),
    ],
)
def test_settings_out_of_range_name_the_value_and_the_fix(changes, fragments):
    with pytest.raises(ConfigError) as caught:
        GenerationSettings(**{"max_new_tokens": 1, **changes})
    for fragment in fragments:
        assert fragment in str(caught.value)


@settings(max_examples=20)
@given(logits=batches)
def test_choosing_changes_no_input(logits):
    before = logits.clone()
    seen = torch.ones_like(logits, dtype=torch.bool)
    choose(logits, sample(top_k=3, top_p=0.5, repetition_penalty=1.3), row_generators(0, 4), seen)
    assert torch.equal(logits, before)
