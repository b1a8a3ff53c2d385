"""What a tracker is, and the two that hold others: one that fans out, one that never raises."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

logger = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of one run, on rank 0 only.

    Steps are completed optimizer steps and never go down within a session. Several calls may carry
    the same step (training metrics, then validation metrics): their metrics belong to one row.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` after ``step`` completed optimizer steps; NaN is allowed."""

    def summary(self, values: Mapping[str, float]) -> None:
        """Record values of the whole run (best validation loss, total tokens)."""

    def close(self, exit_code: int) -> None:
        """Flush and end the session; 0 is success. Later calls do nothing."""


class NullTracker:
    """Records nothing: the tracker of every rank but 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def summary(self, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self, exit_code: int) -> None:
        """Do nothing."""


class CompositeTracker:
    """Hands every call to each of ``trackers``, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to all."""
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def summary(self, values: Mapping[str, float]) -> None:
        """Summarise to all."""
        for tracker in self.trackers:
            tracker.summary(values)

    def close(self, exit_code: int) -> None:
        """Close all."""
        for tracker in self.trackers:
            tracker.close(exit_code)


class GuardedTracker:
    """Lets no exception of ``tracker`` reach the training loop: losing a curve must not lose a run.

    The first failure is reported, the rest are silent. After ``patience`` failures in a row the
    tracker is left alone until ``close``, because a backend that is down may take seconds to fail
    each time.

    Args:
        tracker: the tracker to call.
        name: what the report calls it.
        patience: failures in a row before giving up; None never gives up.
        report: receives the one message; the default logs a warning.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        name: str,
        patience: int | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self._tracker = tracker
        self._name = name
        self._patience = patience
        self._report = report
        self._reported = False
        self._failures = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log, whatever happens."""
        self._attempt(lambda: self._tracker.log(step, metrics), f"step {step}")

    def summary(self, values: Mapping[str, float]) -> None:
        """Summarise, whatever happens."""
        self._attempt(lambda: self._tracker.summary(values), "the summary")

    def close(self, exit_code: int) -> None:
        """Close, whatever happened before."""
        self._failures = 0
        self._attempt(lambda: self._tracker.close(exit_code), "closing")

    def _attempt(self, call: Callable[[], None], what: str) -> None:
        if self._patience is not None and self._failures >= self._patience:
            return
        try:
            call()
        except Exception as error:  # whatever a backend may raise; KeyboardInterrupt passes
            self._failures += 1
            if not self._reported:
                self._reported = True
                self._report(
                    f"{self._name} failed at {what}: {type(error).__name__}: {error}. Training "
                    "goes on; further failures are not reported."
                )
        else:
            self._failures = 0
