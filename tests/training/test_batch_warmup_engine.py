"""A growing global batch through the real engines equals one plain process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from ds_engine.verify import Trace, compare
from tests.parity.layouts import Layout, adam, plan_for
from tests.training.runs import Job, make_step, run_body, write_data
from tests.worlds import run_world

# Accumulation 1, 2, 2, 4 in the layouts of two replicas (or two samples a micro-batch).
SIZES = (2, 4, 4, 8)
FAMILY = "gpt_dropout"


def batches_of(number: int, micro: int, replica: int, replicas: int) -> list[Any]:
    """As ``SyntheticData.step``, with a batch that grows."""
    from tests.parity.layouts import synthetic

    first, size = sum(SIZES[:number]), SIZES[number]
    return [
        synthetic(FAMILY).micro_batch(
            [first + (m * replicas + replica) * micro + i for i in range(micro)]
        )
        for m in range(size // (micro * replicas))
    ]


def reference_body(rank: int) -> Trace:
    from ds_engine.parallel.tensor_parallel import TensorParallel
    from ds_engine.verify import reference_trace

    steps = [batches_of(number, 2, 0, 1) for number in range(len(SIZES))]
    return reference_trace(plan_for(FAMILY, TensorParallel.single()), steps, adam())


def growing_body(rank: int, layout: Layout) -> Trace:
    from ds_engine.training.engine import full_gradient, full_weight
    from ds_engine.verify import layout_trace

    step = make_step(Job(layout, Path(), family=FAMILY))
    context, whole, numbers = step.context, step.train_batch, iter(SIZES)
    replica, replicas = context.get_data_parallel_rank(), context.get_data_parallel_world_size()
    # As the trainer calls it: stages without data learn the size from the number of samples.
    step.train_batch = lambda batches, rate: whole(batches, rate, samples=next(numbers))

    def batches(number: int) -> Any:
        if not step.reads_data:
            return None
        return batches_of(number, layout.micro, replica, replicas)

    return layout_trace(
        step, batches, len(SIZES), adam(), full_gradient=full_gradient, full_weight=full_weight
    )


@functools.cache
def reference() -> Trace:
    return run_world(1, reference_body)[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro=2),
        Layout(data=2, micro=1),
        Layout(data=2, micro=1, zero=1),
        Layout(data=2, micro=1, zero=2),
        Layout(data=2, micro=1, zero=3),
        Layout(data=2, micro=1, zero=2, offload=True),
        Layout(pipeline=2, micro=2),
        Layout(pipeline=3, zero=1, micro=2),  # the middle stage reads no data
    ],
    ids=lambda layout: layout.name,
)
def test_a_growing_batch_equals_one_process(layout: Layout) -> None:
    trace = run_world(layout.world, growing_body, layout, timeout=60)[0]
    rows = compare(trace, reference(), tolerance=1e-5)
    wrong = [f"{row.name}: {row.value:.2e} in step {row.step}" for row in rows if not row.equal]
    assert len(trace.losses) == len(SIZES)
    assert not wrong, wrong[:8]


def test_a_resumed_run_goes_on_with_the_grown_batch(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    layout = Layout(data=2, micro=1, zero=2)
    whole = run_world(2, run_body, Job(layout, data, tmp_path / "run", sizes=SIZES, every=2))[0]
    assert [row["train/samples"] for _, row in whole["rows"]] == [2, 6, 10, 18, 26, 34]
    for step in (4, 6):
        (tmp_path / "run" / f"step_{step:08d}").rename(tmp_path / f"{step}")
    again = run_world(2, run_body, Job(layout, data, tmp_path / "run", sizes=SIZES, every=2))[0]
    assert again["rows"] == whole["rows"][2:]
