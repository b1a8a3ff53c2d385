"""The loop: what a step is, when things happen, and how a run ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_engine.config.schema import LRScheduleConfig
from ds_engine.training.lr_schedules import learning_rate
from ds_engine.training.stop import StopSignal
from tests.parity.layouts import Layout, synthetic
from tests.training.runs import Job, assemble, make_step, run_body, whole_weights, write_data
from tests.worlds import run_world

FAMILY = "gpt_dropout"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def split_body(rank: int, layouts: list[Layout], keep: int) -> Any:
    """Three steps on the same samples, split in many ways; only ``keep`` samples have tokens."""
    found = []
    for layout in layouts:
        step = make_step(Job(layout, Path(), family=FAMILY))
        data, context, results = synthetic(FAMILY), step.context, []
        for number in range(3):
            batches = data.step(
                number, layout.micro, context.get_data_parallel_rank(), context.dims.data
            )
            first = 8 * number
            for inputs, (_, mask) in batches:
                mask.mul_((inputs[3] < first + keep)[:, None])
            results.append(step.train_batch(batches, 1e-3))
        found.append([(r.loss, r.grad_norm, r.tokens, r.skipped) for r in results])
        assert all(torch.isfinite(w).all() for w in whole_weights(step).values())
    return found


SPLITS = {
    1: [Layout(micro=8), Layout(micro=1), Layout(micro=2), Layout(micro=4, zero=1)],
    2: [
        Layout(data=2, micro=1),
        Layout(data=2, micro=4),
        Layout(data=2, micro=2, zero=1),
        Layout(data=2, micro=1, zero=2),
        Layout(data=2, micro=4, zero=3),
        Layout(pipeline=2, micro=1),
        Layout(pipeline=2, micro=4, zero=1),
    ],
    4: [Layout(data=4, micro=2, zero=1), Layout(pipeline=2, data=2, micro=1)],
}


@pytest.mark.slow
@pytest.mark.parametrize("keep", [8, 1, 0])
def test_loss_and_norm_do_not_depend_on_how_the_batch_is_split(keep: int) -> None:
    """With ``keep`` 1, all micro-batches and replicas but one have no valid token at all."""
    sizes = (1, 2, 4) if keep == 8 else (2,)
    reference: Any = None
    for size in sizes:
        results = run_world(size, split_body, SPLITS[size], keep)[0]
        for layout, steps in zip(SPLITS[size], results, strict=True):
            reference = reference or steps
            for (loss, norm, tokens, skipped), wanted in zip(steps, reference, strict=True):
                assert (tokens, skipped) == (wanted[2], False), layout.name
                assert loss == pytest.approx(wanted[0], rel=1e-6), layout.name
                assert norm == pytest.approx(wanted[1], rel=1e-6, abs=1e-12), layout.name
                if keep == 0:
                    assert (loss, norm, tokens) == (0.0, 0.0, 0), layout.name
                else:
                    assert loss > 1
                    assert norm > 0


def loop_body(rank: int, job: Job) -> Any:
    """Rates that the optimizer really used, and how often things were done."""
    parts = assemble(job)
    rates: list[float] = []
    saves: list[int] = []
    engine, save = parts.step.engine, parts.checkpointer.save
    engine.before_update = lambda: rates.append(engine.optimizer.param_groups[0]["lr"])
    parts.checkpointer.save = lambda state: (saves.append(state.step), save(state))
    parts.run()
    return rates, saves, parts.recorder.rows


@pytest.mark.parametrize(
    "layout",
    [Layout(data=2, micro=1, zero=1), Layout(pipeline=2, micro=1)],
    ids=lambda layout: layout.name,
)
def test_rate_moves_once_a_step_and_things_happen_when_asked(
    tmp_path: Path, data: Path, layout: Layout
) -> None:
    job = Job(layout, data, tmp_path, steps=5, every=2, log_every=2, evaluate_every=3)
    rates, saves, rows = run_world(2, loop_body, job)[0]
    schedule = LRScheduleConfig(warmup_steps=2, min_lr=1e-5)
    wanted = [learning_rate(n, config=schedule, peak=1e-3, total_steps=6) for n in range(5)]
    assert rates == wanted, "four or eight micro-batches, one rate"
    assert saves == [2, 4, 5]
    logged = {step: row["train/lr"] for step, row in rows if "train/lr" in row}
    assert logged == {2: wanted[1], 4: wanted[3], 5: wanted[4]}
    assert [step for step, row in rows if "validation/loss" in row] == [3, 5]
    assert [row["train/samples"] for _, row in rows if "train/samples" in row] == [16, 32, 40]


def stop_body(rank: int, job: Job, number: int, on_rank: int) -> Any:
    """One rank alone gets a signal in its second step."""
    parts = assemble(job)
    whole = parts.step.train_batch

    def train_batch(*args: Any, **kwargs: Any) -> Any:
        if parts.state.step == 1 and rank == on_rank:
            os.kill(os.getpid(), number)
        return whole(*args, **kwargs)

    parts.step.train_batch = train_batch
    outcome = parts.run()
    return outcome.stopped_by, parts.state.step, outcome.evaluation


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        (Layout(data=2, micro=2, zero=1), signal.SIGTERM),
        (Layout(pipeline=2, micro=2), signal.SIGINT),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    tmp_path: Path, data: Path, layout: Layout, number: signal.Signals
) -> None:
    job = Job(layout, data, tmp_path, steps=6, every=0, evaluate_every=5)
    for answer in run_world(2, stop_body, job, int(number), 1, timeout=60):
        assert answer == (number.name, 2, None)
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000002"]
    again = run_world(2, run_body, job)[0]
    assert [step for step, row in again["rows"] if "train/loss" in row] == [3, 4, 5, 6]
    assert again["outcome"].stopped_by is None


def test_a_run_that_is_complete_trains_no_further(tmp_path: Path, data: Path) -> None:
    job = Job(Layout(micro=4), data, tmp_path, steps=1)
    first = run_world(1, run_body, job)[0]
    manifest = (tmp_path / "step_00000001" / "manifest.json").stat().st_mtime_ns
    again = run_world(1, run_body, job)[0]
    assert (again["rows"], again["state"]) == ([], first["state"])
    assert (tmp_path / "step_00000001" / "manifest.json").stat().st_mtime_ns == manifest


def test_a_second_interrupt_ends_at_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
