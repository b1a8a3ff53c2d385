"""A stage of a T5 may end anywhere: in the encoder, between the stacks, in the decoder."""

from __future__ import annotations

from typing import Any

from ds_engine.pipeline.plan import stage_bounds
from ds_engine.verify import compare, reference_trace
from tests.parity.layouts import (
    GLOBAL_BATCH,
    Layout,
    adam,
    deepspeed_config,
    plan_for,
    synthetic,
)
from tests.worlds import run_world

FAMILY, STEPS = "t5_dropout", 2
LAYOUT = Layout(pipeline=2, micro=4)


def _plan() -> Any:
    from ds_engine.parallel.tensor_parallel import TensorParallel

    return plan_for(FAMILY, TensorParallel.single())


def cuts_body(rank: int, cuts: list[int]) -> list[Any]:
    """Train two stages that meet at each of the cuts."""
    from unittest.mock import patch

    from ds_engine.parallel.context import ParallelContext
    from ds_engine.parallel.dims import ParallelDims
    from ds_engine.training.engine import (
        build_train_step,
        full_gradient,
        full_weight,
        init_distributed,
    )
    from ds_engine.verify import layout_trace

    init_distributed()
    context = ParallelContext.create(ParallelDims(2, pipeline=2))
    plan, data, traces = _plan(), synthetic(FAMILY), []
    for cut in cuts:
        bounds = [0, cut, len(plan.layers)]
        with patch("ds_engine.pipeline.stage.stage_bounds", return_value=bounds):
            step = build_train_step(plan, context, deepspeed_config(LAYOUT))
        trace = layout_trace(
            step,
            lambda number: data.step(number, LAYOUT.micro, 0, 1),
            STEPS,
            adam(),
            full_gradient=full_gradient,
            full_weight=full_weight,
        )
        traces.append(trace if rank == 0 else None)
    return traces


def test_every_cut_equals_one_process() -> None:
    plan, data = _plan(), synthetic(FAMILY)
    # Each stage gets a transformer layer (``stage_bounds``), so the last one looks at the encoder.
    last = max(index for index, spec in enumerate(plan.layers) if spec.recomputable)
    cuts = list(range(1, last + 1))
    assert plan.layers[last].name.startswith("decoder.layers.")
    reference = reference_trace(
        plan, [data.step(number, GLOBAL_BATCH, 0, 1) for number in range(STEPS)], adam()
    )
    traces = run_world(2, cuts_body, cuts)[0]
    for cut, trace in zip(cuts, traces, strict=True):
        wrong = [row.name for row in compare(trace, reference, tolerance=1e-5) if not row.equal]
        assert not wrong, f"cut before {plan.layers[cut].name}: {wrong[:8]}"


def test_four_balanced_stages_cut_inside_the_encoder() -> None:
    plan = _plan()
    names = [spec.name for spec in plan.layers]
    starts = [names[bound] for bound in stage_bounds(plan, 4, "balanced")[1:-1]]
    inside = [name for name in starts if name.startswith("encoder.layers.")]
    assert inside and inside[0] != "encoder.layers.0"
