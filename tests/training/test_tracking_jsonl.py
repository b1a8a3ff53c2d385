import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.errors import DataError
from ds_engine.training.tracking.jsonl import JsonlTracker, read_log


def session(path, first_step, steps, *, value=0.0, run_id="r"):
    tracker = JsonlTracker(path, run_id=run_id, first_step=first_step, clock=lambda: 5.0)
    for step in steps:
        tracker.log(step, {"train/loss": value + step})
    tracker.close(0)


def losses(path):
    return {row["step"]: row["train/loss"] for row in read_log(path)}


def test_rows_and_header(tmp_path):
    path = tmp_path / "log.jsonl"
    session(path, 0, [10])
    header, row = map(json.loads, path.read_text().splitlines())
    assert header == {"run_id": "r", "first_step": 0, "time": 5.0}
    assert row == {"step": 10, "time": 5.0, "train/loss": 10.0}


def test_each_row_can_be_read_before_the_tracker_is_closed(tmp_path):
    path = tmp_path / "log.jsonl"
    tracker = JsonlTracker(path, run_id="r", first_step=0)
    tracker.log(1, {"train/loss": 2.5})
    assert losses(path) == {1: 2.5}


def test_a_resume_replaces_the_rows_after_its_checkpoint(tmp_path):
    path = tmp_path / "log.jsonl"
    session(path, 0, [10, 20, 30, 40, 50])
    session(path, 20, [30, 40], value=100.0)
    assert losses(path) == {10: 10.0, 20: 20.0, 30: 130.0, 40: 140.0}
    session(path, 30, [40, 50, 60], value=200.0)
    assert losses(path) == {10: 10.0, 20: 20.0, 30: 130.0, 40: 240.0, 50: 250.0, 60: 260.0}
    assert len(path.read_text().splitlines()) == 3 + 5 + 2 + 3  # nothing was removed


def test_a_restart_from_the_beginning_replaces_all(tmp_path):
    path = tmp_path / "log.jsonl"
    session(path, 0, [10, 20])
    session(path, 0, [10], value=1.0)
    assert losses(path) == {10: 11.0}


def test_rows_of_one_step_are_one_row(tmp_path):
    path = tmp_path / "log.jsonl"
    tracker = JsonlTracker(path, run_id="r", first_step=0, clock=lambda: 5.0)
    tracker.log(10, {"train/loss": 1.0, "train/lr": 0.1})
    tracker.log(10, {"validation/loss": 2.0})
    tracker.summary({"best": 2.0})
    assert read_log(path) == [
        {"step": 10, "time": 5.0, "train/loss": 1.0, "train/lr": 0.1, "validation/loss": 2.0}
    ]


def test_nonfinite_values_stay_valid_json(tmp_path):
    path = tmp_path / "log.jsonl"
    tracker = JsonlTracker(path, run_id="r", first_step=0)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": 3})

    def no_constants(name):
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(path.read_text().splitlines()[1], parse_constant=no_constants)
    assert row["nonfinite"] == ["a", "b", "c"]
    assert [row[name] for name in "abcde"] == [None, None, None, 1.5, 3]
    tracker.log(1, {"a": 2.0})
    assert read_log(path)[0]["nonfinite"] == ["b", "c"]


def test_tensor_like_scalars_become_numbers(tmp_path):
    class Scalar:
        def __float__(self):
            return 0.5

    path = tmp_path / "log.jsonl"
    JsonlTracker(path, run_id="r", first_step=0).log(1, {"train/loss": Scalar()})
    assert losses(path) == {1: 0.5}


def test_a_metric_cannot_hide_the_step(tmp_path):
    tracker = JsonlTracker(tmp_path / "log.jsonl", run_id="r", first_step=0)
    with pytest.raises(ValueError, match='"step" names a field'):
        tracker.log(1, {"step": 7.0})


@given(cut=st.integers(1, 60), again=st.booleans())
def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path_factory, cut, again):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    session(path, 0, [10, 20, 30])
    text = path.read_bytes()
    last = len(text.splitlines(keepends=True)[-1])
    path.write_bytes(text[: -min(cut, last - 1)])
    kept = losses(path)
    assert kept in ({10: 10.0, 20: 20.0}, {10: 10.0, 20: 20.0, 30: 30.0})
    if again:
        session(path, 20, [30, 40])
        assert losses(path) == {10: 10.0, 20: 20.0, 30: 30.0, 40: 40.0}


def test_a_line_damaged_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "log.jsonl"
    session(path, 0, [10, 20, 30])
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-4]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"log\.jsonl, line 3: not a JSON object"):
        read_log(path)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(DataError, match=r"log\.jsonl cannot be read: No such file"):
        read_log(tmp_path / "log.jsonl")
