import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.schema import BatchSizeWarmupConfig
from ds_engine.errors import ConfigError
from ds_engine.training.batch_warmup import global_batch_size

RAMP = BatchSizeWarmupConfig(start=32, increment=32, samples=1000)


def walk(steps, config, final):
    """The batch sizes of the first steps, one after the other."""
    consumed, sizes = 0, []
    for _ in range(steps):
        sizes.append(global_batch_size(consumed, config=config, final=final))
        consumed += sizes[-1]
    return sizes


def test_each_size_lasts_for_its_share_of_the_samples():
    # 160 = 32 + 4 x 32: four increments of 250 samples each.
    sizes = {n: global_batch_size(n, config=RAMP, final=160) for n in (0, 249, 250, 999, 1000, 1e6)}
    assert list(sizes.values()) == [32, 32, 64, 128, 160, 160]


def test_without_a_ramp_every_batch_is_the_final_one():
    assert walk(3, None, 64) == [64] * 3
    assert global_batch_size(10**15 + 7, config=None, final=64) == 64


def test_a_ramp_that_starts_at_the_final_size():
    assert walk(3, BatchSizeWarmupConfig(start=64, increment=8, samples=100), 64) == [64] * 3


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 40),
    increments=st.integers(0, 12),
    samples=st.integers(1, 3000),
)
def test_sizes_never_fall_and_end_at_the_final_one(start, increment, increments, samples):
    config = BatchSizeWarmupConfig(start=start, increment=increment, samples=samples)
    final = start + increments * increment
    sizes = walk(60, config, final)
    assert sizes == sorted(sizes)
    assert sizes[0] == (start if increments else final)
    assert all((size - start) % increment == 0 for size in sizes)
    # The ramp is over exactly at ``samples``: each size has its share of it, down to one sample.
    assert global_batch_size(samples, config=config, final=final) == final
    if increments and samples >= increments:
        assert global_batch_size(samples - 1, config=config, final=final) == final - increment


def test_the_arithmetic_is_exact_for_huge_runs():
    config = BatchSizeWarmupConfig(start=32, increment=32, samples=47 * 10**15)
    found = [global_batch_size(47 * 10**15 - n, config=config, final=1536) for n in (0, 1)]
    assert found == [1536, 1504]
    at = [global_batch_size(10**15 - n, config=config, final=1536) for n in (0, 1)]
    assert at == [64, 32]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BatchSizeWarmupConfig(128, 8, 100), "start = 128 is above train_batch_size = 64"),
        (BatchSizeWarmupConfig(8, 10, 100), "increment = 10 does not lead.*a divisor of 56"),
    ],
)
def test_ramps_that_miss_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        global_batch_size(0, config=config, final=64)


@pytest.mark.parametrize("config", [None, RAMP])
def test_negative_positions_are_refused(config):
    with pytest.raises(ConfigError, match="consumed_samples = -1 is negative"):
        global_batch_size(-1, config=config, final=160)
