"""Progress on the terminal: a live bar where there is one, else one line a logged step."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


def format_duration(seconds: float) -> str:
    """Return ``seconds`` as ``1:02:03``, with days in front where there are any."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"


def describe(metrics: Mapping[str, float]) -> str:
    """Return in one line what a person watches: loss, learning rate, gradient norm, speed.

    Where a loss has several terms they follow it: ``loss 4.1 (masked_lm 3.4, sentence 0.7)``.
    """
    parts = [
        form.format(metrics[name]) + _terms(name, metrics)
        for name, form in (
            ("train/loss", "loss {:.4f}"),
            ("train/lr", "lr {:.3g}"),
            ("train/grad_norm", "grad norm {:.3g}"),
            ("train/tokens_per_second", "{:,.0f} tokens/s"),
            ("train/mfu", "MFU {:.1%}"),
            ("validation/loss", "validation loss {:.4f}"),
            ("validation/perplexity", "perplexity {:.4g}"),
        )
        if name in metrics
    ]
    parts += [
        f"{name.removeprefix('validation/').replace('_', ' ')} {value:.1%}"
        for name, value in metrics.items()
        if name.startswith("validation/") and name.endswith("accuracy")
    ]
    if metrics.get("train/skipped_steps"):
        parts.append(f"{metrics['train/skipped_steps']:.0f} skipped")
    return " | ".join(parts)


def _terms(name: str, metrics: Mapping[str, float]) -> str:
    """The terms of the loss ``name`` in brackets; nothing if it has only one."""
    kind, separator, measure = name.partition("/")
    if measure != "loss":
        return ""
    start = kind + separator
    terms = [
        f"{key.removeprefix(start).removesuffix('_loss')} {value:.4f}"
        for key, value in metrics.items()
        if key.startswith(start) and key.endswith("_loss")
    ]
    return f" ({', '.join(terms)})" if len(terms) > 1 else ""


class ProgressTracker:
    """Shows how far the run is.

    Args:
        total_steps: ``training.steps``.
        first_step: completed steps when this session begins; the remaining time is estimated from
            this session's own speed.
        stream: where to write; the default is standard output. A bar is drawn only on a terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._first = first_step
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._start = clock()
        self._bar: _Bar | None = None
        if self._stream.isatty():
            self._bar = _Bar(self._stream, total=total_steps, completed=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one row; a row without training metrics is printed and leaves the bar as it is."""
        text = describe(metrics)
        if self._bar is not None and "train/loss" in metrics:
            self._bar.update(step, text, self._eta(step))
            return
        if not text:
            return
        line = f"step {step}/{self._total} | {text}"
        if "train/loss" in metrics:
            line += f" | {self._eta(step)} left"
        self._print(line)

    def summary(self, values: Mapping[str, float]) -> None:
        """Print the values."""
        self._print(", ".join(f"{name} {value:.6g}" for name, value in values.items()))

    def close(self, exit_code: int) -> None:
        """Take the bar away."""
        del exit_code
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.print(line)
        else:
            print(line, file=self._stream, flush=True)

    def _eta(self, step: int) -> str:
        done = step - self._first
        if done <= 0:
            return "?"
        return format_duration((self._clock() - self._start) / done * max(self._total - step, 0))


class _Bar:
    """The live bar; rich is imported only where there is a terminal to draw on."""

    def __init__(self, stream: TextIO, *, total: int, completed: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._progress: Progress = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.description}", markup=False),
            TextColumn("[dim]{task.fields[eta]} left"),
            console=Console(file=stream),
            # A refresh thread would compete with the ranks for cores; once a logged step is enough.
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting", total=total, completed=completed, eta="?")
        self._progress.start()
        self._progress.refresh()

    def update(self, step: int, text: str, eta: str) -> None:
        self._progress.update(self._task, completed=step, description=text, eta=eta, refresh=True)

    def print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def stop(self) -> None:
        self._progress.stop()
