from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_engine.data.denoisers import (
    UL2_DENOISERS,
    Denoiser,
    MixtureOfDenoisers,
    PrefixLM,
    PrefixNoise,
)
from ds_engine.data.denoising import raw_length
from ds_engine.data.objective import SpecialIds
from ds_engine.data.span_corruption import SpanNoise
from ds_engine.errors import ConfigError
from tests.data.test_span_corruption import (
    EOD,
    EOS,
    IDS,
    PAD,
    SENTINELS,
    START,
    WORDS,
    documents_of,
    examples_of,
    expected_texts,
    fill_in,
    piece,
)

MODES = (4, 5, 6)
GOLDEN_CHOICES = [0, 0, 0, 5, 1, 2, 2, 3, 3, 5]
GOLDEN_PREFIXES = [10, 20, 4, 9, 3, 18, 18, 13]

denoisers_of = st.lists(
    st.builds(
        Denoiser,
        type=st.sampled_from(["span", "prefix"]),
        noise_density=st.floats(0.02, 0.98),
        mean_span_length=st.floats(1, 70),
        weight=st.floats(0.1, 3),
        mode_id=st.sampled_from([None, *MODES]),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


def flat(row):
    return np.concatenate([*row.inputs, *row.targets]).tolist()


@given(
    documents_of,
    st.integers(4, 90),
    st.integers(4, 90),
    st.booleans(),
    st.integers(0, 2**40),
)
@settings(max_examples=100, deadline=None)
def test_prefix_and_rest_give_the_text_back(documents, size, decoder_size, isolate, number):
    objective = PrefixLM(
        encoder_length=size,
        decoder_length=decoder_size,
        ids=SpecialIds(pad=PAD, eos=EOS, start=START),  # no sentinels needed
        seed=5,
        isolate_documents=isolate,
        drop_final=EOD,
    )
    sample = piece(documents, objective.raw_length)
    examples = examples_of(objective(sample, number), size, decoder_size)
    texts = expected_texts(objective, PrefixNoise(), sample)
    assert [[*inputs, *targets] for inputs, targets in examples] == texts
    for (inputs, targets), text in zip(examples, texts, strict=True):
        assert targets or not text
        assert inputs or len(text) < 2


def test_all_split_points_of_a_prefix_are_equally_likely():
    words = np.random.Philox(1).random_raw(4000)
    spans = PrefixNoise().split(np.full(4000, 9), words)
    counts = np.bincount(spans.removed, minlength=10)
    assert counts[0] == counts[9:].sum() == 0
    assert ((counts[1:9] - 500) ** 2 / 500).sum() < 24.3  # chi-square(7), one of a thousand


@pytest.mark.parametrize("density", [0.02, 0.25, 0.5, 0.8, 0.99])
def test_a_prefix_denoiser_has_its_density_on_average(density):
    noise = PrefixNoise(density)
    lengths = np.full(20_000, 200)
    spans = noise.split(lengths, np.random.Philox(2).random_raw(20_000))
    assert spans.removed.mean() / 200 == pytest.approx(density, abs=0.005)
    assert (spans.kept + spans.removed == 200).all()
    assert spans.kept.min() >= 1 and spans.removed.min() >= 1
    most = noise.costs(lengths[:1])[:, 0]
    assert [spans.kept.max() + 1, spans.removed.max() + 1] == most.tolist()


@given(
    documents_of,
    denoisers_of,
    st.integers(6, 90),
    st.integers(6, 90),
    st.booleans(),
    st.integers(0, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_a_mixture_gives_the_text_back(documents, parts, size, decoder_size, isolate, number):
    try:
        objective = MixtureOfDenoisers(
            encoder_length=size,
            decoder_length=decoder_size,
            ids=IDS,
            seed=5,
            denoisers=parts,
            isolate_documents=isolate,
            drop_final=EOD,
        )
    except ConfigError:
        assume(False)
    sample = piece(documents, objective.raw_length)
    examples = examples_of(objective(sample, number), size, decoder_size)

    def read(denoiser):
        texts = []
        for inputs, targets in examples:
            if denoiser.mode_id is not None:
                if inputs[:1] != [denoiser.mode_id]:
                    return None
                inputs = inputs[1:]  # noqa: PLW2901
            if denoiser.type == "prefix":
                texts.append([*inputs, *targets])
            elif targets and targets[0] not in SENTINELS:
                return None
            else:
                texts.append(fill_in(inputs, targets))
        return texts

    assert any(
        read(denoiser) == expected_texts(objective, denoiser.noise, sample) for denoiser in parts
    )


def kind(row):
    """(mode, whether there are sentinels) of a row."""
    return int(row.inputs[0][0]), any(token in SENTINELS for token in row.inputs[0].tolist())


def test_rows_are_shared_out_by_weight():
    parts = (
        Denoiser(type="span", weight=1.0, mode_id=MODES[0]),
        Denoiser(type="prefix", noise_density=0.25, weight=0.5, mode_id=MODES[1]),
        Denoiser(type="span", noise_density=0.5, weight=2.5, mode_id=MODES[2]),
    )
    objective = MixtureOfDenoisers(
        encoder_length=32, decoder_length=32, ids=IDS, seed=3, denoisers=parts
    )
    sample = piece([list(WORDS)], objective.raw_length)
    rows = [kind(objective(sample, number)) for number in range(1000)]
    assert rows == [kind(objective(sample, number)) for number in range(1000)]
    counts = Counter(rows)
    assert set(counts) == {(MODES[0], True), (MODES[1], False), (MODES[2], True)}
    for mode, share in ((MODES[0], 0.25), (MODES[1], 0.125), (MODES[2], 0.625)):
        found = sum(count for (found_mode, _), count in counts.items() if found_mode == mode)
        assert abs(found - 1000 * share) < 4 * (1000 * share * (1 - share)) ** 0.5


def test_ul2_has_the_seven_denoisers_of_the_paper():
    spans = [d for d in UL2_DENOISERS if d.type == "span"]
    assert sorted((d.mean_span_length, d.noise_density) for d in spans) == [
        (3, 0.15),
        (3, 0.5),
        (8, 0.15),
        (8, 0.5),
        (64, 0.15),
        (64, 0.5),
    ]
    assert [d.noise_density for d in UL2_DENOISERS if d.type == "prefix"] == [0.25]
    assert {d.weight for d in UL2_DENOISERS} == {1.0}


def test_a_mixture_holds_what_each_denoiser_holds():
    objective = MixtureOfDenoisers(encoder_length=512, decoder_length=512, ids=IDS, seed=1)
    each = [raw_length(512, 512, d.noise) for d in UL2_DENOISERS]
    assert objective.raw_length == min(each) == 504
    assert raw_length(512, 512, SpanNoise(mode_id=4)) < raw_length(512, 512, SpanNoise())


def test_rows_depend_on_seed_and_number_and_all_denoisers_occur():
    def make(seed):
        return MixtureOfDenoisers(encoder_length=128, decoder_length=128, ids=IDS, seed=seed)

    objective = make(1)
    sample = piece([list(WORDS) * 2], objective.raw_length)
    rows = [flat(objective(sample, number)) for number in range(40)]
    assert rows == [flat(make(1)(sample, number)) for number in range(40)]
    # Not 40: a denoiser whose single span ends the text has nothing to draw.
    assert len({tuple(row) for row in rows}) > 20
    assert rows != [flat(make(2)(sample, number)) for number in range(40)]
    chosen = {objective.choose(int(word)) for word in np.random.Philox(1).random_raw(200)}
    assert chosen == set(range(7))
    assert objective.choose(0) == 0 and objective.choose(2**64 - 1) == 6


@pytest.mark.parametrize("make", [PrefixLM, MixtureOfDenoisers])
def test_the_empty_sample_has_no_loss(make):
    objective = make(encoder_length=64, decoder_length=64, ids=IDS, seed=1)
    for number in range(10):
        row = objective(objective.empty(), number)
        assert examples_of(row, 64, 64) == [] and not row.targets[1].any()


def test_golden_rows():
    """What is drawn must survive a change of numpy, of the machine and of our code."""
    kwargs = {"encoder_length": 32, "decoder_length": 32, "ids": IDS, "seed": 1}
    mixture = MixtureOfDenoisers(**kwargs)
    words = np.random.Philox(1).random_raw(10)
    assert [mixture.choose(int(word)) for word in words] == GOLDEN_CHOICES
    prefix = PrefixLM(**kwargs)
    sample = piece([list(WORDS)], prefix.raw_length)
    rows = [prefix(sample, number) for number in range(8)]
    assert [int((row.inputs[2] == 0).sum()) for row in rows] == GOLDEN_PREFIXES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "causal"}, 'type = "causal" must be "span" or "prefix"'),
        ({"type": "span", "weight": 0.0}, "weight = 0.0 must be above 0"),
        ({"type": "span", "weight": float("nan")}, "weight = nan"),
        ({"type": "prefix", "noise_density": 1.0}, "noise_density = 1.0 must be between"),
        ({"type": "span", "mean_span_length": 0.0}, "mean_span_length = 0.0 must be"),
    ],
)
def test_unusable_denoisers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Denoiser(**options)


def test_unusable_mixtures_are_refused():
    kwargs = {"encoder_length": 64, "decoder_length": 64, "seed": 1}
    with pytest.raises(ConfigError, match="denoisers is empty"):
        MixtureOfDenoisers(**kwargs, ids=IDS, denoisers=())
    no_sentinels = SpecialIds(pad=PAD, eos=EOS, start=START)
    with pytest.raises(ConfigError, match="--kind t5"):
        MixtureOfDenoisers(**kwargs, ids=no_sentinels)
    prefix_only = (Denoiser(type="prefix", noise_density=0.25),)
    assert MixtureOfDenoisers(**kwargs, ids=no_sentinels, denoisers=prefix_only).raw_length == 60
    with pytest.raises(ConfigError, match="hold no example of two tokens with its EOS;"):
        PrefixLM(encoder_length=1, decoder_length=64, ids=IDS, seed=1)
