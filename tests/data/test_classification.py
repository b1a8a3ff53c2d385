import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.classification import Classification, truncated_lengths
from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.objective import SpecialIds
from ds_engine.errors import ConfigError, DataError

PAD, CLS, SEP = 0, 1, 2
IDS = SpecialIds(pad=PAD, cls=CLS, sep=SEP)


def write(prefix, documents):
    with IndexedWriter(prefix, vocab_size=100) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    return IndexedDataset(prefix)


def test_rows(tmp_path):
    data = write(tmp_path / "x", [([5, 6, 7], [2]), ([8], [9, 10], [0]), ([], [1])])
    objective = Classification(10, IDS, 3)
    validation = objective.validation(data)
    assert len(validation) == 3
    text, pair, nothing = (objective(validation[k], k) for k in range(3))
    assert text.inputs[0].tolist() == [CLS, 5, 6, 7, SEP] + [PAD] * 5
    assert text.inputs[1].tolist() == [*range(5), *range(5)]
    assert text.inputs[2].tolist() == [0] * 5 + [-1] * 5
    assert text.inputs[3].tolist() == [0] * 10
    assert pair.inputs[0].tolist() == [CLS, 8, SEP, 9, 10, SEP] + [PAD] * 4
    assert pair.inputs[3].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert nothing.inputs[0].tolist() == [CLS, SEP] + [PAD] * 8
    for row, label in ((text, 2), (pair, 0), (nothing, 1)):
        found, mask = row.targets
        assert found.shape == mask.shape == () and found == label and mask == 1
        assert found.dtype == np.int64 and mask.dtype == np.float32
    empty = objective(objective.empty(), 0)
    assert empty.targets[1] == 0 and empty.inputs[0].shape == (10,)


def test_each_epoch_reads_each_example_once_in_another_order(tmp_path):
    data = write(tmp_path / "x", [([10 + k], [k % 2]) for k in range(40)])
    samples = Classification(8, IDS, 2).samples(data, seed=3)
    assert samples.epoch_samples == 40 and samples.num_tokens == 80
    epochs = [[int(samples[e * 40 + k].tokens[1]) for k in range(40)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10, 50))
    assert epochs[0] != epochs[1] != epochs[2]
    for k in range(40):
        assert samples[k].label == samples[k].tokens[1] % 2
    other = Classification(8, IDS, 2).samples(data, seed=4)
    assert [int(other[k].tokens[1]) for k in range(40)] != epochs[0]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_the_longer_text_is_cut_first(text, pair, room):
    kept = [text, pair]
    while sum(kept) > room:
        kept[0 if kept[0] > kept[1] else 1] -= 1
    assert list(truncated_lengths(text, pair, room)) == kept


def test_long_examples_are_refused_or_cut(tmp_path):
    text = list(range(10, 30))
    data = write(tmp_path / "x", [([5], [1]), (text, [0]), ([5, 6], text, [1])])
    with pytest.raises(DataError, match=r"2 of 3.*document 1 with 22 tokens.*25.*truncate"):
        Classification(12, IDS, 2).samples(data, seed=0)
    Classification(25, IDS, 2).validation(data)
    validation = Classification(12, IDS, 2, truncate=True).validation(data)
    assert validation[1].tokens.tolist() == [CLS, *range(10, 20), SEP]
    assert validation[2].tokens.tolist() == [CLS, 5, 6, SEP, *range(10, 17), SEP]
    assert [validation[k].label for k in range(3)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([([5], [0]), ([5], [3]), ([5], [9])], "2 labels.*0..2.*first is 3, of document 1"),
        ([([5], [0]), ([5],)], "document 1 has 1 sequences.*--fields"),
        ([([5], [0]), ()], "document 1 has 0 sequences"),
        ([([5], [6], [7], [0])], "document 0 has 4 sequences"),
        ([([5], [0, 1])], "label of document 0 has 2 tokens"),
        ([([5], [])], "label of document 0 has 0 tokens"),
        ([], "no document"),
    ],
)
def test_what_is_no_example_is_refused(tmp_path, documents, words):
    data = write(tmp_path / "x", documents)
    with pytest.raises(DataError, match=words):
        Classification(12, IDS, 3).samples(data, seed=0)
    with pytest.raises(DataError, match=words):
        Classification(12, IDS, 3).validation(data)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="no pad token"):
        Classification(12, SpecialIds(cls=1, sep=2), 3)
    with pytest.raises(ConfigError, match="num_labels = 1"):
        Classification(12, IDS, 1)
