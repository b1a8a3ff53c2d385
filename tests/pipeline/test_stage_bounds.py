"""Where a model is cut into stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_engine.pipeline.plan import LayerPlan, LayerSpec, stage_bounds


def plan_of(costs: list[float], layers: list[bool] | None = None) -> LayerPlan:
    layers = layers or [True] * len(costs)
    specs = tuple(
        LayerSpec(f"{i}", nn.Identity, cost=c, recomputable=r)
        for i, (c, r) in enumerate(zip(costs, layers, strict=True))
    )
    return LayerPlan(specs, lambda *_: None, tuple, tuple, 0)


def stages_of(bounds: list[int]) -> list[range]:
    return [range(a, b) for a, b in pairwise(bounds)]


COSTS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


@given(costs=COSTS, data=st.data(), method=st.sampled_from(["balanced", "uniform"]))
@settings(max_examples=200, deadline=None)
def test_stages_are_contiguous_whole_and_best(
    costs: list[float], data: st.DataObject, method: str
) -> None:
    layers = data.draw(st.lists(st.booleans(), min_size=len(costs), max_size=len(costs)))
    stages = data.draw(st.integers(1, len(costs)))
    bounds = stage_bounds(plan_of(costs, layers), stages, method)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert bounds == sorted(set(bounds))
    assert len(bounds) == stages + 1
    work = costs if method == "balanced" else [float(x) for x in layers]

    def largest(cuts: list[int]) -> float:
        return max(sum(work[i] for i in stage) for stage in stages_of(cuts))

    def allowed(cuts: list[int]) -> bool:
        if sum(layers) < stages:
            return True
        return all(any(layers[i] for i in stage) for stage in stages_of(cuts))

    assert allowed(bounds), "a stage has no transformer layer"
    choices = combinations(range(1, len(costs)), stages - 1)
    every = [[0, *inner, len(costs)] for inner in choices]
    assert largest(bounds) == min(largest(cuts) for cuts in every if allowed(cuts))


@pytest.mark.parametrize("method", ["balanced", "uniform"])
@pytest.mark.parametrize(("layers", "stages"), [(4, 4), (4, 3), (12, 8), (5, 2), (32, 8)])
def test_every_stage_has_a_transformer_layer_beside_a_heavy_head(
    method: str, layers: int, stages: int
) -> None:
    """A vocabulary of 250,000 words on a small model costs more than all its layers."""
    costs = [0.0, 0.0, *[1.0] * layers, 0.0, 50.0]
    body = [False, False, *[True] * layers, False, False]
    bounds = stage_bounds(plan_of(costs, body), stages, method)
    counts = [sum(body[i] for i in stage) for stage in stages_of(bounds)]
    assert min(counts) >= 1
    assert sum(counts) == layers
    if method == "uniform":
        assert max(counts) == -(-layers // stages)
    else:
        assert counts[-1] == 1


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
        stage_bounds(plan_of([1.0, 1.0]), 3, "balanced")


def test_a_deep_model_is_cut_in_time() -> None:
    bounds = stage_bounds(plan_of([0.0, 0.0, *[1.0] * 200, 0.0, 2.5]), 16, "balanced")
    assert len(bounds) == 17
