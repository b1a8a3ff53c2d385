import math
import re
import struct

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.errors import DataError
from ds_engine.training.plot import (
    Series,
    measure_label,
    measures,
    plot_comparison,
    plot_run,
    read_series,
    smooth,
)
from ds_engine.training.run_folder import RunFolder
from ds_engine.training.tracking.jsonl import JsonlTracker
from launch.commands.plot import command


def make_run(path, *, steps=40, nonfinite=()):
    folder = RunFolder(path).create()
    tracker = JsonlTracker(folder.log_path, run_id="r", first_step=0)
    for step in range(1, steps + 1):
        loss = math.nan if step in nonfinite else 10.0 / step
        tracker.log(step, {"train/loss": loss, "train/lr": 1e-3, "train/grad_norm": 1.0})
        if step % 10 == 0:
            tracker.log(step, {"validation/loss": 11.0 / step})
    tracker.close(0)
    return path


TERMS = {"masked_lm_loss": 8.0, "sentence_loss": 0.7}


def make_run_of_terms(path, *, terms=TERMS, accuracies=("sentence_accuracy",), steps=40):
    """A run whose loss has terms; of one term the log has only the loss, in training."""
    folder = RunFolder(path).create()
    tracker = JsonlTracker(folder.log_path, run_id="r", first_step=0)
    for step in range(1, steps + 1):
        values = {name: value / step for name, value in terms.items()}
        row = {"loss": sum(values.values()), **(values if len(values) > 1 else {})}
        tracker.log(step, {"train/lr": 1e-3} | {f"train/{name}": row[name] for name in row})
        if step % 10 == 0:
            row |= values | dict.fromkeys(accuracies, 0.5 + step / 100)
            tracker.log(step, {f"validation/{name}": row[name] for name in row})
    tracker.close(0)
    return path


def drawn(path):
    """The words of an SVG's comments, where matplotlib leaves the text that it draws as paths."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_series_leave_out_what_is_not_finite_and_remember_where(tmp_path):
    series = read_series(make_run(tmp_path / "a", steps=4, nonfinite=(2,)))
    assert series["train/loss"] == Series((1, 3, 4), (10.0, 10 / 3, 2.5), nonfinite=(2,))
    assert "validation/loss" not in series
    assert set(series) == {"train/loss", "train/lr", "train/grad_norm"}


def test_overview_of_a_run(tmp_path):
    run = make_run(tmp_path / "a", nonfinite=(7,))
    path = plot_run(run, references={"unigram entropy": 6.25})
    assert path == run / "curves" / "training.png"
    assert png_size(path) == (1200, 840)
    before = path.read_bytes()
    plot_run(run)
    assert path.read_bytes() != before  # the reference line is part of the figure


def test_each_loss_term_has_a_panel_with_its_own_baseline(tmp_path):
    run = make_run_of_terms(tmp_path / "a")
    series = read_series(run)
    assert measures(series) == ("masked_lm_loss", "sentence_loss", "sentence_accuracy")
    baselines = {"masked_lm_loss": 6.25, "sentence_loss": 0.693, "sentence_accuracy": 0.52}
    words = drawn(plot_run(run, output=tmp_path / "a.svg", baselines={**baselines, "loss": 9.0}))
    titles = [measure_label(name)[0] for name in baselines]
    assert [word for word in words if word in titles] == titles
    assert [word for word in words if "(" in word] == [
        "unigram entropy (6.25)",
        "unigram entropy (0.693)",
        "most frequent label (0.52)",
    ]
    assert "Loss" not in words  # the sum of different kinds of loss says nothing
    assert "60%" in words or "60.0%" in words


def test_references_stay_in_the_first_loss(tmp_path):
    run = make_run_of_terms(tmp_path / "a")
    words = drawn(plot_run(run, output=tmp_path / "a.svg", references={"another model": 5.5}))
    assert [word for word in words if "(" in word] == ["another model (5.5)"]


def test_a_loss_of_one_term_with_an_accuracy(tmp_path):
    run = make_run_of_terms(
        tmp_path / "a",
        terms={"classification_loss": 0.7},
        accuracies=("classification_accuracy",),
    )
    assert measures(read_series(run)) == ("loss", "classification_accuracy")
    words = drawn(plot_run(run, output=tmp_path / "a.svg", baselines={"loss": 0.6}))
    assert "Loss" in words
    assert "Accuracy of classes" in words
    assert "unigram entropy (0.6)" in words


def test_a_baseline_is_a_reference_of_the_loss(tmp_path):
    run = make_run(tmp_path / "a")
    before = plot_run(run, references={"unigram entropy": 6.25}).read_bytes()
    assert plot_run(run, baselines={"loss": 6.25}).read_bytes() == before


def test_labels_of_measures_nobody_has_named():
    assert measure_label("masked_lm_loss") == ("Loss of masked words", "nats per masked token")
    assert measure_label("router_loss") == ("Router loss", "nats")
    assert measure_label("router_accuracy") == ("Router accuracy", "")


@pytest.mark.parametrize(("steps", "nonfinite"), [(1, ()), (2, ()), (3, (1, 2, 3))])
def test_runs_of_a_few_steps_can_be_drawn(tmp_path, steps, nonfinite):
    assert plot_run(make_run(tmp_path / "a", steps=steps, nonfinite=nonfinite)).exists()


def test_comparison(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    path = plot_comparison(runs, references={"x": 1.0})
    assert path == tmp_path / "a" / "curves" / "comparison_train_loss.png"
    assert png_size(path) == (1200, 720)
    path = plot_comparison(runs[:1], metric="validation/loss", output=tmp_path / "deep" / "v.svg")
    assert path.read_text().startswith("<?xml")


def test_missing_and_empty_logs_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere/log\.jsonl cannot be read"):
        plot_run(tmp_path / "nowhere")
    empty = make_run(tmp_path / "empty", steps=0)
    with pytest.raises(DataError, match=r"empty/log\.jsonl holds no row.*log_every"):
        plot_run(empty)


def test_a_missing_metric_lists_those_there_are(tmp_path):
    run = make_run(tmp_path / "a", steps=2)
    with pytest.raises(DataError, match=r'no metric "train/los".*train/grad_norm, train/loss'):
        plot_comparison([run], metric="train/los")


def test_an_unknown_kind_of_image_is_refused(tmp_path):
    run = make_run(tmp_path / "a", steps=2)
    with pytest.raises(DataError, match=r"x\.bmp cannot be written.*\.png, \.svg or \.pdf"):
        plot_run(run, output=tmp_path / "x.bmp")


@given(
    slope=st.floats(-5, 5),
    offset=st.floats(-5, 5),
    count=st.integers(1, 80),
    width=st.floats(0.5, 20),
)
def test_smoothing_keeps_a_straight_line_to_its_ends(slope, offset, count, width):
    line = [offset + slope * index for index in range(count)]
    assert smooth(line, width=width) == pytest.approx(line, abs=1e-6)


def test_smoothing_takes_noise_away():
    noise = [(-1.0) ** index for index in range(200)]
    assert max(abs(value) for value in smooth(noise, width=5.0)[10:-10]) < 0.01


def test_command_draws_one_run(tmp_path):
    run = make_run(tmp_path / "a")
    output = tmp_path / "x.png"
    result = CliRunner().invoke(
        command, [str(run), "--output", str(output), "--reference", "a = b=2.5"]
    )
    assert result.exit_code == 0, result.output
    assert result.output.split() == [str(output)]
    assert png_size(output) == (1200, 840)


def test_command_compares_several_runs_by_folder_or_log(tmp_path):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b") / "log.jsonl")]
    result = CliRunner().invoke(command, runs)
    assert result.exit_code == 0, result.output
    assert result.output.split() == [
        str(tmp_path / "a" / "curves" / "training.png"),
        str(tmp_path / "b" / "curves" / "training.png"),
        str(tmp_path / "a" / "curves" / "comparison_train_loss.png"),
    ]
    result = CliRunner().invoke(command, [runs[0], "--metric", "train/lr"])
    assert result.output.split() == [str(tmp_path / "a" / "curves" / "train_lr.png")]


@pytest.mark.parametrize("text", ["6.3", "=6.3", "entropy=high", "entropy"])
def test_command_refuses_a_reference_without_name_or_number(tmp_path, text):
    result = CliRunner().invoke(command, [str(tmp_path), "--reference", text])
    assert result.exit_code == 2
    assert "is not NAME=NUMBER" in result.output


def test_help_says_what_several_runs_give():
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "Several runs: that figure for each" in re.sub("\n *", " ", shown)
