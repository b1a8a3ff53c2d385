"""What a rank does before it trains: whose packages it runs, whom it follows, how it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.tiny import HOME, environment

AS_RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A working directory with somebody else's ``models`` and ``launch``."""
    for name in ("models", "launch", "ds_engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return tmp_path


def test_packages_in_the_working_directory_do_not_shadow_a_script(shadowed: Path) -> None:
    """As ``deepspeed launch/train.py`` starts it: the script's own folder is first in the path."""
    found = run([sys.executable, str(HOME / "launch" / "train.py"), "--help"], shadowed)
    assert found.returncode == 0, found.stderr
    assert "Train as one rank" in found.stdout


def test_packages_in_the_working_directory_do_not_shadow_ranks_of_ds_engine(shadowed: Path) -> None:
    from launch.deepspeed_launcher import local_environment

    variables = local_environment(environment(), accelerator="cpu")
    found = run([sys.executable, "-m", "launch.train", "--help"], shadowed, **variables)
    assert found.returncode == 0, found.stderr
    assert "Train as one rank" in found.stdout


def test_a_shadowed_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    found = run([sys.executable, "-m", "launch.cli", "--help"], tmp_path, PYTHONPATH=str(HOME))
    assert found.returncode == 5, found.stderr
    assert f"the package models would come from {tmp_path / 'models'}" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE set but not LOCAL_RANK"),
        (AS_RANK | {"RANK": "x"}, "must be whole numbers"),
    ],
)
def test_half_a_launcher_is_refused(home: Path, variables: dict[str, str], text: str) -> None:
    command = [sys.executable, str(HOME / "launch" / "train.py"), "--config", "run.json"]
    found = run(command, home, **variables)
    assert found.returncode == 5
    assert text in found.stderr
    assert "Traceback" not in found.stderr


FOLLOW = """
import signal, sys, time
from launch.rank import follow_starter
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
follow_starter(every=0.05)
print("ready", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("reaped", [True, False])
def test_a_rank_stops_in_order_when_its_starter_was_killed(*, reaped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as starter:
        variables = AS_RANK | {"DS_ENGINE_STARTER": str(starter.pid), "PYTHONPATH": str(HOME)}
        command = [sys.executable, "-c", FOLLOW]
        with subprocess.Popen(
            command, env=environment() | variables, stdout=subprocess.PIPE, text=True
        ) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
            time.sleep(0.2)
            assert rank.poll() is None
            os.kill(starter.pid, signal.SIGKILL)
            if reaped:
                starter.wait()
            assert rank.wait(timeout=10) == 75


def test_what_is_no_rank_follows_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.rank import follow_starter

    monkeypatch.setenv("DS_ENGINE_STARTER", "999999999")
    monkeypatch.delenv("RANK", raising=False)
    follow_starter()
