"""The batch triangle: solved when it can be, explained when it cannot."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.batch import (
    ACCUMULATION,
    MICRO,
    TRAIN,
    BatchPlan,
    check_warmup,
    data_parallel_degree,
    explain_data_parallel,
    solve_batch,
)
from ds_engine.config.schema import BatchSizeWarmupConfig, ParallelConfig
from ds_engine.errors import ConfigError

sizes = st.integers(1, 200)


@given(sizes, sizes, sizes, st.sets(st.sampled_from([TRAIN, MICRO, ACCUMULATION]), min_size=2))
def test_two_or_three_values_give_the_triangle(micro, accumulation, degree, given_keys) -> None:
    plan = BatchPlan(micro * accumulation * degree, micro, accumulation, degree)
    section = {key: value for key, value in plan.to_deepspeed().items() if key in given_keys}
    assert solve_batch(section, degree) == plan


@given(sizes, sizes)
def test_one_value_means_one_micro_batch(size, degree) -> None:
    assert solve_batch({MICRO: size}, degree) == BatchPlan(size * degree, size, 1, degree)
    assert solve_batch({TRAIN: size * degree}, degree) == BatchPlan(size * degree, size, 1, degree)


@given(st.integers(1, 5000), sizes, sizes, st.none() | sizes)
def test_a_solution_is_consistent_and_a_refusal_names_values_that_work(
    train, micro, degree, accumulation
) -> None:
    section = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    try:
        plan = solve_batch(section, degree)
    except ConfigError as error:
        assert train % (micro * degree) or train != micro * (accumulation or 0) * degree
        proposed = re.findall(rf"use {TRAIN} = (\d+)(?: or (\d+))?", str(error))[0]
        for value in filter(None, proposed):
            solve_batch({**section, TRAIN: int(value)}, degree)
    else:
        assert plan.train_batch_size == train
        assert plan.quantum * plan.accumulation == train


def test_messages_explain_every_number() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=2)
    origin = explain_data_parallel(parallel, 32, "the hostfile")
    section = {TRAIN: 500, MICRO: 4}
    with pytest.raises(ConfigError) as caught:
        solve_batch(section, 8, origin)
    for part in ("= 500", "= 4", "data-parallel degree 8", "world size 32 from the hostfile"):
        assert part in str(caught.value)
    assert "tensor 2 x pipeline 2 x context 1" in str(caught.value)
    assert f"use {TRAIN} = 480 or 512" in str(caught.value)
    section = {TRAIN: 512, MICRO: 4, ACCUMULATION: 8}
    with pytest.raises(ConfigError, match=rf"use {TRAIN} = 256, {ACCUMULATION} = 16, or"):
        solve_batch(section, 8, origin)
    with pytest.raises(ConfigError, match="are both missing"):
        solve_batch({ACCUMULATION: 4}, 8)


@pytest.mark.parametrize("value", [0, -4, 1.5, "4", True])
def test_sizes_must_be_positive_integers(value) -> None:
    with pytest.raises(ConfigError, match="must be an integer, at least 1"):
        solve_batch({MICRO: value}, 2)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_data_parallelism_is_what_is_left(world, tensor, pipeline, context) -> None:
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, context=context)
    try:
        degree = data_parallel_degree(parallel, world, "--world-size")
    except ConfigError as error:
        assert world % (tensor * pipeline * context)
        assert f"world size = {world} (from --world-size)" in str(error)
    else:
        assert degree * tensor * pipeline * context == world


@pytest.mark.parametrize(
    ("warmup", "message"),
    [
        (BatchSizeWarmupConfig(16, 16, 100), None),
        (BatchSizeWarmupConfig(64, 8, 100), None),
        (BatchSizeWarmupConfig(12, 4, 100), "start = 12 is not a multiple of 8"),
        (BatchSizeWarmupConfig(16, 12, 100), "increment = 12 is not a multiple of 8"),
        (BatchSizeWarmupConfig(128, 8, 100), "start = 128 is above train_batch_size = 64"),
        (BatchSizeWarmupConfig(16, 32, 100), "use a divisor of 48"),
    ],
)
def test_growing_batches_are_whole_micro_batches(warmup, message) -> None:
    problems = check_warmup(warmup, BatchPlan(64, 4, 8, 2))
    assert (problems == []) if message is None else any(message in text for text in problems)
