import io
import logging
import math
import subprocess
import sys

import pytest

from ds_engine.config.schema import TrackingConfig, WandbConfig
from ds_engine.errors import ConfigError, LaunchError
from ds_engine.training.run_folder import RunFolder
from ds_engine.training.tracking.build import build_tracker
from ds_engine.training.tracking.jsonl import read_log
from ds_engine.training.tracking.progress import ProgressTracker, describe, format_duration
from ds_engine.training.tracking.tracker import (
    CompositeTracker,
    GuardedTracker,
    NullTracker,
    Tracker,
)
from ds_engine.training.tracking.wandb_tracker import WandbTracker, resolve_mode
from tests.read_wandb import wandb_history, wandb_run


class Recorder:
    """A tracker that remembers its calls and fails on demand."""

    def __init__(self, fail=()):
        self.calls = []
        self.fail = fail

    def _called(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.fail:
            raise RuntimeError(f"{name} broke")

    def log(self, step, metrics):
        self._called("log", step, dict(metrics))

    def summary(self, values):
        self._called("summary", dict(values))

    def close(self, exit_code):
        self._called("close", exit_code)


def losses(path):
    return {row["step"]: row["train/loss"] for row in read_log(path)}


# guard and composite


def test_a_failing_backend_is_reported_once_and_never_raises():
    reports = []
    inner = Recorder(fail=("log", "summary", "close"))
    tracker = GuardedTracker(inner, name="wandb", report=reports.append)
    for step in range(5):
        tracker.log(step, {})
    tracker.summary({})
    tracker.close(0)
    assert len(inner.calls) == 7
    assert reports == [
        "wandb failed at step 0: RuntimeError: log broke. Training goes on; further failures are "
        "not reported."
    ]


def test_patience_ends_after_failures_in_a_row_but_close_is_still_called():
    inner = Recorder(fail=("log",))
    tracker = GuardedTracker(inner, name="wandb", patience=2, report=lambda _: None)
    tracker.log(1, {})
    inner.fail = ()
    tracker.log(2, {})
    inner.fail = ("log",)
    for step in (3, 4, 5, 6):
        tracker.log(step, {})
    tracker.close(1)
    assert [call[1] for call in inner.calls] == [1, 2, 3, 4, 1]
    assert inner.calls[-1] == ("close", 1)


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Recorder):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedTracker(Interrupted(), name="x").log(1, {})


def test_composite_hands_on_to_all_in_order():
    first, second = Recorder(), Recorder()
    tracker = CompositeTracker([first, second])
    tracker.log(1, {"a": 2.0})
    tracker.summary({"b": 1.0})
    tracker.close(3)
    expected = [("log", 1, {"a": 2.0}), ("summary", {"b": 1.0}), ("close", 3)]
    assert first.calls == second.calls == expected


# progress

ROW = {
    "train/loss": 2.5,
    "train/lr": 3e-4,
    "train/grad_norm": 1.25,
    "train/tokens_per_second": 12e3,
}


def test_plain_progress_is_one_line_a_row_with_the_time_left():
    stream, now = io.StringIO(), [0.0]
    tracker = ProgressTracker(total_steps=100, first_step=40, stream=stream, clock=lambda: now[0])
    now[0] = 20.0
    tracker.log(50, ROW)
    tracker.log(50, {"validation/loss": 2.25, "validation/perplexity": 9.4877})
    tracker.log(60, {"train/data_wait_seconds": 1.0})
    tracker.close(0)
    assert stream.getvalue().splitlines() == [
        "step 50/100 | loss 2.5000 | lr 0.0003 | grad norm 1.25 | 12,000 tokens/s | 0:01:40 left",
        "step 50/100 | validation loss 2.2500 | perplexity 9.488",
    ]


def test_progress_shows_the_terms_of_a_loss_and_accuracies():
    terms = {"loss": 4.1, "masked_lm_loss": 3.4, "sentence_loss": 0.7}
    train = {f"train/{name}": value for name, value in terms.items()}
    held_out = {f"validation/{name}": value for name, value in terms.items()}
    assert describe({"train/lr": 0.1, **train}) == (
        "loss 4.1000 (masked_lm 3.4000, sentence 0.7000) | lr 0.1"
    )
    assert describe({**held_out, "validation/sentence_accuracy": 0.625}) == (
        "validation loss 4.1000 (masked_lm 3.4000, sentence 0.7000) | sentence accuracy 62.5%"
    )
    # A single term is the loss.
    single = {"validation/loss": 0.5, "validation/classification_loss": 0.5}
    assert describe(single) == "validation loss 0.5000"


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    tracker = ProgressTracker(total_steps=100, first_step=40, stream=stream)
    tracker.log(50, {**ROW, "train/loss": math.nan})
    tracker.log(50, {"validation/loss": 2.25})
    tracker.close(0)
    tracker.log(60, ROW)  # after close: a plain line, not an error
    output = stream.getvalue()
    assert "50/100" in output
    assert "loss nan" in output
    assert "step 50/100 | validation loss 2.2500" in output


def test_durations():
    values = [format_duration(seconds) for seconds in (0, 59.6, 3723, 90000, math.inf)]
    assert values == ["0:00:00", "0:01:00", "1:02:03", "1d 1:00:00", "?"]


# building


def build(folder, *, config=None, rank=0, first_step=0, **more):
    config = config or TrackingConfig(progress=False)
    return build_tracker(
        config,
        run_folder=RunFolder(folder),
        run_id="abc123",
        resolved_config={"seed": 1, "model": {"norm": {"epsilon": 1e-5}}},
        total_steps=100,
        first_step=first_step,
        rank=rank,
        **more,
    )


def test_only_rank_0_tracks(tmp_path):
    config = TrackingConfig(wandb=WandbConfig(project="p", mode="offline"))
    tracker = build(tmp_path / "run", config=config, rank=1)
    tracker.log(1, {"train/loss": 1.0})
    tracker.summary({})
    tracker.close(0)
    assert isinstance(tracker, NullTracker)
    assert not (tmp_path / "run").exists()


def test_rank_0_writes_what_is_switched_on(tmp_path):
    stream = io.StringIO()
    tracker = build(tmp_path, config=TrackingConfig(), stream=stream)
    assert isinstance(tracker, Tracker)
    tracker.log(10, ROW)
    tracker.close(0)
    assert losses(tmp_path / "log.jsonl") == {10: 2.5}
    assert stream.getvalue().startswith("step 10/100 | loss 2.5")
    assert not (tmp_path / "wandb").exists()


def test_everything_off_is_a_tracker_that_does_nothing(tmp_path):
    tracker = build(tmp_path, config=TrackingConfig(jsonl=False, progress=False))
    tracker.log(1, ROW)
    tracker.close(0)
    assert not (tmp_path / "log.jsonl").exists()


def test_a_log_that_cannot_be_opened_stops_before_training(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(LaunchError, match=r"log\.jsonl cannot be written: Is a directory"):
        build(tmp_path)


def test_a_disk_that_fills_up_does_not_stop_training(tmp_path, caplog):
    tracker = build(tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    (guarded,) = tracker.trackers
    guarded._tracker._stream.close()
    guarded._tracker._stream = open("/dev/full", "w")  # noqa: SIM115
    with caplog.at_level(logging.WARNING):
        tracker.log(2, {"train/loss": 1.0})
        tracker.log(3, {"train/loss": 1.0})
        tracker.close(0)
    assert len(caplog.records) == 1
    assert "log.jsonl failed at step 2: OSError" in caplog.text


# wandb


@pytest.mark.parametrize(
    ("mode", "has_key", "expected"),
    [
        ("auto", True, "online"),
        ("auto", False, "offline"),
        ("online", True, "online"),
        ("offline", True, "offline"),
        ("disabled", False, "disabled"),
    ],
)
def test_modes(mode, has_key, expected):
    assert resolve_mode(mode, has_key=has_key) == expected


def test_online_without_a_key_is_refused_before_wandb_asks_on_a_terminal(tmp_path):
    config = TrackingConfig(wandb=WandbConfig(project="p", mode="online"), progress=False)
    with pytest.raises(ConfigError, match=r'"online" needs an API key.*wandb login'):
        build(tmp_path, config=config)
    with pytest.raises(ConfigError, match='mode = "on-line" is unknown'):
        resolve_mode("on-line", has_key=True)


class FakeRun:
    def __init__(self):
        self.rows = []
        self.summary = {}
        self.exit_code = None

    def log(self, metrics, *, step):
        self.rows.append((step, metrics))

    def finish(self, *, exit_code):
        self.exit_code = exit_code


def start_fake(**arguments):
    run = FakeRun()
    run.arguments = arguments
    return run


def fake_wandb(tmp_path, mode, start=start_fake):
    config = WandbConfig(project="p", name="n", group="g", tags=("a", "b"))
    return WandbTracker(
        config, mode=mode, folder=tmp_path, run_id="abc", resolved_config={"seed": 1}, start=start
    )


def test_wandb_gets_the_id_the_config_and_explicit_steps(tmp_path):
    tracker = fake_wandb(tmp_path, "online")
    tracker.log(7, {"train/loss": 1.0})
    tracker.summary({"best": 0.5})
    tracker.close(1)
    run = tracker._run
    expected = {"id": "abc", "resume": "allow", "mode": "online", "dir": str(tmp_path)}
    assert expected.items() <= run.arguments.items()
    assert run.arguments["config"] == {"seed": 1}
    assert run.arguments["tags"] == ["a", "b"]
    assert run.rows == [(7, {"train/loss": 1.0})]
    assert run.summary == {"best": 0.5}
    assert run.exit_code == 1


def test_wandb_that_does_not_start_is_an_error_with_a_way_out(tmp_path):
    def refuse(**arguments):
        raise ConnectionError("no route")

    with pytest.raises(
        ConfigError, match=r'"online" but wandb did not start: .*no route.*"offline"'
    ):
        fake_wandb(tmp_path, "online", start=refuse)


OFFLINE = """
import sys
from pathlib import Path
from ds_engine.config.schema import TrackingConfig, WandbConfig
from ds_engine.training.run_folder import RunFolder
from ds_engine.training.tracking.build import build_tracker
folder, first, last = RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
config = TrackingConfig(
    wandb=WandbConfig(project="proj", name="try", group="g", mode="offline", tags=("t",)),
    progress=False,
)
tracker = build_tracker(
    config, run_folder=folder, run_id=folder.run_id(), total_steps=9, first_step=first, rank=0,
    resolved_config={"seed": 7, "model": {"norm": {"epsilon": 1e-5}}, "data": {"train": [{"path":
    "x"}]}},
)
for step in range(first + 1, last + 1):
    tracker.log(step, {"train/loss": 10.0 - step, "train/lr": 0.1})
    if step == 3:
        tracker.log(step, {"validation/loss": float("nan")})
tracker.summary({"best/loss": 1.0})
tracker.close(0)
"""


@pytest.mark.slow
def test_wandb_offline_for_real_two_sessions_of_one_run(tmp_path):
    """A session of 4 steps dies, the next resumes from step 2; both are read back from disk."""
    for first, last in ((0, 4), (2, 5)):
        command = [sys.executable, "-c", OFFLINE, str(tmp_path / "run"), str(first), str(last)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    folder = RunFolder(tmp_path / "run")
    files = sorted(folder.wandb.glob("offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{folder.run_id()}.wandb"] * 2
    for file, first, last in zip(files, (0, 2), (4, 5), strict=True):
        rows = {row["_step"]: row for row in wandb_history(file)}
        assert list(rows) == list(range(first + 1, last + 1))
        assert {step: row["train/loss"] for step, row in rows.items()} == {
            step: 10.0 - step for step in rows
        }
        assert math.isnan(float(rows[3]["validation/loss"]))
        run = wandb_run(file)
        assert run["id"] == folder.run_id()
        assert (run["project"], run["name"], run["group"]) == ("proj", "try", "g")
        assert run["tags"] == ["t"]
        assert run["config"]["model"] == {"norm": {"epsilon": 1e-5}}
        assert run["config"]["data"] == {"train": [{"path": "x"}]}
        assert run["exit_code"] == 0
    assert list(losses(folder.log_path)) == [1, 2, 3, 4, 5]


def test_trackers_import_nothing_heavy():
    code = (
        "import sys, ds_engine.training.tracking.build;"
        "print([m for m in ('wandb', 'rich', 'torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
