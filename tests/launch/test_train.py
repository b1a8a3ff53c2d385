"""Training through the real launchers: signals, killed ranks, resuming, and early errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.deepspeed_launcher import free_port
from tests.launch.tiny import (
    HOME,
    STEPS,
    cli,
    environment,
    last_step,
    losses,
    processes_in,
    ranks_of,
    run_object,
    started,
    wait_until,
)
from tests.launch.untrained import model_section
from tests.worlds import run_world


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.slow
def test_an_interrupted_and_killed_run_equals_the_uninterrupted_one(home: Path) -> None:
    """SIGTERM, resume, kill -9 of a rank, resume: the log is the uninterrupted run's, bit for bit.

    The first start is ``ds-engine train``, the others are ``deepspeed launch/train.py``.
    """
    before, run = shared_memory(), home / "runs" / "broken"
    setting = ("--set", "checkpoint.directory=runs/broken")
    ours = cli("train", "--config", "run.json", "--nproc", "2", *setting)
    theirs = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"),
        *("--master_port", str(free_port()), str(HOME / "launch" / "train.py")),
        *("--config", "run.json", *setting),
    ]

    with started(ours, home) as process:
        wait_until(lambda: last_step(run) >= 3, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    stopped = last_step(run)
    assert f"stopped by SIGTERM after step {stopped} of {STEPS}, checkpoint saved" in output
    assert (run / "checkpoints" / "latest").read_text() == f"step_{stopped:08d}\n"
    assert not processes_in(home)

    with started(theirs, home) as process:
        wait_until(lambda: last_step(run) >= max(stopped, 10) + 3, process)
        os.kill(ranks_of(home)[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 75), output
    assert f"resumed from step_{stopped:08d}" in output
    assert not processes_in(home)

    with started(theirs, home) as process:
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert f"finished step {STEPS} of {STEPS}" in output
    assert not processes_in(home)
    found, wanted = losses(run), losses(home / "runs" / "whole")
    assert list(wanted) == list(range(1, STEPS + 1))
    assert found == wanted
    assert shared_memory() <= before

    # One run over three processes, and all that it needs to be used
    headers = [json.loads(x) for x in (run / "log.jsonl").read_text().splitlines() if "run_id" in x]
    assert len(headers) == 3
    assert len({header["run_id"] for header in headers}) == 1
    assert (run / "curves").glob("*.png")
    assert (run / "tokenizer" / "tokenizer.json").is_file()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "latest",
        "step_00000050",
        "step_00000060",
    ]


def refused_resume_body(rank: int, folder: Path, overrides: tuple[str, ...]) -> str:
    from ds_engine.errors import CheckpointError
    from launch.train import train

    os.chdir(folder)
    try:
        train("run.json", overrides)
    except CheckpointError as error:
        return str(error)
    return "it trained"


def test_a_refused_resume_leaves_the_run_as_it_was(home: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.json"
    shutil.copytree(home / "runs" / "whole", run)
    shutil.copy(home / "data" / "tokenizer.json", other)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    changes = (f"checkpoint.directory={run}", f"data.tokenizer={other}", "model.init_std=0.5")
    answers = run_world(2, refused_resume_body, home, (*changes, "model.hidden_size=64"))
    assert all("another model" in answer for answer in answers), answers
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def refused(folder: Path, run: dict[str, Any], *more: str) -> tuple[str, float]:
    """Start a run that cannot work; what it said and how long that took."""
    (folder / "wrong.json").write_text(json.dumps(run))
    began = time.monotonic()
    found = subprocess.run(
        cli("train", "--config", "wrong.json", *more),
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(HOME), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 2, found
    assert "Traceback" not in found.stderr
    assert not found.stdout
    return found.stderr, time.monotonic() - began


@pytest.mark.slow
def test_what_cannot_work_is_refused_before_any_process_starts(home: Path) -> None:
    before = set((home / "runs").iterdir())
    run = run_object()
    run["training"]["stepz"] = 5
    run["model"]["hiden_size"] = 5
    text, seconds = refused(home, run)
    assert "training.stepz" in text
    assert 'did you mean "steps"' in text
    assert seconds < 30

    run = run_object()
    run["model"]["attention"]["num_heads"] = 16
    run["data"]["train"] = [{"path": "data/missing"}]
    text, _ = refused(home, run, "--nproc", "3", "--set", "parallel.tensor=3")
    assert "tensor = 3" in text
    assert "16" in text

    run["checkpoint"]["directory"] = "runs/never"
    text, _ = refused(home, run, "--nproc", "2")
    assert "data.train.0.path = data/missing: no file data/missing.bin and data/missing.idx" in text
    assert "ds-engine preprocess" in text

    run = run_object()
    run["model"] = model_section("t5")
    run["checkpoint"]["directory"] = "runs/never"
    text, _ = refused(home, run, "--nproc", "2")
    assert "the tokenizer has no pad token" in text
    assert "(rank" not in text
    assert set((home / "runs").iterdir()) == before
    assert not processes_in(home)


def test_a_dry_run_prints_the_command_and_starts_nothing(home: Path) -> None:
    found = subprocess.run(
        cli("train", "--config", "run.json", "--nproc", "2", "--dry-run"),
        cwd=home,
        env=environment() | {"PYTHONPATH": str(HOME)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "2 ranks of: python -m launch.train --config run.json" in found.stdout
    assert "dp2; 8 samples per step = 2 per micro-batch x 2 micro-batches" in found.stdout
