import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.samples import RandomOrder, SequentialSamples, ShuffledSamples, permutation
from ds_engine.errors import DataError

GOLDEN_PERMUTATION = [7, 3, 1, 5, 6, 2, 8, 9, 0, 4]
GOLDEN_ORDER = [9, 3, 1, 7, 8, 2, 4, 5, 0, 6]


def dataset(folder, documents, vocab_size=100_000):
    with IndexedWriter(folder / "x", vocab_size=vocab_size, overwrite=True) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(folder / "x")


def numbered(lengths):
    """Documents whose tokens are all different, so that a token tells its place."""
    ends = np.cumsum(lengths)
    return [np.arange(end - size, end) for size, end in zip(lengths, ends, strict=True)]


def stream(seed, epochs, documents):
    """Tokens and document starts of the first epochs, built the slow and obvious way."""
    parts = []
    for epoch in range(epochs):
        parts += [documents[k] for k in permutation(len(documents), (seed, epoch, 0))]
    parts = [part for part in parts if len(part)]
    return np.concatenate(parts), {0, *np.cumsum([len(part) for part in parts]).tolist()}


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0),
    st.integers(1, 7),
    st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_samples_are_the_pieces_of_the_shuffled_stream(tmp_path_factory, lengths, size, seed):
    documents = numbered(lengths)
    data = dataset(tmp_path_factory.mktemp("s"), documents)
    samples = ShuffledSamples(data, sequence_length=size, seed=seed)
    total = data.num_tokens
    whole, starts = stream(seed, 3 + (3 * size) // total + 1, documents)
    count = 2 * total // size  # pieces that start within the first two epochs, or a little less
    first_epoch = -(-total // size)
    seen = {}
    for index in range(max(count, first_epoch)):
        sample = samples[index]
        # Find the piece: an index and its piece start in the same epoch.
        epoch = index * size // total
        pieces = range(-(-epoch * total // size), -(-(epoch + 1) * total // size))
        match = [
            p
            for p in pieces
            if np.array_equal(whole[p * size : p * size + size + 1], sample.tokens)
        ]
        assert match
        piece = next((p for p in match if p not in seen), match[0])
        seen[piece] = index
        expected = [o for o in range(size + 1) if piece * size + o in starts]
        assert sample.starts.tolist() == expected
        assert sample.num_valid == size + 1
    assert set(range(first_epoch)) <= set(seen)  # the first epoch is covered completely


def test_one_epoch_predicts_each_token_once(tmp_path):
    lengths = [3, 0, 50, 7, 0, 0, 40, 1, 99]
    data = dataset(tmp_path, numbered(lengths))
    samples = ShuffledSamples(data, sequence_length=8, seed=5)
    epoch = [samples[i] for i in range(25)]  # 200 tokens / 8
    inputs = np.concatenate([sample.tokens[:-1] for sample in epoch])
    assert sorted(inputs.tolist()) == list(range(200))
    again = [samples[i] for i in range(25, 50)]
    assert sorted(np.concatenate([s.tokens[:-1] for s in again]).tolist()) == list(range(200))
    assert not np.array_equal(inputs, np.concatenate([s.tokens[:-1] for s in again]))


def test_any_order_of_access_gives_the_same_samples(tmp_path):
    data = dataset(tmp_path, numbered([11] * 9))
    forward = ShuffledSamples(data, sequence_length=4, seed=1)
    expected = [forward[i].tokens.tolist() for i in range(120)]
    order = np.random.default_rng(0).permutation(120).tolist()
    other = ShuffledSamples(data, sequence_length=4, seed=1)
    assert {i: other[i].tokens.tolist() for i in order} == dict(enumerate(expected))
    different = ShuffledSamples(data, sequence_length=4, seed=2)
    assert [different[i].tokens.tolist() for i in range(120)] != expected


def test_a_data_set_shorter_than_a_sample_repeats(tmp_path):
    data = dataset(tmp_path, [[7, 8]])
    sample = ShuffledSamples(data, sequence_length=6, seed=0)[3]
    assert sample.tokens.tolist() == [7, 8] * 3 + [7]
    assert sample.starts.tolist() == [0, 2, 4, 6]


def test_far_samples_do_not_overflow(tmp_path):
    data = dataset(tmp_path, numbered([1000, 24]))
    samples = ShuffledSamples(data, sequence_length=512, seed=0)
    far = 2**40 + 1
    epoch_pair = [samples[far - far % 2 + k].tokens[:-1] for k in range(2)]
    assert sorted(np.concatenate(epoch_pair).tolist()) == list(range(1024))


def test_golden_order():
    """The order of the data must survive a change of numpy, of the machine and of our code."""
    assert permutation(10, (1234, 0, 0)).tolist() == GOLDEN_PERMUTATION
    order = RandomOrder(10, (1234, 0, 1))
    assert [order[i] for i in range(10)] == GOLDEN_ORDER


@given(st.integers(1, 300), st.integers(0, 2**40))
def test_orders_are_bijections(size, seed):
    order = RandomOrder(size, (seed, 1))
    assert sorted(order[i] for i in range(size)) == list(range(size))
    assert sorted(permutation(size, (seed, 1)).tolist()) == list(range(size))


def test_orders_look_random():
    """Mean displacement and first items over many keys are those of uniform orders."""
    for make in (
        lambda key: [RandomOrder(16, (key,))[i] for i in range(16)],
        lambda key: permutation(16, (key,)).tolist(),
    ):
        table = np.zeros((16, 16))
        for key in range(800):
            table[np.arange(16), make(key)] += 1
        chi2 = ((table - 50) ** 2 / 50).sum()
        assert 130 < chi2 < 340  # 225 degrees of freedom: mean 225, deviation 21


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_no_token_is_an_error(tmp_path, documents):
    data = dataset(tmp_path, documents)
    with pytest.raises(DataError, match="no token"):
        ShuffledSamples(data, sequence_length=4, seed=0)
    with pytest.raises(DataError, match="no token"):
        SequentialSamples(data, sequence_length=4)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1),
    st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_validation_predicts_each_token_once(tmp_path_factory, lengths, size):
    data = dataset(tmp_path_factory.mktemp("v"), numbered(lengths))
    samples = SequentialSamples(data, sequence_length=size)
    got = [samples[i] for i in range(len(samples))]
    labels = np.concatenate([sample.tokens[1 : sample.num_valid] for sample in got])
    assert labels.tolist() == list(range(1, data.num_tokens))
    begins = np.unique(data.document_offsets()[:-1]).tolist()
    for index, sample in enumerate(got):
        window = range(index * size, index * size + sample.num_valid)
        assert sample.starts.tolist() == [b - index * size for b in begins if b in window]


def test_validation_of_one_token_is_an_error(tmp_path):
    with pytest.raises(DataError, match="one token"):
        SequentialSamples(dataset(tmp_path, [[1]]), sequence_length=4)
