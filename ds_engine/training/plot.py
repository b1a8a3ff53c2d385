"""Figures from a run's ``log.jsonl``: one overview a run, and one metric of several runs compared.

matplotlib is used through its object interface (no pyplot), so nothing is shared between figures
and no display is needed. Colours are those of Okabe and Ito, which colour-blind readers tell apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ds_engine.errors import DataError
from ds_engine.training.run_folder import RunFolder
from ds_engine.training.tracking.jsonl import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

_BLUE, _VERMILLION, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_COLOURS: Final = (_BLUE, _VERMILLION, _GREEN, _PURPLE, "#E69F00", "#56B4E9", "#000000")
_LINES: Final = ("-", "--", ":", "-.")
_GREY: Final = "#555555"
_DPI: Final = 120  # 10 x 7 inches are then 1200 x 840 pixels
# Metric to title and unit.
_LABELS: Final[dict[str, tuple[str, str]]] = {
    "train/loss": ("Training loss", "nats per token"),
    "train/lr": ("Learning rate", ""),
    "train/grad_norm": ("Gradient norm", ""),
    "train/tokens_per_second": ("Throughput", "tokens per second"),
    "train/mfu": ("Model FLOPs utilisation", "share of the peak"),
    "train/step_seconds": ("Time of a step", "seconds"),
    "train/data_wait_seconds": ("Waiting for data", "seconds per step"),
    "train/memory_gib": ("Peak memory", "GiB"),
    "train/tokens": ("Tokens seen", ""),
    "train/samples": ("Samples seen", ""),
    "train/skipped_steps": ("Skipped steps", ""),
    "validation/loss": ("Validation loss", "nats per token"),
    "validation/perplexity": ("Validation perplexity", ""),
}
# The same of what is measured in training and in validation: loss terms and accuracies.
_MEASURES: Final[dict[str, tuple[str, str]]] = {
    "loss": ("Loss", "nats per token"),
    "masked_lm_loss": ("Loss of masked words", "nats per masked token"),
    "sentence_loss": ("Loss of sentence pairs", "nats per pair"),
    "sentence_accuracy": ("Accuracy of sentence pairs", ""),
    "classification_loss": ("Loss of classes", "nats per example"),
    "classification_accuracy": ("Accuracy of classes", ""),
}
_LOSS, _ACCURACY = "_loss", "accuracy"


@dataclass(frozen=True)
class Series:
    """One metric over the steps.

    Attributes:
        steps: completed optimizer steps, ascending.
        values: as many finite values.
        nonfinite: steps whose value was NaN or infinite.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    nonfinite: tuple[int, ...] = ()


def read_series(run: Path) -> dict[str, Series]:
    """Return every metric of a run by name.

    Args:
        run: a run folder or a log file.

    Raises:
        DataError: there is no log, it is damaged or it holds no row.
    """
    path = run if run.suffix == ".jsonl" else RunFolder(run).log_path
    rows = read_log(path)
    if not rows:
        raise DataError(
            f"{path} holds no row; the first one is written after training.log_every steps"
        )
    names = {name for row in rows for name in row if "/" in name}
    return {name: _series(name, rows) for name in sorted(names)}


def _series(name: str, rows: Sequence[Mapping[str, Any]]) -> Series:
    with_name = [row for row in rows if name in row]
    finite = [row for row in with_name if row[name] is not None]
    return Series(
        steps=tuple(row["step"] for row in finite),
        values=tuple(float(row[name]) for row in finite),
        nonfinite=tuple(row["step"] for row in with_name if row[name] is None),
    )


def smooth(values: Sequence[float], *, width: float) -> list[float]:
    """Return a local linear fit of ``values`` under a Gaussian of ``width`` values.

    Unlike a running average it neither lags behind a falling loss nor is drawn up at the two ends
    (Cleveland 1979, Robust locally weighted regression, without the robust weights).
    """
    import numpy as np

    series = np.asarray(values, dtype=np.float64)
    reach = min(math.ceil(3 * width), len(series) - 1)
    if reach < 1:
        return list(values)
    distance = np.arange(-reach, reach + 1, dtype=np.float64)
    weight = np.exp(-0.5 * (distance / width) ** 2)

    def moment(power: int, of: Any) -> Any:
        # numpy convolves with the kernel reversed, so that distance is counted from the centre.
        full = np.convolve(of, (weight * distance**power)[::-1])
        return full[reach : reach + len(series)]

    ones = np.ones_like(series)
    sum_0, sum_1, sum_2 = (moment(power, ones) for power in (0, 1, 2))
    fit = (sum_2 * moment(0, series) - sum_1 * moment(1, series)) / (sum_0 * sum_2 - sum_1**2)
    return [float(value) for value in fit]


def measure_label(name: str) -> tuple[str, str]:
    """Return title and unit of a loss term or an accuracy, such as ``masked_lm_loss``."""
    words = name.replace("_", " ").capitalize()
    return _MEASURES.get(name, (words, "" if name.endswith(_ACCURACY) else "nats"))


def measures(series: Mapping[str, Series]) -> tuple[str, ...]:
    """Return what a run's figure shows in a panel each: its loss or the terms of it, accuracies.

    A loss of several terms has each of them in the log as ``train/NAME_loss``.
    """
    terms = {name.removeprefix("train/") for name in series if name.startswith("train/")}
    losses = sorted(name for name in terms if name.endswith(_LOSS)) or ["loss"]
    held_out = {name.removeprefix("validation/") for name in series}
    return (*losses, *sorted(name for name in held_out if name.endswith(_ACCURACY)))


def plot_run(
    run: Path,
    *,
    output: Path | None = None,
    references: Mapping[str, float] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Draw a run's loss, learning rate, gradient norm and speed into one figure and return its
    path.

    A loss of several terms has a panel for each, and so has an accuracy.

    Args:
        run: a run folder or a log file.
        output: the image; the default is ``curves/training.png`` in the run folder.
        references: horizontal lines in the (first) loss, name to nats per token (another model's
            loss, for one).
        baselines: what is possible without reading the input, by the name of the loss or accuracy
            (``loss``, ``masked_lm_loss``, ``sentence_accuracy``): the entropy of the unigram
            distribution, the share of the most frequent label. Names without a panel are ignored.

    Raises:
        DataError: there is nothing to draw, or the image cannot be written.
    """
    series = read_series(run)
    panels = measures(series)
    figure = _figure(height=7.0, width=10.0 if len(panels) == 1 else 12.5)
    columns = math.lcm(3, len(panels))
    grid = figure.add_gridspec(2, columns, height_ratios=(1.7, 1.0))
    figure.suptitle(f"Training of {_label(run)}", fontsize=14, fontweight="bold")
    for index, name in enumerate(panels):
        share = columns // len(panels)
        axes = figure.add_subplot(grid[0, index * share : (index + 1) * share])
        _draw(axes, series.get(f"train/{name}"), "training", _BLUE)
        _draw(axes, series.get(f"validation/{name}"), "validation", _VERMILLION, markers=True)
        lines = {} if index else dict(references or {})
        if baselines and name in baselines:
            kind = "most frequent label" if name.endswith(_ACCURACY) else "unigram entropy"
            lines[kind] = baselines[name]
        _references(axes, lines)
        _finish(axes, *measure_label(name))
        if name.endswith(_ACCURACY):
            axes.yaxis.set_major_formatter(_percent())
    small = {
        "train/lr": _GREEN,
        "train/grad_norm": _PURPLE,
        "train/tokens_per_second": _BLUE,
    }
    for column, (name, colour) in enumerate(small.items()):
        share = columns // len(small)
        axes = figure.add_subplot(grid[1, column * share : (column + 1) * share])
        _draw(axes, series.get(name), "", colour, smoothed=name != "train/lr")
        _finish(axes, *_LABELS[name])
        if name in ("train/lr", "train/tokens_per_second") and axes.lines:
            axes.set_ylim(bottom=0)
    return _save(figure, output or _curves(run) / "training.png")


def plot_comparison(
    runs: Sequence[Path],
    *,
    metric: str = "train/loss",
    output: Path | None = None,
    references: Mapping[str, float] | None = None,
) -> Path:
    """Draw one metric of several runs into one figure and return its path.

    Args:
        runs: run folders or log files, at least one.
        metric: the name of the metric in the log.
        output: the image; the default is in the ``curves`` folder of the first run.
        references: horizontal lines, name to value.

    Raises:
        DataError: a run has no log or lacks the metric, or the image cannot be written.
    """
    figure = _figure(height=6.0)
    axes = figure.add_subplot()
    for index, (run, label) in enumerate(zip(runs, _labels(runs), strict=True)):
        series = read_series(run)
        if metric not in series:
            raise DataError(
                f'{run} has no metric "{metric}" in its log; it has {", ".join(series) or "none"}'
            )
        line = _LINES[index // len(_COLOURS) % len(_LINES)]
        _draw(axes, series[metric], label, _COLOURS[index % len(_COLOURS)], line=line)
    _references(axes, references)
    measure = metric.removeprefix("train/").removeprefix("validation/")
    unit = _MEASURES.get(measure, ("", ""))[1]
    _finish(axes, *_LABELS.get(metric, (metric, unit)))
    name = f"{'comparison_' if len(runs) > 1 else ''}{metric.replace('/', '_')}.png"
    return _save(figure, output or _curves(runs[0]) / name)


def _label(run: Path) -> str:
    path = run.resolve()
    return path.parent.name if path.suffix == ".jsonl" else path.name


def _labels(runs: Sequence[Path]) -> list[str]:
    """Name each run by its folder, by more of its path where two folders have the same name."""
    labels = [_label(run) for run in runs]
    return [
        label if labels.count(label) == 1 else str(run)
        for run, label in zip(runs, labels, strict=True)
    ]


def _curves(run: Path) -> Path:
    return RunFolder(run.parent if run.suffix == ".jsonl" else run).curves


def _percent() -> "Formatter":
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1.0)


def _figure(height: float, width: float = 10.0) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Padding in inches; the default touches the edges.
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    return Figure(figsize=(width, height), layout=engine)


def _draw(
    axes: "Axes",
    series: Series | None,
    label: str,
    colour: str,
    *,
    line: str = "-",
    markers: bool = False,
    smoothed: bool = True,
) -> None:
    """Draw a smoothed line over the raw values; steps with NaN are crosses on the lower edge."""
    if series is None:
        return
    steps, values = series.steps, series.values
    if markers or len(values) < 2:  # a single value has no line
        axes.plot(steps, values, line, color=colour, label=label, marker="o", markersize=4)
    elif smoothed and len(values) >= 30:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
        averaged = smooth(values, width=max(len(values) / 100, 2))
        axes.plot(steps, averaged, line, color=colour, label=label, linewidth=1.8)
    else:
        axes.plot(steps, values, line, color=colour, label=label, linewidth=1.8)
    if series.nonfinite:
        axes.plot(
            series.nonfinite,
            [0.03] * len(series.nonfinite),
            "x",
            color=colour,
            transform=axes.get_xaxis_transform(),
            label=f"{label} not finite".strip(),
        )


def _references(axes: "Axes", references: Mapping[str, float] | None) -> None:
    for index, (name, value) in enumerate((references or {}).items()):
        axes.axhline(
            value,
            color=_GREY,
            linestyle=_LINES[(index + 1) % len(_LINES)],
            linewidth=1.2,
            label=f"{name} ({value:.4g})",
        )


def _finish(axes: "Axes", title: str, unit: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    if axes.dataLim.y1 >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if axes.dataLim.x1 >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.lines:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=_GREY)
    elif axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _save(figure: "Figure", output: Path) -> Path:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=_DPI)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        raise DataError(
            f"{output} cannot be written: {error}; name a .png, .svg or .pdf"
        ) from error
    return output
