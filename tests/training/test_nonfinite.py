"""A step whose gradient is not finite changes nothing, is counted, and cannot go on for ever."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_engine.errors import NumericsError
from tests.parity.layouts import Layout, synthetic
from tests.training.runs import Job, assemble, make_step, raises_everywhere, whole_weights
from tests.training.runs import write_data as write_data_files
from tests.worlds import run_world

# Untied weights: in a pipeline the bad gradient then stays on its stage.
FAMILY = "llama_dropout"

LAYOUTS = [
    Layout(data=2, micro=2),
    Layout(data=2, micro=2, zero=1),
    Layout(data=2, micro=2, zero=2),
    Layout(data=2, micro=2, zero=3),
    Layout(data=2, micro=2, zero=2, offload=True),
    Layout(data=2, micro=2, zero=1, bf16=True),
    Layout(data=2, micro=2, zero=2, bf16=True),
    Layout(data=2, micro=2, zero=3, bf16=True),
    Layout(pipeline=2, micro=2),
    Layout(pipeline=2, micro=2, zero=1),
    Layout(pipeline=2, micro=2, zero=1, bf16=True),
    Layout(tensor=2, micro=4),
]


class Poison:
    """Makes the gradient of one layer's output infinite, on one rank, while it is on."""

    def __init__(self, step: Any, *, here: bool) -> None:
        self.on = False
        if not here:
            return
        if step.context.dims.tensor > 1:
            # a shard: all that flows through activations would reach the other rank by itself
            name = "layers.1.mlp.up.weight"
            step.module.canonical_parameters()[name].register_hook(self._spoil)
        else:
            layer = next(m for m in step.module.modules() if type(m).__name__ == "TransformerLayer")
            layer.register_forward_hook(self._hook)

    def _hook(self, module: Any, inputs: Any, state: Any) -> Any:
        if self.on and state.hidden.requires_grad:
            state.hidden.register_hook(self._spoil)
        return state

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf if self.on else gradient


def bad_rank(layout: Layout) -> int:
    """The last replica or tensor rank, but the first stage: the last one sees nothing of it."""
    return 0 if layout.pipeline > 1 else layout.world - 1


def skip_body(rank: int, layout: Layout) -> Any:
    """The same two good steps, once with a bad one in between."""
    found = []
    for bad in (True, False):
        step = make_step(Job(layout, Path(), family=FAMILY))
        poison = Poison(step, here=rank == bad_rank(layout))
        data = synthetic(FAMILY)
        context, results = step.context, []

        def train(number: int, step: Any = step, data: Any = data, context: Any = context) -> Any:
            replica, count = context.get_data_parallel_rank(), context.dims.data
            return step.train_batch(data.step(number, layout.micro, replica, count), 1e-3)

        results.append(train(0))
        if bad:
            before = whole_weights(step)
            poison.on = True
            results.append(train(1))
            poison.on = False
            after = whole_weights(step)
            assert all(torch.equal(before[name], after[name]) for name in before)
        results.append(train(2))
        found.append((results, whole_weights(step)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_bad_step_leaves_no_trace(layout: Layout) -> None:
    answers = run_world(layout.world, skip_body, layout, timeout=60)
    for (results, weights), (clean, wanted) in answers:
        assert [r.skipped for r in results] == [False, True, False]
        assert [r.skipped for r in clean] == [False, False]
        assert not math.isfinite(results[1].grad_norm)
        assert math.isfinite(results[2].loss)
        assert (results[2].loss, results[2].grad_norm) == (clean[1].loss, clean[1].grad_norm)
        for name, value in weights.items():
            assert torch.equal(value, wanted[name]), name


def stop_body(rank: int, job: Job, bad_steps: tuple[int, ...]) -> Any:
    parts = assemble(job)
    poison = Poison(parts.step, here=rank == bad_rank(job.layout))
    whole = parts.step.train_batch

    def train_batch(*args: Any, **kwargs: Any) -> Any:
        poison.on = parts.state.step + 1 in bad_steps
        return whole(*args, **kwargs)

    parts.step.train_batch = train_batch
    message = ""
    if len(bad_steps) > 2:
        with raises_everywhere(NumericsError) as messages:
            parts.run()
        message = messages[0]
    else:
        parts.run()
    return parts.recorder.rows, parts.reports, parts.state.to_json(), message


@pytest.mark.parametrize(
    "layout",
    [Layout(data=2, micro=2, zero=2), Layout(pipeline=2, micro=2)],
    ids=lambda layout: layout.name,
)
def test_bad_steps_are_logged_counted_and_end_the_run(tmp_path: Path, layout: Layout) -> None:
    data = write_data_files(tmp_path)
    job = Job(
        layout,
        data,
        tmp_path / "run",
        family=FAMILY,
        log_every=100,
        every=2,
        max_nonfinite_steps=3,
    )
    for rows, reports, state, message in run_world(2, stop_body, job, (3, 4, 5), timeout=60):
        assert [step for step, _ in rows] == [3, 4, 5], "each skipped step has a row"
        assert [row["train/skipped_steps"] for _, row in rows] == [1, 2, 3]
        assert not math.isfinite(rows[0][1]["train/grad_norm"])
        assert len(reports) == 3
        assert "step 4: a gradient is not finite; the update was skipped (2 in a row" in reports[1]
        assert state["step"] == 5
        assert message.startswith("3 steps in a row had no finite gradient (training.max_nonfinite")
    # It goes on from the last checkpoint, and a good step in between starts the count anew.
    for rows, _, state, _ in run_world(2, stop_body, job, (6,), timeout=60):
        assert [step for step, _ in rows] == [6]
        assert state["skipped_steps"] == 3  # the steps 3 and 4 are in the checkpoint
        assert state["consecutive_skipped"] == 1
        assert state["consumed_samples"] == 48
