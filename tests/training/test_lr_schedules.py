import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.schema import LRScheduleConfig
from ds_engine.errors import ConfigError
from ds_engine.training.lr_schedules import decay_range, learning_rate

TYPES = ("cosine", "linear", "wsd", "inverse_sqrt", "constant")
ENDING = ("cosine", "linear", "wsd")


def rates(config, peak=1.0, total=100):
    return [
        learning_rate(step, config=config, peak=peak, total_steps=total)
        for step in range(total + 1)
    ]


@pytest.mark.parametrize("kind", TYPES)
def test_warmup_is_linear_positive_and_reaches_the_peak_at_its_last_step(kind):
    values = rates(LRScheduleConfig(type=kind, warmup_steps=9), peak=2.0)
    assert values[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)], rel=1e-12)
    assert max(values) == values[9] == 2.0


@pytest.mark.parametrize("kind", TYPES)
def test_without_warmup_the_first_update_uses_the_peak(kind):
    assert rates(LRScheduleConfig(type=kind), peak=3e-4)[0] == 3e-4


@pytest.mark.parametrize("kind", ENDING)
@pytest.mark.parametrize("warmup", [0, 1, 40, 100])
def test_the_end_is_exactly_min_lr_and_stays(kind, warmup):
    config = LRScheduleConfig(type=kind, warmup_steps=warmup, min_lr=0.1)
    for step in (100, 101, 10**9):
        assert learning_rate(step, config=config, peak=1.0, total_steps=100) == 0.1
    assert learning_rate(99, config=config, peak=1.0, total_steps=100) > 0.1


def test_cosine_against_values_by_hand():
    values = rates(LRScheduleConfig(type="cosine", warmup_steps=20, min_lr=0.1))
    assert values[60] == pytest.approx(0.55)
    assert values[40] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_linear_against_values_by_hand():
    values = rates(LRScheduleConfig(type="linear", warmup_steps=20, min_lr=0.2))
    assert values[60] == pytest.approx(0.6)
    assert values[99] == pytest.approx(0.2 + 0.8 / 80)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_steps_end_the_decay_before_the_run_ends(kind):
    config = LRScheduleConfig(type=kind, warmup_steps=10, min_lr=0.1, decay_steps=40)
    values = rates(config)
    assert values[30] == pytest.approx(0.55)
    assert values[49] > 0.1
    assert values[50:] == [0.1] * 51


def test_wsd_holds_the_peak_then_falls_over_a_tenth_of_the_run_by_default():
    config = LRScheduleConfig(type="wsd", warmup_steps=10)
    values = rates(config)
    assert decay_range(config, 100) == (90, 100)
    assert values[10:91] == [1.0] * 81
    assert values[91:] == pytest.approx([0.9 - 0.1 * step for step in range(10)], abs=1e-12)


@pytest.mark.parametrize(
    ("shape", "quarter"),
    [("linear", 0.75), ("sqrt", 0.5), ("cosine", (1 + math.cos(math.pi / 4)) / 2)],
)
def test_wsd_decay_shapes(shape, quarter):
    values = rates(LRScheduleConfig(type="wsd", decay_steps=100, decay_shape=shape))
    assert values[0] == 1.0
    assert values[25] == pytest.approx(quarter)
    assert values[100] == 0.0


def test_inverse_sqrt_is_the_formula_of_the_transformer_paper():
    config = LRScheduleConfig(type="inverse_sqrt", warmup_steps=399)
    for step in (0, 17, 398, 399, 400, 1599, 10**6):
        number, warmup = step + 1, 400
        expected = min(number**-0.5, number * warmup**-1.5) * warmup**0.5
        actual = learning_rate(step, config=config, peak=1.0, total_steps=500)
        assert actual == pytest.approx(expected)


def test_inverse_sqrt_stops_at_min_lr_and_constant_never_ends():
    config = LRScheduleConfig(type="inverse_sqrt", min_lr=0.5)
    assert learning_rate(10**6, config=config, peak=1.0, total_steps=10) == 0.5
    config = LRScheduleConfig(type="constant")
    assert learning_rate(10**6, config=config, peak=1.0, total_steps=10) == 1.0


def test_a_warmup_longer_than_the_run_is_cut_short():
    config = LRScheduleConfig(type="cosine", warmup_steps=1999)
    assert rates(config, total=2)[:2] == pytest.approx([1 / 2000, 2 / 2000])


@given(
    kind=st.sampled_from(TYPES),
    warmup=st.integers(0, 60),
    total=st.integers(1, 120),
    minimum=st.floats(0, 1),
)
def test_the_rate_stays_in_bounds_rises_before_the_peak_and_falls_after(
    kind, warmup, total, minimum
):
    config = LRScheduleConfig(type=kind, warmup_steps=warmup, min_lr=minimum)
    values = rates(config, total=total)
    after = values[warmup:]
    assert all(0 < value <= 1 for value in values[:total])
    assert all(value >= minimum for value in after)
    assert all(left >= right - 1e-12 for left, right in pairwise(after))
    rise = values[: min(warmup, total)]
    assert rise == sorted(rise)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LRScheduleConfig(type="cosin"), r'type = "cosin" is unknown; use "cosine", "linear"'),
        (LRScheduleConfig(min_lr=2.0), r"min_lr = 2.0 must lie between 0 and the optimizer's lr"),
        (LRScheduleConfig(min_lr=math.nan), "min_lr = nan"),
        (LRScheduleConfig(warmup_steps=-1), "warmup_steps = -1 is negative"),
        (
            LRScheduleConfig(type="wsd", warmup_steps=50, decay_steps=60),
            "decay_steps = 60 does not fit.*use at most 50",
        ),
        (LRScheduleConfig(type="linear", decay_steps=0), "decay_steps = 0 must be at least 1"),
        (LRScheduleConfig(type="constant", decay_steps=5), 'no meaning for type "constant"'),
        (
            LRScheduleConfig(type="wsd", decay_shape="cubic"),
            'decay_shape = "cubic" is unknown; use "linear", "sqrt"',
        ),
    ],
)
def test_meaningless_schedules_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        learning_rate(0, config=config, peak=1.0, total_steps=100)


@pytest.mark.parametrize("peak", [-1.0, math.nan, math.inf])
def test_a_peak_that_is_no_rate_is_refused(peak):
    with pytest.raises(ConfigError, match="peak learning rate"):
        learning_rate(0, config=LRScheduleConfig(), peak=peak, total_steps=10)


def test_a_negative_step_is_refused():
    with pytest.raises(ConfigError, match="step = -1 is negative"):
        learning_rate(-1, config=LRScheduleConfig(), peak=1.0, total_steps=10)
