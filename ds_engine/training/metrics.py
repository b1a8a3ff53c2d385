"""Speed and memory of training: tokens per second, FLOPs utilisation, waiting, peak memory."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GIB: Final = 1 << 30
MemoryProbe = Callable[[], int]


def process_peak_bytes() -> int:
    """Return the largest resident size this process has had, in bytes; the probe of CPU runs."""
    # Not getrusage on Linux: its peak survives exec, so a rank would report its launcher's.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def model_flops_utilisation(
    *, samples_per_second: float, flops_per_sample: float, peak_tflops: float, devices: int
) -> float:
    """Return the share of the devices' peak that the model's own arithmetic uses, 0 to 1.

    Recomputed activations do not count as work done: PaLM, Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, appendix B.

    Args:
        samples_per_second: of the whole job.
        flops_per_sample: forward and backward, of the model as it is.
        peak_tflops: dense peak of one device in the precision used, TFLOP/s.
        devices: ranks of the whole job.

    Raises:
        ValueError: ``peak_tflops`` or ``devices`` is not above 0.
    """
    if not peak_tflops > 0 or devices < 1:
        raise ValueError(f"peak_tflops = {peak_tflops} and devices = {devices} must be above 0")
    return samples_per_second * flops_per_sample / (peak_tflops * 1e12 * devices)


def perplexity(loss: float) -> float:
    """Return e to the ``loss`` (nats per token); infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass
class _Window:
    started: float
    steps: int = 0
    tokens: int = 0
    samples: int = 0
    waiting: float = 0.0
    excluded: float = 0.0


class StepTimer:
    """Measures the steps since the last report.

    Per step: ``with timer.waiting(): batch = next(batches)``, then the work, then
    ``timer.step(tokens=n, samples=m)``. Evaluation and checkpoints go into
    ``with timer.excluded():``, so that they do not count as slow steps.

    The clock runs on the host: the caller's step must end with something that waits for the device
    (the loss is read, for one), else the time of the last steps falls into the next window.

    Args:
        devices: ranks of the whole job.
        flops_per_sample: forward and backward FLOPs of one sample, or None.
        peak_tflops: dense peak of one device as stated in the config, or None. Without either,
            utilisation is left out and never guessed.
        memory: returns this rank's peak memory in bytes: the accelerator's, or
            ``process_peak_bytes``.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        devices: int = 1,
        flops_per_sample: float | None = None,
        peak_tflops: float | None = None,
        memory: MemoryProbe | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices = devices
        self._flops_per_sample = flops_per_sample
        self._peak_tflops = peak_tflops
        self._memory = memory
        self._clock = clock
        self._window = _Window(started=clock())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data; it stays part of the step."""
        before = self._clock()
        try:
            yield
        finally:
            self._window.waiting += self._clock() - before

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Keep the time inside out of the step times; a report in between starts anew as well."""
        before = self._clock()
        try:
            yield
        finally:
            # A report inside the block has opened a new window, which only saw the time since.
            self._window.excluded += self._clock() - max(before, self._window.started)

    def step(self, *, tokens: int, samples: int) -> None:
        """Count one finished step of so many target tokens and samples over all ranks."""
        self._window.steps += 1
        self._window.tokens += tokens
        self._window.samples += samples

    def report(self) -> dict[str, float]:
        """Return the window's metrics and start a new window; without a step, only the memory.

        ``train/step_seconds`` and ``train/data_wait_seconds`` are means per step,
        ``train/tokens_per_second`` (tokens that the loss counts) and ``train/samples_per_second``
        are of the whole job and ``train/memory_gib`` this rank's peak.
        """
        now, window = self._clock(), self._window
        self._window = _Window(started=now)
        metrics: dict[str, float] = {}
        if window.steps:
            seconds = now - window.started - window.excluded
            metrics["train/step_seconds"] = seconds / window.steps
            metrics["train/data_wait_seconds"] = window.waiting / window.steps
            if seconds > 0:
                metrics["train/tokens_per_second"] = window.tokens / seconds
                metrics["train/samples_per_second"] = window.samples / seconds
                if self._flops_per_sample is not None and self._peak_tflops is not None:
                    metrics["train/mfu"] = model_flops_utilisation(
                        samples_per_second=window.samples / seconds,
                        flops_per_sample=self._flops_per_sample,
                        peak_tflops=self._peak_tflops,
                        devices=self._devices,
                    )
        if self._memory is not None:
            metrics["train/memory_gib"] = self._memory() / GIB
        return metrics
