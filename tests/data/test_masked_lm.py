import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.masked_lm import MaskedLM
from ds_engine.data.masking import MaskingOptions
from ds_engine.data.objective import SpecialIds
from ds_engine.data.samples import Sample
from ds_engine.errors import ConfigError

VOCAB = 40
PAD, CLS, SEP, MASK, EOD = 0, 1, 2, 3, 4
IDS = SpecialIds(pad=PAD, cls=CLS, sep=SEP, mask=MASK, special=frozenset({EOD}))


def objective(size=16, **options):
    return MaskedLM(size, IDS, VOCAB, 7, **options)


def sample(tokens, starts, length, num_valid=None):
    padded = np.zeros(length, dtype=np.int64)
    padded[: len(tokens)] = tokens
    starts = np.array(starts, dtype=np.int64)
    return Sample(padded, starts, len(tokens) if num_valid is None else num_valid)


def test_each_document_is_an_example():
    row = objective(32)(sample([5, 6, 7, 8, 9, EOD, 10], [2, 6], 28), 0)
    tokens, positions, segments, types = row.inputs
    labels, mask = row.targets
    text = [CLS, 5, 6, SEP, CLS, 7, 8, 9, EOD, SEP, CLS, 10, SEP]
    assert labels.tolist() == text + [PAD] * 19
    assert segments.tolist() == [0] * 4 + [1] * 6 + [2] * 3 + [-1] * 19
    assert positions.tolist() == [*range(4), *range(6), *range(3), *range(19)]
    assert types.tolist() == [0] * 32
    assert mask.dtype == np.float32 and mask.sum() == 1  # round(0.15 * 6 words)
    assert (tokens == labels)[mask == 0].all()


def test_short_documents_are_joined_where_they_do_not_fit():
    made = objective(16)
    assert made.piece_length == 13  # room for one document
    row = made(sample([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [0, 1, 2], 13), 0)
    assert row.targets[0].tolist() == [CLS, *range(5, 18), SEP, PAD]
    assert row.inputs[2].tolist() == [0] * 15 + [-1]


def test_a_separator_in_the_data_is_not_doubled():
    row = objective(32)(sample([5, SEP, 6, 7, SEP, SEP, 8], [2, 5, 6], 28), 0)
    text = [CLS, 5, SEP, CLS, 6, 7, SEP, CLS, SEP, CLS, 8, SEP]
    assert row.targets[0].tolist() == text + [PAD] * 20
    assert row.inputs[2].tolist() == [0] * 3 + [1] * 4 + [2] * 2 + [3] * 3 + [-1] * 20


def test_separators_in_the_data_save_room():
    row = objective(16)(sample([5, 6, 7, 8, SEP, *range(10, 17), SEP], [0, 5], 13), 0)
    assert row.inputs[2].tolist() == [0] * 6 + [1] * 9 + [-1]


def test_without_isolation_the_piece_is_one_example():
    made = objective(10, isolate_documents=False)
    assert made.piece_length == 8
    row = made(sample([5, EOD, 6, 7, 8, 9, 10, 11], [0, 2], 8), 0)
    assert row.targets[0].tolist() == [CLS, 5, EOD, 6, 7, 8, 9, 10, 11, SEP]
    assert row.inputs[1].tolist() == list(range(10))
    assert not row.inputs[2].any()


@pytest.mark.parametrize("isolate", [False, True])
def test_spans_stay_within_documents_of_one_example(isolate):
    """Two words a row: neighbours of two documents only if two spans of one word happen to meet."""
    made = objective(16, isolate_documents=isolate, masking=MaskingOptions(max_ngram=9))
    piece = sample([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [0, 4], 13)
    side_by_side = np.zeros(16)
    for number in range(800):
        first, second = np.flatnonzero(made(piece, number).targets[1])
        side_by_side[second] += second == first + 1
    inside = np.delete(side_by_side[2:14], 5 - 2)
    assert inside.min() > 3 * side_by_side[5]


def test_empty_samples_have_no_targets():
    row = objective().empty()
    made = objective()(row, 3)
    assert made.inputs[0].tolist() == [PAD] * 16 and made.inputs[2].tolist() == [-1] * 16
    assert not made.targets[1].any() and len(row.tokens) == objective().piece_length


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"no cls token.*special_tokens\.cls.*wordpiece"):
        MaskedLM(16, SpecialIds(pad=0, sep=1, mask=2), VOCAB, 0)
    with pytest.raises(ConfigError, match="no mask token"):
        MaskedLM(16, SpecialIds(pad=0, sep=1, cls=2), VOCAB, 0)
    with pytest.raises(ConfigError, match="sequence_length = 7"):
        objective(7)


documents = st.lists(st.lists(st.integers(2, 12), max_size=30), min_size=1, max_size=12).filter(any)


@given(documents, st.integers(8, 80), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_rows_give_the_text_back(tmp_path_factory, made, size, isolate, train):
    """Without [CLS] and [SEP] the labels of all rows are the tokens of the data, each once."""
    made = [[token if token not in (MASK, CLS) else 9 for token in one] for one in made]
    prefix = tmp_path_factory.mktemp("m") / "x"
    with IndexedWriter(prefix, vocab_size=VOCAB) as writer:
        for one in made:
            writer.add_document(one)
    data = IndexedDataset(prefix)
    lm = objective(size, isolate_documents=isolate)
    length = lm.piece_length
    if train:
        samples = lm.samples(data, seed=3)
        pieces = [samples[index] for index in range(4)]
    else:
        samples = lm.validation(data)
        pieces = [samples[index] for index in range(len(samples))]
    if not train:
        assert sum(piece.num_valid for piece in pieces) == data.num_tokens
    for number, piece in enumerate(pieces):
        assert len(piece.tokens) == length
        row = lm(piece, number)
        tokens, positions, segments, types = row.inputs
        labels, mask = row.targets
        assert all(len(part) == size for part in (*row.inputs, *row.targets))
        real = segments >= 0
        assert (labels[~real] == PAD).all() and (tokens[~real] == PAD).all() and not types.any()
        words = labels[real & (labels != CLS) & (labels != SEP)]
        text = piece.tokens[: piece.num_valid]
        assert words.tolist() == text[text != SEP].tolist()
        for segment in range(segments.max() + 1):
            example = labels[segments == segment]
            assert example[0] == CLS and example[-1] == SEP
            assert positions[segments == segment].tolist() == list(range(len(example)))
        assert isolate or segments.max() <= 0
        assert (tokens == labels)[mask == 0].all()
        assert not mask[~real].any() and not mask[labels <= EOD].any()
        ordinary = int((words > EOD).sum())
        assert mask.sum() == (max(1, int(0.15 * ordinary + 0.5)) if ordinary else 0)
