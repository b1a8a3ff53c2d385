import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.blend import Blend
from ds_engine.errors import DataError

weights = st.lists(
    st.one_of(st.floats(1e-6, 1), st.sampled_from([0.0, 0.5, 1.0, 1e-4, 1 / 3])),
    min_size=1,
    max_size=9,
).filter(lambda values: sum(values) > 0)


@given(weights)
@settings(max_examples=40, deadline=None)
def test_every_prefix_is_within_the_bound_and_samples_are_numbered(values):
    blend = Blend(values)
    exact = [Fraction(value) / sum(map(Fraction, values)) for value in values]
    seen = [0] * len(values)
    assert blend.bound < 1.5
    for index in range(600):
        source, number = blend[index]
        assert number == seen[source]  # no sample twice, none left out
        assert values[source] > 0
        seen[source] += 1
        lag = max(abs(c - (index + 1) * w) for c, w in zip(seen, exact, strict=True))
        assert lag <= blend.bound + 1e-9
        if index % 97 == 0:
            assert blend.counts(index + 1) == seen


@given(weights, st.integers(0, 2**50))
@settings(max_examples=60, deadline=None)
def test_far_counts_are_exact_and_agree_with_the_samples(values, far):
    blend = Blend(values)
    before, after = blend.counts(far), blend.counts(far + 1)
    assert sum(before) == far
    source, number = blend[far]
    assert number == before[source]
    assert [a - b for a, b in zip(after, before, strict=True)] == [
        int(k == source) for k in range(len(values))
    ]
    total = sum(map(Fraction, values))
    for count, value in zip(before, values, strict=True):
        assert abs(count - far * Fraction(value) / total) <= blend.bound + 1e-9


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=3))
def test_up_to_three_sources_stay_within_one(values):
    assert Blend(values).bound < 1


@pytest.mark.parametrize("count", [2, 5, 11, 40, 200])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.618, 0.01])
def test_the_documented_bound_holds_for_many_sources(count, ratio):
    blend = Blend([max(ratio**k, 1e-30) for k in range(count)])
    assert blend.bound <= 1.68


def test_common_weights():
    assert [Blend([0.5, 0.5])[i][0] for i in range(4)] == [0, 1, 0, 1]
    assert Blend([0.7, 0.3]).counts(1000) == [700, 300]
    assert Blend([7, 3]).counts(10) == [7, 3]
    assert Blend([2, 0, 2]).counts(100) == [50, 0, 50]
    assert Blend([3]).counts(5) == [5]
    assert Blend([0.7, 0.3]).weights == pytest.approx([0.7, 0.3])
    heavy = Blend([0.5, *[0.005] * 100])  # merging by ideal times would lag by 25 here
    assert heavy.bound <= 1
    assert abs(heavy.counts(100)[0] - 50) <= 1


@pytest.mark.parametrize("values", [[], [0.0, 0], [-1, 2], [math.nan], [math.inf, 1]])
def test_unusable_weights(values):
    with pytest.raises(DataError, match="weight"):
        Blend(values)


def test_index_must_not_be_negative():
    with pytest.raises(IndexError):
        Blend([1])[-1]
