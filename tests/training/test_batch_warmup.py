import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.schema import BatchSizeWarmupConfig
from ds_engine.errors import ConfigError
from ds_engine.training.batch_warmup import (
    batch_stages,
    check_batch_warmup,
    global_batch_size,
    position_after,
    steps_after,
)

RAMP = BatchSizeWarmupConfig(start=32, increment=32, samples=1000)


def walk(steps, config, final):
    """Consumed samples before each step, one step at a time."""
    consumed = [0]
    for _ in range(steps):
        consumed.append(consumed[-1] + global_batch_size(consumed[-1], config=config, final=final))
    return consumed


def test_each_size_lasts_for_its_share_of_the_samples():
    # 160 = 32 + 4 x 32: four increments of 250 samples each.
    sizes = {n: global_batch_size(n, config=RAMP, final=160) for n in (0, 249, 250, 999, 1000, 1e6)}
    assert list(sizes.values()) == [32, 32, 64, 128, 160, 160]


def test_without_a_ramp_every_batch_is_the_final_one():
    assert global_batch_size(7, config=None, final=64) == 64
    assert position_after(10**9, config=None, final=64) == 64 * 10**9
    assert steps_after(64 * 10**9 + 63, config=None, final=64) == 10**9


def test_a_ramp_that_starts_at_the_final_size():
    config = BatchSizeWarmupConfig(start=64, increment=8, samples=100)
    assert walk(3, config, 64) == [0, 64, 128, 192]
    assert [position_after(n, config=config, final=64) for n in range(4)] == [0, 64, 128, 192]


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 40),
    increments=st.integers(0, 12),
    samples=st.integers(1, 3000),
)
def test_positions_equal_the_walk_step_by_step(start, increment, increments, samples):
    config = BatchSizeWarmupConfig(start=start, increment=increment, samples=samples)
    final = start + increments * increment
    consumed = walk(60, config, final)
    for step, position in enumerate(consumed):
        assert position_after(step, config=config, final=final) == position
        assert steps_after(position, config=config, final=final) == step
    for step in range(60):
        assert steps_after(consumed[step + 1] - 1, config=config, final=final) == step


@given(start=st.integers(1, 40), increments=st.integers(0, 12), samples=st.integers(1, 3000))
def test_sizes_never_fall_and_end_at_the_final_one(start, increments, samples):
    config = BatchSizeWarmupConfig(start=start, increment=3, samples=samples)
    final = start + 3 * increments
    sizes = [stage.batch_size for stage in batch_stages(config, final=final)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == final
    assert len(sizes) <= increments + 1


def test_a_huge_run_is_a_few_stages_not_a_loop_over_steps():
    config = BatchSizeWarmupConfig(start=32, increment=32, samples=10**15)
    stages = batch_stages(config, final=1536)
    assert len(stages) == 48
    last = stages[-1]
    assert 10**15 <= last.first_sample < 10**15 + 1536
    assert position_after(last.first_step + 5, config=config, final=1536) == (
        last.first_sample + 5 * 1536
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BatchSizeWarmupConfig(0, 8, 100), "start = 0 must be at least 1"),
        (BatchSizeWarmupConfig(8, 0, 100), "increment = 0 must be at least 1"),
        (BatchSizeWarmupConfig(8, 8, -1), "samples = -1 is negative"),
        (BatchSizeWarmupConfig(128, 8, 100), "start = 128 is above train_batch_size = 64"),
        (BatchSizeWarmupConfig(8, 10, 100), "increment = 10 does not lead.*a divisor of 56"),
    ],
)
def test_ramps_that_miss_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        global_batch_size(0, config=config, final=64)


def test_every_batch_of_the_ramp_must_divide_among_the_ranks():
    check_batch_warmup(BatchSizeWarmupConfig(16, 16, 100), final=64, multiple=8)
    with pytest.raises(ConfigError, match=r"increment = 4 is not a multiple of .* = 8"):
        check_batch_warmup(BatchSizeWarmupConfig(16, 4, 100), final=64, multiple=8)


def test_negative_positions_are_refused():
    for call in (global_batch_size, position_after, steps_after):
        with pytest.raises(ConfigError, match="negative"):
            call(-1, config=RAMP, final=160)
