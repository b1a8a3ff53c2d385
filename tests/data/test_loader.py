import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.causal_lm import CausalLM
from ds_engine.data.loader import BatchLoader
from ds_engine.data.samples import Sample
from ds_engine.errors import ConfigError, DataError


class Numbers:
    """Sample i holds i, i, i, ...; sample ``bad`` cannot be read."""

    def __init__(self, bad=None):
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad:
            raise DataError(f"sample {index} is unreadable")
        return Sample(np.full(5, index, dtype=np.int64), np.array([0, 3]), 5)


def loader(dataset=None, mbs=2, rank=0, dp=1, prefetch=2):
    return BatchLoader(
        dataset or Numbers(),
        CausalLM(4),
        micro_batch_size=mbs,
        data_parallel_rank=rank,
        data_parallel_size=dp,
        prefetch=prefetch,
    )


def test_shapes_types_and_order():
    with loader(mbs=2, rank=1, dp=2) as batches:
        step = batches.step(100, 8)
    assert len(step) == 2
    (tokens, positions, segments, sample_ids), (labels, loss_mask) = step[1]
    assert sample_ids.tolist() == [106, 107]
    for tensor in (tokens, positions, segments, labels):
        assert tensor.shape == (2, 4)
        assert tensor.dtype == torch.int64
    assert tokens[0].tolist() == [106] * 4
    assert loss_mask.dtype == torch.float32
    assert loss_mask[0].tolist() == [1, 1, 0, 1]
    assert segments[0].tolist() == [0, 0, 0, 1]


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([0, 2]))
@settings(max_examples=20, deadline=None)
def test_a_step_consumes_the_same_samples_in_every_layout(dp, mbs, prefetch):
    global_batch = 72
    for first in (0, 72, 36):
        found = []
        for rank in range(dp):
            with loader(mbs=mbs, rank=rank, dp=dp, prefetch=prefetch) as batches:
                for number, (inputs, _) in enumerate(batches.step(first, global_batch)):
                    assert inputs[-1][0] == first + (number * dp + rank) * mbs
                    assert inputs[0][:, 0].tolist() == inputs[-1].tolist()
                    found += inputs[-1].tolist()
        assert sorted(found) == list(range(first, first + global_batch))


def equal(left, right):
    return all(
        torch.equal(a, b)
        for one, two in zip(left, right, strict=True)
        for part, other in zip(one, two, strict=True)
        for a, b in zip(part, other, strict=True)
    )


def test_resume_at_any_step_gives_equal_batches():
    with loader(prefetch=2) as straight:
        expected = [straight.step(4 * k, 4) for k in range(6)]
    for begin in range(6):
        with loader(prefetch=begin % 3) as resumed:
            for k in range(begin, 6):
                assert equal(resumed.step(4 * k, 4), expected[k])


def test_the_batch_size_may_change_in_between():
    with loader() as batches, loader(prefetch=0) as plain:
        first = 0
        for size in (4, 4, 8, 8, 6):
            assert equal(batches.step(first, size), plain.step(first, size))
            first += size


def test_batches_ahead_are_made_in_the_background():
    asked = []
    done = threading.Event()

    class Watch(Numbers):
        def __getitem__(self, index):
            asked.append((index, threading.current_thread() is threading.main_thread()))
            if index == 11:
                done.set()
            return super().__getitem__(index)

    with loader(Watch(), prefetch=2) as batches:
        batches.step(0, 4)
        assert done.wait(10)
        before = len(asked)
        batches.step(4, 4)
        assert batches.wait_seconds < 5
    assert [index for index, _ in asked[:before]] == list(range(12))
    assert all(main == (index < 4) for index, main in asked)


def test_an_error_ahead_is_raised_when_its_step_is_asked_for():
    with loader(Numbers(bad=9), prefetch=2) as batches:
        batches.step(0, 4)
        batches.step(4, 4)
        with pytest.raises(DataError, match="sample 9 is unreadable"):
            batches.step(8, 4)
        batches.step(12, 4)  # the loader still works


def test_close_is_quick_and_ends_the_thread():
    batches = loader(prefetch=3)
    batches.step(0, 4)
    batches.close()
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("data-prefetch")]
    assert len(batches.step(4, 4)) == 2  # without a thread, but right


@pytest.mark.parametrize(
    "call",
    [
        lambda: loader(mbs=0),
        lambda: loader(rank=2, dp=2),
        lambda: loader(prefetch=-1),
        lambda: loader(mbs=2, dp=2).step(0, 6),
        lambda: loader().step(0, 0),
        lambda: loader().step(-1, 2),
    ],
)
def test_impossible_requests(call):
    with pytest.raises(ConfigError):
        call()
