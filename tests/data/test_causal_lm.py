import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.causal_lm import CausalLM
from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.samples import Sample, SequentialSamples

EOD = 9


class Read:
    """A row with names."""

    def __init__(self, row):
        self.tokens, self.positions, self.segments = row.inputs
        self.labels, self.loss_mask = row.targets


def sample(tokens, starts, num_valid=None):
    tokens = np.array(tokens, dtype=np.int64)
    return Sample(tokens, np.array(starts, dtype=np.int64), num_valid or len(tokens))


def test_packed_documents_are_isolated():
    # ... 5 EOD | 1 2 EOD | 3: the row begins inside a document.
    row = Read(CausalLM(5, isolate_documents=True)(sample([5, EOD, 1, 2, EOD, 3], [2, 5])))
    assert row.tokens.tolist() == [5, EOD, 1, 2, EOD]
    assert row.labels.tolist() == [EOD, 1, 2, EOD, 3]
    assert row.segments.tolist() == [0, 0, 1, 1, 1]
    assert row.positions.tolist() == [0, 1, 0, 1, 2]
    assert row.loss_mask.tolist() == [1, 0, 1, 1, 0]
    assert row.loss_mask.dtype == np.float32


def test_without_isolation_the_row_is_one_stream():
    row = Read(CausalLM(5, isolate_documents=False)(sample([5, EOD, 1, 2, EOD, 3], [2, 5])))
    assert row.segments.tolist() == [0] * 5
    assert row.positions.tolist() == [0, 1, 2, 3, 4]
    assert row.loss_mask.tolist() == [1] * 5


def test_end_of_document_ids_inside_a_document_do_not_split_it():
    row = Read(CausalLM(5)(sample([EOD, EOD, EOD, EOD], [0])))
    assert row.segments.tolist() == [0, 0, 0]
    assert row.loss_mask.tolist() == [1, 1, 1]


def test_padding_is_a_segment_without_loss():
    row = Read(CausalLM(5)(sample([1, 2, 3, 0, 0, 0], [0, 2], num_valid=3)))
    assert row.segments.tolist() == [0, 0, 1, 2, 2]
    assert row.positions.tolist() == [0, 1, 0, 0, 1]
    assert row.loss_mask.tolist() == [1, 0, 0, 0, 0]
    empty = Read(CausalLM(5)(Sample(np.zeros(4, np.int64), np.zeros(0, np.int64), 0)))
    assert empty.loss_mask.tolist() == [0, 0, 0]


@given(
    st.lists(st.lists(st.integers(0, 8), max_size=6), min_size=1, max_size=6).filter(
        lambda documents: sum(map(len, documents)) > 1
    ),
    st.integers(1, 8),
)
@settings(max_examples=50, deadline=None)
def test_rows_give_the_documents_back(tmp_path_factory, documents, size):
    """Tokens, segments, labels and masks of all rows rebuild every document with its last token."""
    prefix = tmp_path_factory.mktemp("c") / "x"
    with IndexedWriter(prefix, vocab_size=10) as writer:
        for document in documents:
            writer.add_document(document)
    samples = SequentialSamples(IndexedDataset(prefix), sequence_length=size)
    rebuilt = []
    predicted = 0
    for index in range(len(samples)):
        row = Read(CausalLM(5)(samples[index]))
        valid = min(samples[index].num_valid, size)
        for at in range(valid):
            begins_document = at in samples[index].starts
            assert row.positions[at] == at - np.flatnonzero(row.segments == row.segments[at])[0]
            if begins_document:
                rebuilt.append([])
            rebuilt[-1].append(int(row.tokens[at]))
        ends = row.labels[:valid][row.loss_mask[:valid] == 1]
        predicted += len(ends)
        follows = np.append(row.segments[1:] == row.segments[:-1], True)[: valid - 1]
        assert ((row.loss_mask[: valid - 1] == 1) == follows).all()
        # The last token of the set is a label only.
        if index == len(samples) - 1 and samples[index].num_valid == size + 1:
            if row.loss_mask[-1] == 0:
                rebuilt.append([])
            rebuilt[-1].append(int(row.labels[-1]))
    full = [document for document in documents if document]
    assert rebuilt == full
    assert predicted == sum(len(document) - 1 for document in full)
