"""The training loop: one page that says what happens at each step, and in which order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_engine.data.loader import BatchLoader
from ds_engine.errors import NumericsError
from ds_engine.training.checkpoint.checkpointer import Checkpointer
from ds_engine.training.engine import StepResult, TrainStep
from ds_engine.training.evaluate import Evaluation, Evaluator
from ds_engine.training.metrics import StepTimer, process_peak_bytes
from ds_engine.training.state import TrainState
from ds_engine.training.stop import StopSignal
from ds_engine.training.tracking.tracker import Tracker


@dataclass(frozen=True)
class TrainerSettings:
    """When things happen; all counts are optimizer steps.

    Attributes:
        total_steps: length of the run.
        log_every: rows in the trackers.
        evaluate_every: evaluations; 0 none.
        checkpoint_every: checkpoints; 0 only at the end.
        max_nonfinite_steps: skipped updates in a row before the run stops.
    """

    total_steps: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int
    max_nonfinite_steps: int


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        stopped_by: name of the signal that ended it early, or None.
        evaluation: the last evaluation, if any.
    """

    stopped_by: str | None = None
    evaluation: Evaluation | None = None


class Trainer:
    """Runs steps until the end, a signal, or too many steps without a finite gradient.

    Args:
        step: forward, backward and update on this rank.
        loader: this replica's batches by global sample number.
        learning_rate: of the update after ``step`` completed steps.
        batch_size: global batch in samples when so many samples have been consumed.
        settings: when things happen.
        checkpointer: saves; None for a run that keeps nothing.
        evaluator: None without validation data.
        tracker: receives metrics (does nothing but on rank 0).
        timer: measures steps.
        report: one line for people, on rank 0.
    """

    def __init__(
        self,
        *,
        step: TrainStep,
        loader: BatchLoader,
        learning_rate: Callable[[int], float],
        batch_size: Callable[[int], int],
        settings: TrainerSettings,
        checkpointer: Checkpointer | None,
        evaluator: Evaluator | None,
        tracker: Tracker,
        timer: StepTimer,
        report: Callable[[str], None],
    ) -> None:
        self.step, self.loader = step, loader
        self.learning_rate, self.batch_size = learning_rate, batch_size
        self.settings, self.checkpointer, self.evaluator = settings, checkpointer, evaluator
        self.tracker, self.timer, self.report = tracker, timer, report

    def run(self, state: TrainState) -> Outcome:
        """Train from ``state``, which is updated in place.

        Raises:
            NumericsError: ``max_nonfinite_steps`` updates in a row were skipped. The state before
                them is in the last checkpoint.
        """
        outcome, settings = Outcome(), self.settings
        saved_at, evaluated_at = state.step, -1
        with StopSignal() as stop:
            while state.step < settings.total_steps:
                rate = self.learning_rate(state.step)
                result = self._train_step(state, rate)
                self._log(state, result, rate)
                self._check_finite(state)
                if settings.evaluate_every and state.step % settings.evaluate_every == 0:
                    outcome.evaluation, evaluated_at = self._evaluate(state), state.step
                if settings.checkpoint_every and state.step % settings.checkpoint_every == 0:
                    saved_at = self._save(state)
                outcome.stopped_by = self._agree_to_stop(stop)
                if outcome.stopped_by:
                    break
            if outcome.stopped_by is None and self.evaluator and evaluated_at != state.step:
                outcome.evaluation = self._evaluate(state)
            if saved_at != state.step:
                self._save(state)
        return outcome

    def _train_step(self, state: TrainState, rate: float) -> StepResult:
        size = self.batch_size(state.consumed_samples)
        with self.timer.waiting():
            batches = None
            if self.step.reads_data:
                batches = self.loader.step(state.consumed_samples, size)
        result = self.step.train_batch(batches, rate, samples=size)
        state.step += 1
        state.consumed_samples += size
        state.consumed_tokens += result.tokens
        state.skipped_steps += result.skipped
        state.consecutive_skipped = state.consecutive_skipped + 1 if result.skipped else 0
        self.timer.step(tokens=result.tokens, samples=size)
        return result

    def _log(self, state: TrainState, result: StepResult, rate: float) -> None:
        last = state.step == self.settings.total_steps
        if state.step % self.settings.log_every and not last and not result.skipped:
            return
        metrics = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": rate,
            "train/tokens": state.consumed_tokens,
            "train/samples": state.consumed_samples,
            "train/skipped_steps": state.skipped_steps,
            **{f"train/{name}": value for name, value in result.terms.items()},
        }
        self.tracker.log(state.step, metrics | self._over_ranks(self.timer.report()))

    def _over_ranks(self, report: dict[str, float]) -> dict[str, float]:
        """Replace this rank's peak memory by the largest and the smallest of all ranks."""
        name = "train/memory_gib"
        if name in report and self.step.context.dims.world > 1:
            ends = torch.tensor([report[name], -report[name]], device=self.step.engine.device)
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
            report = {**report, name: float(ends[0]), f"{name}_least": -float(ends[1])}
        return report

    def _check_finite(self, state: TrainState) -> None:
        if not state.consecutive_skipped:
            return
        self.report(
            f"step {state.step}: a gradient is not finite; the update was skipped "
            f"({state.consecutive_skipped} in a row, {state.skipped_steps} in all)"
        )
        if state.consecutive_skipped >= self.settings.max_nonfinite_steps:
            raise NumericsError(
                f"{state.consecutive_skipped} steps in a row had no finite gradient "
                f"(training.max_nonfinite_steps = {self.settings.max_nonfinite_steps}); lower the "
                "learning rate, clip gradients, or look at the data of these steps"
            )

    def _evaluate(self, state: TrainState) -> Evaluation:
        assert self.evaluator is not None
        with self.timer.excluded():
            evaluation = self.evaluator.run()
            self.tracker.log(state.step, evaluation.metrics())
        return evaluation

    def _save(self, state: TrainState) -> int:
        if self.checkpointer is not None:
            with self.timer.excluded():
                self.checkpointer.save(state)
        return state.step

    def _agree_to_stop(self, stop: StopSignal) -> str | None:
        """All ranks leave at the same step, whichever got the signal."""
        number = int(stop.received or 0)
        if self.step.context.dims.world > 1:
            flag = torch.tensor([number], device=self.step.engine.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            number = int(flag)
        if not number:
            return None
        return signal.Signals(number).name


def accelerator_memory(engine: Any) -> int:
    """Peak bytes of this rank's device, or of the process where the device is the CPU."""
    if engine.device.type == "cpu":
        return process_peak_bytes()
    return int(torch.get_device_module(engine.device).max_memory_allocated())
