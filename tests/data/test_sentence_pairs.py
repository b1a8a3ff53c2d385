import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.masking import MaskingOptions
from ds_engine.data.objective import SpecialIds
from ds_engine.data.sentence_pairs import SentencePairs, chunk_offsets
from ds_engine.errors import ConfigError, DataError

VOCAB = 3000
PAD, CLS, SEP, MASK, EOD = 0, 1, 2, 3, 4
IDS = SpecialIds(pad=PAD, cls=CLS, sep=SEP, mask=MASK, eos=EOD)
KINDS = ["next_sentence", "sentence_order"]


def write(prefix, documents):
    with IndexedWriter(prefix, vocab_size=VOCAB) as writer:
        for document in documents:
            for sentence in document:
                writer.add_sequence(sentence)
            writer.end_document()
    return IndexedDataset(prefix)


def numbered(*documents):
    """Documents of sentences of the given lengths, whose tokens count up over the whole data."""
    count = iter(range(10, VOCAB))
    return [[[next(count) for _ in range(size)] for size in sizes] for sizes in documents]


def parts(sample):
    """(A, B) of a sample, B None where there is none."""
    tokens = sample.tokens.tolist()
    assert tokens[0] == CLS and tokens[-1] == SEP and tokens[sample.second - 1] == SEP
    first = tokens[1 : sample.second - 1]
    return first, tokens[sample.second : -1] if sample.second < len(tokens) else None


def greedy(documents, limit):
    """Chunks (lists of tokens), written as plain loops."""
    chunks = []
    for document in documents:
        current = []
        for sentence in document:
            pieces = [sentence[at : at + limit] for at in range(0, len(sentence), limit)]
            for piece in pieces:
                if current and len(current) + len(piece) > limit:
                    chunks.append(current)
                    current = []
                current = current + piece
        if current:
            chunks.append(current)
    return chunks


corpora = st.lists(st.lists(st.integers(0, 14), max_size=8), min_size=1, max_size=150)


@given(corpora, st.integers(5, 20))
@settings(max_examples=150, deadline=None)
def test_chunks_take_whole_sentences_of_one_document(sizes, limit):
    documents = numbered(*sizes)[: len(sizes)] if sum(map(sum, sizes)) < VOCAB - 10 else []
    lengths = [len(sentence) for document in documents for sentence in document]
    sentences = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)
    starts = np.cumsum([0, *(len(document) for document in documents)])
    offsets = chunk_offsets(sentences, sentences[starts], limit)
    tokens = [token for document in documents for sentence in document for token in sentence]
    found = [tokens[a:b] for a, b in itertools.pairwise(offsets)]
    assert found == greedy(documents, limit)


@pytest.mark.parametrize("limit", [5, 25, 26, 80, 200, 201])
@pytest.mark.parametrize("empty", [0, 300])
def test_one_document_is_divided_as_each_of_many(empty, limit):
    """The loop over few documents and the steps over many agree, also with empty sentences."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 300)
    lengths[rng.integers(0, 300, 20)] = 0
    lengths[0] = 1  # would often still fit behind the end of the document before
    lengths = np.insert(lengths, 7, np.zeros(empty, dtype=np.int64))
    one = np.concatenate(([0], np.cumsum(lengths)))
    many = np.concatenate(([0], np.cumsum(np.tile(lengths, 100))))
    documents = np.arange(101) * one[-1]
    single = chunk_offsets(one, one[[0, -1]], limit)
    together = chunk_offsets(many, documents, limit)
    assert (together == np.append((single[:-1] + documents[:-1, None]).ravel(), many[-1])).all()
    assert (np.diff(single) <= limit).all() and (np.diff(single) > 0).all()


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=2, max_size=12), st.integers(8, 24)
)
@settings(max_examples=60, deadline=None)
def test_sentence_order_loses_no_token(tmp_path_factory, sizes, size):
    documents = numbered([2, 3], *sizes)
    data = write(tmp_path_factory.mktemp("s") / "x", documents)
    objective = SentencePairs("sentence_order", size, IDS, VOCAB, 3)
    samples = objective.samples(data, seed=1)
    validation = objective.validation(data)
    assert samples.epoch_samples == len(validation) and samples.num_tokens == data.num_tokens
    ends = np.cumsum([len(sentence) for document in documents for sentence in document]) + 10
    for source, first in ((samples, 0), (samples, len(validation)), (validation, 0)):
        read = []
        for index in range(first, first + len(validation)):
            sample = source[index]
            one, two = parts(sample)
            if two is None:
                assert sample.label == 0
                two = []
            elif sample.label:
                one, two = two, one
            read.append(one + two)
            assert not two or (one[-1] + 1 == two[0] and two[0] in ends)
        tokens = list(itertools.chain.from_iterable(read))
        assert sorted(tokens) == list(range(10, 10 + data.num_tokens))
        if source is validation:
            assert tokens == list(range(10, 10 + data.num_tokens))


def corpus(tmp_path, documents=60):
    rng = np.random.default_rng(4)
    sizes = [rng.integers(2, 6, rng.integers(1, 9)).tolist() for _ in range(documents)]
    made = numbered(*sizes)
    return made, write(tmp_path / "x", made)


def test_labels_say_what_was_done(tmp_path):
    documents, data = corpus(tmp_path)
    owner = {
        token: number
        for number, document in enumerate(documents)
        for sentence in document
        for token in sentence
    }
    begins = {sentence[0] for document in documents for sentence in document}
    ends = {sentence[-1] for document in documents for sentence in document}
    for kind in KINDS:
        objective = SentencePairs(kind, 23, IDS, VOCAB, 0)
        samples = objective.samples(data, seed=5)
        count = 40 * int(samples.epoch_samples)
        labels, lengths, others, broken = [], [[], []], set(), 0
        for index in range(count):
            sample = samples[index]
            one, two = parts(sample)
            assert len(sample.tokens) <= 23
            if two is None:
                assert len({owner[token] for token in one}) == 1
                continue
            labels.append(sample.label)
            lengths[sample.label].append(len(sample.tokens))
            assert {one[0], two[0]} <= begins
            broken += not {one[-1], two[-1]} <= ends
            same = owner[one[0]] == owner[two[0]]
            if kind == "sentence_order":
                assert same and (two[-1] < one[0] if sample.label else one[-1] + 1 == two[0])
            else:
                assert same == (not sample.label)
                assert same == (one[-1] + 1 == two[0])
                assert len({owner[token] for token in two}) == 1
                others.add(owner[two[0]])
        # Cut only where the first part leaves room for less than any sentence of the chunk.
        assert broken <= (0.02 * len(labels) if kind == "next_sentence" else 0)
        share = np.mean(labels)
        assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(len(labels))
        # The length of a row must not give the label away.
        assert abs(np.mean(lengths[0]) - np.mean(lengths[1])) < 1.0
        if kind == "next_sentence":
            assert len(others) > 50


def test_epochs_have_other_orders_and_pairs(tmp_path):
    _, data = corpus(tmp_path)
    samples = SentencePairs("sentence_order", 23, IDS, VOCAB, 0).samples(data, seed=5)
    size = int(samples.epoch_samples)
    first, second = ([samples[e * size + k].tokens.tolist() for k in range(size)] for e in (0, 1))
    assert first != second and sorted(first) != sorted(second)
    again = SentencePairs("sentence_order", 23, IDS, VOCAB, 9).samples(data, seed=5)
    assert [again[k].tokens.tolist() for k in range(size)] == first
    other = SentencePairs("sentence_order", 23, IDS, VOCAB, 0).samples(data, seed=6)
    assert [other[k].tokens.tolist() for k in range(size)] != first


@pytest.mark.parametrize("kind", KINDS)
def test_rows(tmp_path, kind):
    _, data = corpus(tmp_path)
    options = MaskingOptions(max_ngram=3)
    objective = SentencePairs(kind, 32, IDS, VOCAB, 0, options)
    validation = objective.validation(data)
    kinds = set()
    for number in range(len(validation)):
        sample = validation[number]
        row = objective(sample, number)
        tokens, positions, segments, types = row.inputs
        labels, mask, sentence, sentence_mask = row.targets
        used = len(sample.tokens)
        assert labels.tolist() == sample.tokens.tolist() + [PAD] * (32 - used)
        assert positions.tolist() == [*range(used), *range(32 - used)]
        assert segments.tolist() == [0] * used + [-1] * (32 - used)
        assert types.tolist() == [int(sample.second <= at < used) for at in range(32)]
        assert (tokens == labels)[mask == 0].all()
        words = int((labels > EOD).sum())
        assert mask.sum() == max(1, int(0.15 * words + 0.5)) and not mask[labels <= EOD].any()
        assert sentence.shape == sentence_mask.shape == ()
        assert sentence.dtype == np.int64 and sentence_mask.dtype == np.float32
        assert sentence_mask == (parts(sample)[1] is not None) and sentence == sample.label
        kinds.add((int(sentence), float(sentence_mask)))
    assert kinds == {(0, 0.0), (0, 1.0), (1, 1.0)}
    empty = objective(objective.empty(), 0)
    assert len(objective.empty().tokens) and empty.inputs[0].shape == (32,)
    assert not empty.targets[1].any() and empty.targets[3] == 0


@pytest.mark.parametrize("end", [SEP, EOD])
def test_end_of_document_ids_do_not_tell_the_order(tmp_path, end):
    documents = [[*document, [end]] for document in numbered([3, 4], [2, 2], [5], [])]
    documents[0][-2:] = [[*documents[0][-2], end]]
    data = write(tmp_path / "x", documents)
    for kind in KINDS:
        samples = SentencePairs(kind, 16, IDS, VOCAB, 0).samples(data, seed=0)
        for index in range(80):
            one, two = parts(samples[index])
            assert end not in one and (two is None or (two and end not in two))


@pytest.mark.parametrize("kind", KINDS)
def test_long_sentences_are_cut(tmp_path, kind):
    data = write(tmp_path / "x", numbered([30, 2, 3], [50]))
    objective = SentencePairs(kind, 13, IDS, VOCAB, 0)
    pieces = [objective.validation(data)[k] for k in range(len(objective.validation(data)))]
    assert [len(piece.tokens) - 2 for piece in pieces if parts(piece)[1] is None] == [10] * 8
    samples = objective.samples(data, seed=0)
    for index in range(100):
        assert len(samples[index].tokens) <= 13
        objective(samples[index], index)


def test_what_cannot_work_is_refused(tmp_path):
    single = write(tmp_path / "single", numbered([3], [4]))
    for kind in KINDS:
        with pytest.raises(DataError, match=r"two sentences.*--split-sentences"):
            SentencePairs(kind, 16, IDS, VOCAB, 0).samples(single, seed=0)
    one = write(tmp_path / "one", numbered([3, 4], []))
    with pytest.raises(DataError, match=r"one document.*sentence_order"):
        SentencePairs("next_sentence", 16, IDS, VOCAB, 0).validation(one)
    SentencePairs("sentence_order", 16, IDS, VOCAB, 0).validation(one)
    with pytest.raises(DataError, match="no token"):
        SentencePairs("sentence_order", 16, IDS, VOCAB, 0).validation(write(tmp_path / "no", [[]]))
    long = write(tmp_path / "long", numbered([9, 9], [9, 9]))
    with pytest.raises(DataError, match=r"fit into 13 tokens.*raise data.sequence_length"):
        SentencePairs("sentence_order", 16, IDS, VOCAB, 0).samples(long, seed=0)
    with pytest.raises(ConfigError, match="no sep token"):
        SentencePairs("sentence_order", 16, SpecialIds(pad=0, cls=1, mask=2), VOCAB, 0)
    with pytest.raises(ConfigError, match="sequence_length = 7"):
        SentencePairs("sentence_order", 7, IDS, VOCAB, 0)
