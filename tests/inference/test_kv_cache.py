import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.inference.kv_cache import EncoderDecoderCache, KVCache


def piece(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 2, 3, generator=generator)


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    capacity=st.integers(1, 20),
    batch=st.integers(1, 3),
)
def test_pieces_of_any_length_come_back_as_their_concatenation(lengths, capacity, batch):
    cache = KVCache(batch, capacity)
    keys, values, segments = [], [], []
    for number, length in enumerate(lengths):
        keys.append(piece(batch, length, number))
        values.append(piece(batch, length, 1000 + number))
        segments.append(torch.full((batch, length), number))
        assert torch.equal(cache.key_segments(segments[-1]), torch.cat(segments, 1))
        for layer in ("a", "b"):
            sign = 1 if layer == "a" else -1
            key, value = cache.extend(layer, sign * keys[-1], sign * values[-1])
            assert torch.equal(key, sign * torch.cat(keys, 1))
            assert torch.equal(value, sign * torch.cat(values, 1))
    assert cache.length == sum(lengths)


def test_enough_capacity_means_that_nothing_moves():
    cache = KVCache(1, 8)
    places = {cache.extend("a", piece(1, 1, i), piece(1, 1, i))[0].data_ptr() for i in range(8)}
    assert len(places) == 1


def test_growth_moves_the_data_a_logarithmic_number_of_times():
    cache = KVCache(1, 1)
    moves, last = 0, None
    for number in range(512):
        key, _ = cache.extend("a", piece(1, 1, number), piece(1, 1, number))
        moves += key.stride(0) != last  # the stride of the batch is the room of a row
        last = key.stride(0)
    assert moves == 10  # 1, 2, 4 ... 512


def test_keys_and_values_keep_their_dtype():
    cache = KVCache(1, 2)
    key, value = cache.extend("a", piece(1, 3, 0).bfloat16(), piece(1, 3, 1).half())
    assert (key.dtype, value.dtype) == (torch.bfloat16, torch.float16)


def test_reset_starts_a_new_batch_in_the_same_memory():
    cache = KVCache(2, 4)
    cache.key_segments(torch.zeros(2, 3, dtype=torch.long))
    before, _ = cache.extend("a", piece(2, 3, 0), piece(2, 3, 1))
    cache.reset()
    assert cache.length == 0
    new = torch.ones(2, 2, dtype=torch.long)
    assert torch.equal(cache.key_segments(new), new)
    after, _ = cache.extend("a", piece(2, 2, 2), piece(2, 2, 3))
    assert torch.equal(after, piece(2, 2, 2))
    assert after.data_ptr() == before.data_ptr()


def test_reorder_lets_rows_continue_others():
    cache = KVCache(3, 2)
    key, value = piece(3, 4, 0), piece(3, 4, 1)
    segments = torch.arange(3)[:, None].expand(3, 4)
    cache.key_segments(segments)
    cache.extend("a", key, value)
    rows = torch.tensor([2, 2, 0, 1])
    cache.reorder(rows)
    new = piece(4, 1, 2)
    all_keys, all_values = cache.extend("a", new, new)
    assert torch.equal(all_keys, torch.cat([key[rows], new], 1))
    assert torch.equal(all_values, torch.cat([value[rows], new], 1))
    all_segments = cache.key_segments(torch.zeros(4, 1, dtype=torch.long))
    assert torch.equal(all_segments[:, :4], segments[rows])


@pytest.mark.parametrize("rows", [[3], [-1], [], [[0]]])
def test_reorder_refuses_what_is_not_a_row(rows):
    with pytest.raises(ValueError, match="from 0 to 2"):
        KVCache(3, 2).reorder(torch.tensor(rows, dtype=torch.long))


@pytest.mark.parametrize("rows", [1, 3])
def test_another_batch_is_refused_and_not_broadcast(rows):
    cache = KVCache(2, 4)
    cache.key_segments(torch.zeros(2, 1, dtype=torch.long))
    cache.extend("a", piece(2, 1, 0), piece(2, 1, 0))
    with pytest.raises(ValueError, match=f"{rows} rows but the cache was made for 2"):
        cache.extend("a", piece(rows, 1, 0), piece(rows, 1, 0))
    with pytest.raises(ValueError, match="values of a"):
        cache.extend("a", piece(2, 1, 0), piece(rows, 1, 0))
    with pytest.raises(ValueError, match="segments"):
        cache.key_segments(torch.zeros(rows, 1, dtype=torch.long))


@pytest.mark.parametrize(("batch", "capacity"), [(0, 1), (1, 0)])
def test_an_empty_cache_is_refused(batch, capacity):
    with pytest.raises(ValueError, match="at least 1 of both"):
        KVCache(batch, capacity)


def test_a_source_is_made_once_and_follows_its_rows():
    cache, made = EncoderDecoderCache(2, 4), []

    def make():
        made.append(1)
        return piece(2, 5, 1), piece(2, 5, 2)

    segments = torch.tensor([[0, 0, 0, 0, 0], [0, 0, -1, -1, -1]])
    assert not cache.encoded
    assert torch.equal(cache.source_segments(segments), segments)
    key, value = cache.source("a", make)
    cache.extend("a", piece(2, 1, 3), piece(2, 1, 4))
    cache.set_encoded()
    assert cache.encoded
    empty = segments[:, :0]
    assert torch.equal(cache.source_segments(empty), segments)
    assert cache.source("a", make)[0] is key
    assert made == [1]
    rows = torch.tensor([1, 0, 1])
    cache.reorder(rows)
    assert torch.equal(cache.source_segments(empty[rows]), segments[rows])
    found = cache.source("a", make)
    assert torch.equal(found[0], key[rows])
    assert torch.equal(found[1], value[rows])
    more = piece(3, 1, 5)
    assert torch.equal(cache.extend("a", more, more)[0], torch.cat([piece(2, 1, 3)[rows], more], 1))
    with pytest.raises(ValueError, match="source segments have 2 rows"):
        cache.source_segments(empty)
    with pytest.raises(ValueError, match="source keys of b have 2 rows"):
        cache.source("b", make)
    cache.reset()
    assert not cache.encoded
    assert torch.equal(cache.source_segments(segments[rows]), segments[rows])
    cache.source("a", lambda: (more, more))
    assert cache.length == 0
