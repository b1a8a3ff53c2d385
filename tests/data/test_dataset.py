import json
from dataclasses import dataclass

import numpy as np
import pytest

from ds_engine.data.causal_lm import CausalLM
from ds_engine.data.dataset import build_dataset, build_validation
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.errors import DataError


@dataclass(frozen=True)
class Source:
    path: str
    weight: float = 1.0


def write(prefix, first, count, document=10, vocab_size=100_000):
    """``count`` documents whose tokens count up from ``first``: a token tells its source."""
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for k in range(count):
            writer.add_document(range(first + k * document, first + (k + 1) * document))
    return str(prefix)


@pytest.fixture
def paths(tmp_path):
    return [write(tmp_path / name, 10_000 * k, 40) for k, name in enumerate("abc")]


def origin(sample):
    return int(sample.tokens[0]) // 10_000


def test_weights_hold_and_samples_are_pure(paths):
    sources = [Source(paths[0], 0.7), Source(paths[1], 0.3)]
    data = build_dataset(sources, CausalLM(8), seed=1, vocab_size=100_000)
    origins = [origin(data[i]) for i in range(100)]
    assert origins.count(0) == 70
    assert data.consumed(100) == {paths[0]: 70, paths[1]: 30}
    assert data.epochs(100)[paths[0]] == pytest.approx(70 * 8 / 400)
    again = build_dataset(sources, CausalLM(8), seed=1)
    assert all(np.array_equal(again[i].tokens, data[i].tokens) for i in (99, 3, 50, 0))


def test_weights_may_change_without_losing_or_repeating(paths):
    """Each source continues where it stopped, also one that pauses and returns."""
    plans = [
        (50, [Source(paths[0], 0.8), Source(paths[1], 0.2)]),
        (70, [Source(paths[2], 1.0), Source(paths[0], 1.0)]),
        (90, [Source(paths[1], 0.5), Source(paths[0], 0.5)]),
    ]
    seen = {path: [] for path in paths}
    state, begin = None, 0
    for end, sources in plans:
        data = build_dataset(sources, CausalLM(8), seed=1, state=state, first_sample=begin)
        # Stopping and resuming with the same weights changes nothing.
        middle = json.loads(json.dumps(data.state(), sort_keys=True))
        data = build_dataset(sources, CausalLM(8), seed=1, state=middle, first_sample=begin + 3)
        for index in range(begin, end):
            source, number = data.locate(index)
            seen[data.paths[source]].append(number)
        state, begin = json.loads(json.dumps(data.state())), end
    for path, numbers in seen.items():
        assert numbers == list(range(len(numbers))), path
    assert data.consumed(90) == {path: len(numbers) for path, numbers in seen.items()}
    with pytest.raises(IndexError, match="other weights"):
        data[60]
    with pytest.raises(DataError, match="before 70"):
        build_dataset([Source(paths[0])], CausalLM(8), seed=1, state=state, first_sample=60)
    with pytest.raises(DataError, match="keys"):
        build_dataset([Source(paths[0])], CausalLM(8), seed=1, state={"start": 1})


def test_ids_outside_the_model_vocabulary(tmp_path, paths):
    with pytest.raises(DataError, match=r"token id 399 is.*model.vocab_size = 300"):
        build_dataset([Source(paths[0])], CausalLM(8), seed=1, vocab_size=300)
    with pytest.raises(DataError, match="token id 399"):
        build_validation([Source(paths[0])], CausalLM(8), vocab_size=300)
    prefix = tmp_path / "late"
    with IndexedWriter(prefix, vocab_size=70_000) as writer:
        writer.add_document(np.zeros(1 << 20, dtype=np.int64))
        writer.add_document([69_999] * 3)
    data = build_dataset([Source(str(prefix))], CausalLM(1 << 20), seed=1, vocab_size=9)
    with pytest.raises(DataError, match=r"late\.bin, sample .*: token id 69999"):
        for index in range(3):
            data[index]


def test_unusable_sources(tmp_path, paths):
    with pytest.raises(DataError, match="twice"):
        build_dataset([Source(paths[0]), Source(paths[0])], CausalLM(8), seed=1)
    with pytest.raises(DataError, match="no data source"):
        build_dataset([], CausalLM(8), seed=1)
    with pytest.raises(DataError, match="missing"):
        build_dataset([Source(str(tmp_path / "none"))], CausalLM(8), seed=1)
    with pytest.raises(DataError, match="weights differ"):
        build_validation([Source(paths[0]), Source(paths[1], 2.0)], CausalLM(8))


def test_validation_covers_each_token_once_and_ends_softly(tmp_path, paths):
    small = write(tmp_path / "small", 90_000, 1, document=13)
    data = build_validation([Source(paths[0]), Source(small)], CausalLM(8))
    assert len(data) == 50 + 2
    labels = np.concatenate([data[i].tokens[1 : data[i].num_valid] for i in range(len(data))])
    assert sorted(labels.tolist()) == [*range(1, 400), *range(90_001, 90_013)]
    assert data[len(data)].num_valid == 0
    assert data[10**9].num_valid == 0
    half = [origin(data[i]) for i in range(26)]
    assert half.count(9) == 1  # sources are interleaved: half of the set holds half of each
