import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_engine.data.denoising import raw_length
from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.objective import SpecialIds
from ds_engine.data.samples import Sample
from ds_engine.data.span_corruption import SpanCorruption, SpanNoise, noise_counts, random_parts
from ds_engine.errors import ConfigError
from tests.data.test_packing import join_slowly

PAD, EOS, EOD, START = 0, 1, 2, 3
WORDS = range(10, 100)
SENTINELS = tuple(range(299, 199, -1))
IDS = SpecialIds(pad=PAD, eos=EOS, start=START, sentinels=SENTINELS)
GOLDEN_INPUTS = [10, 11, 12, 13, 14, 299, 1, 20, 21, 22, 299, 1, 0, 0, 0, 0]
GOLDEN_LABELS = [299, 15, 1, 299, 23, 1, 0, 0, 0, 0, 0, 0]

documents_of = st.lists(
    st.tuples(
        st.lists(st.sampled_from([*WORDS[:20], EOS, EOD]), max_size=30),
        st.sampled_from([(), (EOS,), (EOD,)]),
    )
    .map(lambda parts: [*parts[0], *parts[1]])
    .filter(len),
    max_size=40,
)


def piece(documents, size):
    """The first ``size`` tokens of documents as a sample, padded if they are fewer."""
    stream = [token for document in documents for token in document][:size]
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    tokens = np.zeros(size, dtype=np.int64)
    tokens[: len(stream)] = stream
    return Sample(tokens, starts[starts < len(stream)].astype(np.int64), len(stream))


def expected_texts(objective, noise, sample):
    """What each example of a row must give back, by a slow and obvious way."""
    text = sample.tokens[: sample.num_valid].tolist()
    bounds = sorted({0, *(sample.starts.tolist() if objective.isolate_documents else [])})
    parts = [text[a:b] for a, b in zip(bounds, [*bounds[1:], len(text)], strict=True)]
    parts = [part for part in parts if part]
    finals = {objective.ids.eos, objective.drop_final}
    costs = noise.costs(np.arange(objective.raw_length + 1))
    limits = [objective.encoder_length, objective.decoder_length]
    dropped = [int(part[-1] in finals) for part in parts]
    sizes = join_slowly([len(part) for part in parts], costs, limits, dropped)
    joined = []
    for size in sizes:
        joined.append(text[:size])
        text = text[size:]
    return [part[:-1] if part[-1] in finals else part for part in joined]


def examples_of(row, size, decoder_size):
    """(inputs, targets) of each example after the checks that hold for every row."""
    tokens, positions, segments, decoder_tokens, decoder_positions, decoder_segments = row.inputs
    labels, mask = row.targets
    assert all(array.shape == (size,) for array in row.inputs[:3])
    assert all(array.shape == (decoder_size,) for array in (*row.inputs[3:], *row.targets))
    assert all(array.dtype == np.int64 for array in (*row.inputs, labels))
    assert mask.dtype == np.float32
    assert (mask == (decoder_segments >= 0)).all()
    count = int(segments.max(initial=-1)) + 1
    examples = []
    for number in [*range(count), -1]:
        at, decoder_at = (np.flatnonzero(s == number) for s in (segments, decoder_segments))
        for found, place in ((at, positions), (decoder_at, decoder_positions)):
            assert (np.diff(found) == 1).all()
            assert place[found].tolist() == list(range(len(found)))
        inputs, targets = tokens[at].tolist(), labels[decoder_at].tolist()
        if number == -1:
            assert set(inputs) <= {PAD} and set(decoder_tokens[decoder_at]) <= {PAD}
            continue
        assert decoder_tokens[decoder_at].tolist() == [START, *targets[:-1]]
        assert inputs[-1] == targets[-1] == EOS
        examples.append((inputs[:-1], targets[:-1]))
    # Padding comes last, examples in order.
    for side in (segments, decoder_segments):
        numbers = [number for number in dict.fromkeys(side.tolist()) if number >= 0]
        assert numbers == list(range(count))
        assert (np.diff(np.flatnonzero(side >= 0)) == 1).all()
    return examples


def fill_in(inputs, targets):
    """Put the spans of the targets in the place of the sentinels, which must come in order."""
    sentinels = [token for token in inputs if token in SENTINELS]
    assert tuple(sentinels) == SENTINELS[: len(sentinels)]
    spans = {}
    for token in targets:
        if token in SENTINELS:
            spans[token] = []
            current = spans[token]
        else:
            current.append(token)
    assert list(spans) == sentinels
    assert all(spans.values())
    return [word for token in inputs for word in spans.get(token, [token])]


@given(
    documents_of,
    st.integers(6, 90),
    st.integers(6, 90),
    st.floats(0.02, 0.98),
    st.floats(1, 9),
    st.booleans(),
    st.sampled_from([None, EOD]),
    st.integers(0, 2**40),
)
@settings(max_examples=200, deadline=None)
def test_a_row_gives_its_text_back(documents, size, decoder_size, density, mean, isolate, drop, n):
    try:
        objective = SpanCorruption(
            encoder_length=size,
            decoder_length=decoder_size,
            ids=IDS,
            seed=5,
            noise_density=density,
            mean_span_length=mean,
            isolate_documents=isolate,
            drop_final=drop,
        )
    except ConfigError:
        assume(False)
    sample = piece(documents, objective.raw_length)
    row = objective(sample, n)
    examples = examples_of(row, size, decoder_size)
    texts = expected_texts(objective, SpanNoise(density, mean), sample)
    assert [fill_in(*example) for example in examples] == texts
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    removed, spans = noise_counts(lengths, density, mean)
    for (inputs, targets), out, count in zip(examples, removed, spans, strict=True):
        assert sum(token in SENTINELS for token in inputs) == count
        assert len(targets) == out + count
        if len(inputs) + len(targets) > 2 * count + 1:  # two tokens or more: text comes first
            assert inputs[0] not in SENTINELS


def test_every_row_of_one_token_documents_keeps_all_of_them():
    objective = SpanCorruption(encoder_length=512, decoder_length=114, ids=IDS, seed=1)
    words = np.random.default_rng(0).choice(WORDS, objective.raw_length)
    sample = piece([[word] for word in words.tolist()], objective.raw_length)
    examples = examples_of(objective(sample, 3), 512, 114)
    assert len(examples) > 1
    text = [word for example in examples for word in fill_in(*example)]
    assert text == words.tolist()


def test_the_paper_counts():
    lengths = np.array([0, 1, 2, 3, 20, 512])
    removed, spans = noise_counts(lengths, 0.15, 3.0)
    assert removed.tolist() == [0, 1, 1, 1, 3, 77]
    assert spans.tolist() == [0, 1, 1, 1, 1, 26]
    removed, spans = noise_counts(lengths, 0.9, 1.0)
    assert removed.tolist() == [0, 1, 1, 2, 18, 461]
    assert spans.tolist() == [0, 1, 1, 1, 2, 51]  # no more than the text between them allows


def test_raw_length_is_the_published_one_and_leaves_slack():
    # T5 was trained on pieces of 568 tokens: inputs of 512 and targets of 114.
    assert raw_length(512, 114, SpanNoise(), isolate_documents=False) == 568
    assert raw_length(512, 1000, SpanNoise(), isolate_documents=False) == 568
    with_slack = raw_length(512, 114, SpanNoise())
    costs = SpanNoise().costs(np.array([with_slack, with_slack + 1]))
    assert (costs[:, 0] <= [504, 107]).all() and not (costs[:, 1] <= [504, 107]).all()


def test_rows_depend_on_seed_and_number_only():
    def make(seed=1):
        return SpanCorruption(encoder_length=64, decoder_length=32, ids=IDS, seed=seed)

    sample = piece([list(WORDS)], make().raw_length)

    def flat(row):
        return np.concatenate([*row.inputs, *row.targets]).tolist()

    rows = [flat(make()(sample, number)) for number in range(20)]
    assert rows == [flat(make()(sample, number)) for number in range(20)]
    assert len({tuple(row) for row in rows}) == 20
    assert flat(make(seed=2)(sample, 0)) not in rows
    assert flat(make()(sample, 2**40)) not in rows


def test_golden_row():
    """What is removed must survive a change of numpy, of the machine and of our code."""
    objective = SpanCorruption(encoder_length=16, decoder_length=12, ids=IDS, seed=7)
    sample = piece([[10, 11, 12, 13, 14, 15, EOS], [20, 21, 22, 23]], objective.raw_length)
    row = objective(sample, 11)
    assert row.inputs[0].tolist() == GOLDEN_INPUTS
    assert row.targets[0].tolist() == GOLDEN_LABELS


def test_all_ways_to_cut_are_equally_likely():
    """5 tokens in 3 parts: 6 ways; 3 in 2: 2 ways; drawn independently."""
    counts = Counter()
    for number in range(1200):
        words = np.random.Philox(number).random_raw(8)
        parts = random_parts(np.array([5, 0, 3]), np.array([3, 1, 2]), words)
        assert parts.sum() == 8 and len(parts) == 5 and parts.min() >= 1
        assert parts[:3].sum() == 5
        counts[tuple(parts.tolist())] += 1
    assert len(counts) == 12
    # Chi-square with 11 degrees of freedom: above 31.3 in one of a thousand seeds.
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 31.3


def test_an_end_of_document_id_is_not_doubled():
    kwargs = {"encoder_length": 32, "decoder_length": 32, "ids": IDS, "seed": 1}
    objective = SpanCorruption(**kwargs, drop_final=EOD)
    sample = piece([[10, 11, EOD], [EOS], [12, EOS, 13, EOS]], 10)
    texts = [fill_in(*example) for example in examples_of(objective(sample, 0), 32, 32)]
    assert texts == [[10, 11], [], [12, EOS, 13]]
    texts = [
        fill_in(*example) for example in examples_of(SpanCorruption(**kwargs)(sample, 0), 32, 32)
    ]
    assert texts == [[10, 11, EOD], [], [12, EOS, 13]]
    stream = SpanCorruption(**kwargs, isolate_documents=False)(sample, 0)
    assert [fill_in(*example) for example in examples_of(stream, 32, 32)] == [
        [10, 11, EOD, EOS, 12, EOS, 13]
    ]


@pytest.mark.parametrize("isolate", [True, False])
def test_the_empty_sample_has_no_loss(isolate):
    objective = SpanCorruption(
        encoder_length=32, decoder_length=16, ids=IDS, seed=1, isolate_documents=isolate
    )
    sample = objective.empty()
    assert sample.tokens.shape == (objective.raw_length,) and set(sample.tokens) == {PAD}
    row = objective(sample, 5)
    assert examples_of(row, 32, 16) == []
    assert not row.targets[1].any()


def test_an_epoch_has_every_token_once(tmp_path):
    documents = [list(range(1000 + 50 * k, 1000 + 50 * k + k)) for k in range(1, 18)]
    with IndexedWriter(tmp_path / "x", vocab_size=10_000) as writer:
        for document in documents:
            writer.add_document([*document, EOS])
    data = IndexedDataset(tmp_path / "x")
    objective = SpanCorruption(encoder_length=64, decoder_length=32, ids=IDS, seed=1)
    size = objective.raw_length
    words = sorted(token for document in documents for token in document)

    def read(samples, count):
        examples = [
            fill_in(*example)
            for number in range(count)
            for example in examples_of(objective(samples[number], number), 64, 32)
        ]
        return sorted(token for text in examples for token in text if token != EOS)

    validation = objective.validation(data)
    assert read(validation, len(validation)) == words
    samples = objective.samples(data, seed=3)
    assert samples[0].tokens.shape == (size,)
    # The pieces of ``size`` epochs end where an epoch ends: every token comes ``size`` times.
    assert samples.epoch_samples * size == data.num_tokens
    assert read(samples, data.num_tokens) == sorted(words * size)


@pytest.mark.parametrize("name", ["pad", "eos", "start"])
def test_missing_ids_are_named(name):
    ids = SpecialIds(**{"pad": 0, "eos": 1, "start": 3, "sentinels": SENTINELS, name: None})
    with pytest.raises(ConfigError, match=rf"no {name} token.*--kind t5"):
        SpanCorruption(encoder_length=64, decoder_length=64, ids=ids, seed=1)


def test_missing_and_too_few_sentinels_are_refused():
    def make(count, **options):
        ids = SpecialIds(pad=0, eos=1, start=3, sentinels=SENTINELS[:count])
        return SpanCorruption(encoder_length=512, decoder_length=128, ids=ids, seed=1, **options)

    with pytest.raises(ConfigError, match="ds-engine tokenizer train --kind t5"):
        make(0)
    with pytest.raises(ConfigError, match=r"into 28 spans.* only 27 sentinels; raise mean_span"):
        make(27)
    assert make(28).raw_length == 559
    assert make(27, mean_span_length=4.0).raw_length >= 559


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_density": 0.0}, "noise_density = 0.0 must be between 0 and 1"),
        ({"noise_density": float("nan")}, "noise_density = nan"),
        ({"mean_span_length": 0.5}, "mean_span_length = 0.5 must be at least 1"),
        ({"decoder_length": 2}, "data.decoder_sequence_length = 2 hold no example"),
        ({"encoder_length": 1}, "data.sequence_length = 1 and"),
    ],
)
def test_unusable_options_are_refused(options, message):
    full = {"encoder_length": 64, "decoder_length": 64, "ids": IDS, "seed": 1, **options}
    with pytest.raises(ConfigError, match=re.escape(message)):
        SpanCorruption(**full)
