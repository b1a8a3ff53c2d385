"""Stopping in order: a signal asks, the loop finishes its step, saves, and leaves."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)

# "Temporary failure, try again" of sysexits.h: the run was asked to stop and can be resumed.
EXIT_STOPPED = 75


class StopSignal:
    """Remembers SIGTERM and SIGINT while active; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
