import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.objective import SpecialIds
from ds_engine.data.text_to_text import TextToText
from ds_engine.errors import ConfigError, DataError
from tests.data.test_span_corruption import EOD, EOS, PAD, START, examples_of

IDS = SpecialIds(pad=PAD, eos=EOS, start=START)

field = st.tuples(
    st.lists(st.sampled_from([10, 11, 12, EOS, EOD]), max_size=9),
    st.sampled_from([(), (EOS,), (EOD,)]),
).map(lambda parts: [*parts[0], *parts[1]])


def write(folder, documents, name="x"):
    with IndexedWriter(folder / name, vocab_size=1000, overwrite=True) as writer:
        for fields in documents:
            for tokens in fields:
                writer.add_sequence(tokens)
            writer.end_document()
    return IndexedDataset(folder / name)


def make(size=8, decoder_size=6, **options):
    return TextToText(encoder_length=size, decoder_length=decoder_size, ids=IDS, seed=1, **options)


def stripped(tokens, finals):
    return tokens[:-1] if tokens and tokens[-1] in finals else tokens


@given(
    st.lists(st.tuples(field, field), min_size=1, max_size=8),
    st.integers(2, 12),
    st.integers(2, 12),
    st.sampled_from([None, EOD]),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_the_fields(tmp_path_factory, documents, size, decoder_size, drop):
    data = write(tmp_path_factory.mktemp("t"), documents)
    finals = {EOS, drop}
    texts = [tuple(stripped(tokens, finals) for tokens in fields) for fields in documents]
    objective = make(size, decoder_size, truncate=True, drop_final=drop)
    samples = objective.validation(data)
    assert len(samples) == len(documents)
    for number, (inputs, targets) in enumerate(texts):
        row = objective(samples[number], number)
        assert examples_of(row, size, decoder_size) == [
            (inputs[: size - 1], targets[: decoder_size - 1])
        ]
    strict = make(size, decoder_size, drop_final=drop)
    fits = all(len(i) < size and len(t) < decoder_size for i, t in texts)
    if fits:
        assert strict.validation(data)[0].tokens.tolist() == samples[0].tokens.tolist()
    else:
        with pytest.raises(DataError, match="too long"):
            strict.validation(data)


def test_too_long_examples_are_named_once_at_opening(tmp_path):
    fits = [[10] * 7, [11] * 5]
    data = write(tmp_path, [fits, [[10] * 8, [11] * 5], [[10] * 7, [11] * 6], [[10] * 90, [11]]])
    message = (
        r"input of 2 of 4 documents is too long, first that of document 1 with 8 tokens; "
        r"data.sequence_length = 8 holds 7 and EOS. Raise .*truncate = true"
    )
    for open_it in (make().validation, lambda data: make().samples(data, seed=1)):
        with pytest.raises(DataError, match=message):
            open_it(data)
    message = r"target of 1 of 4 .* document 2 with 6 tokens; data.decoder_sequence_length = 6 "
    with pytest.raises(DataError, match=message):
        make(size=91).validation(data)
    assert len(make(size=91, decoder_size=7).validation(data)) == 4
    row = make(truncate=True)(make(truncate=True).validation(data)[3], 0)
    assert row.inputs[0].tolist() == [10] * 7 + [EOS]


def test_each_epoch_has_every_example_in_another_order(tmp_path):
    documents = [[[100 + k], [200 + k]] for k in range(30)]
    samples = make().samples(write(tmp_path, documents), seed=4)
    assert samples.epoch_samples == 30 and samples.num_tokens == 60
    epochs = [[samples[30 * e + k].tokens.tolist() for k in range(30)] for e in range(3)]
    pairs = sorted([100 + k, EOS, 200 + k, EOS] for k in range(30))
    assert all(sorted(epoch) == pairs for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != pairs
    again = make().samples(write(tmp_path, documents, "y"), seed=4)
    assert again[30 * 2 + 7].tokens.tolist() == epochs[2][7]
    other = make().samples(write(tmp_path, documents, "y"), seed=5)
    assert [other[k].tokens.tolist() for k in range(30)] != epochs[0]
    assert samples[30 * 2**40].num_inputs == 2
    with pytest.raises(IndexError):
        samples[-1]


def test_validation_is_in_file_order_and_finite(tmp_path):
    samples = make().validation(write(tmp_path, [[[10], [11]], [[], []]]))
    assert [samples[k].tokens.tolist() for k in range(2)] == [[10, EOS, 11, EOS], [EOS, EOS]]
    for outside in (2, -1):
        with pytest.raises(IndexError):
            samples[outside]


def test_the_empty_sample_has_no_loss():
    row = make()(make().empty(), 3)
    assert examples_of(row, 8, 6) == [] and not row.targets[1].any()
    assert make().empty().tokens.tolist() == [PAD]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[[1]], [[1], [2]], [[1]]], "2 of 3 documents have not two sequences, first document 0"),
        ([[[1], [2]], [[1], [2], [3]]], "1 of 2 documents .* document 1 with 3"),
        # The right number of sequences in all does not hide a wrong document.
        ([[[1]], [[1], [2], [3]]], "2 of 2 documents"),
        ([[[1], [2]], []], "1 of 2 documents .* document 1 with 0"),
        ([], "holds no document"),
    ],
)
def test_documents_without_two_fields_are_refused(tmp_path, documents, message):
    data = write(tmp_path, documents)
    with pytest.raises(DataError, match=f"{message}.*--fields input,target"):
        make().validation(data)


def test_unusable_options_are_refused():
    with pytest.raises(ConfigError, match=r"data.sequence_length = 1 must be at least 2"):
        make(size=1)
    with pytest.raises(ConfigError, match=r"data.decoder_sequence_length = 0"):
        make(decoder_size=0)
    with pytest.raises(ConfigError, match=r"no start token"):
        TextToText(encoder_length=8, decoder_length=8, ids=SpecialIds(pad=0, eos=1))


def test_large_sets_are_checked_without_a_loop(tmp_path):
    with IndexedWriter(tmp_path / "x", vocab_size=1000) as writer:
        writer.add_documents(np.full(400_000, 10), [2] * 200_000)
    data = IndexedDataset(tmp_path / "x")
    data.document_starts = data.document_starts[::2]  # two sequences each
    began = time.perf_counter()
    assert len(make().validation(data)) == 100_000
    assert time.perf_counter() - began < 0.1  # a loop over the documents takes longer
