"""Starting ranks here: exit codes, signals and environment, with a stand-in launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.deepspeed_launcher import free_port, local_command, local_environment
from launch.rank import STARTER
from tests.launch.tiny import HOME, environment, kill_processes_in, processes_in

# A rank: says that it is there, and goes with code 75 when asked (or never, when stubborn).
RANK = """
import json, os, signal, sys, time
from launch.rank import record_exit
mode = sys.argv[1]
def leave(code):
    record_exit(code)
    sys.exit(code)
def stop(*_):
    if mode != "stubborn":
        leave(75)
signal.signal(signal.SIGTERM, stop)
open(f"ready{os.environ['RANK']}", "w").write(json.dumps(dict(os.environ)))
if mode.isdigit():
    leave(int(mode))
while True:
    time.sleep(0.02)
"""
# A launcher: two ranks below it, its code is the first one that is not 0.
LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-u", "-m", "fake_rank", sys.argv[1]],
                     env={**os.environ, "RANK": str(r), "WORLD_SIZE": "2"})
    for r in range(2)
]
sys.exit(max(r.wait() for r in ranks))
"""
STARTS = """
import os, sys
from ds_engine.errors import DsEngineError
from launch.local import run_ranks
from launch.rank import fail
try:
    code = run_ranks([sys.executable, "launcher.py", sys.argv[1]], os.environ, "fake_rank")
except DsEngineError as error:
    fail(error)
sys.exit(code)
"""
# DeepSpeed's runner says 0 when the launcher below it was killed.
RUNNER = """
import os, subprocess, sys
below = subprocess.Popen([sys.executable, "below.py", sys.argv[1]])
open("below.pid", "w").write(str(below.pid))
sys.exit(max(below.wait(), 0))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the stand-ins; returns when both ranks are there. None outlives a failed test."""
    (tmp_path / "fake_rank.py").write_text(RANK)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "starts.py").write_text(STARTS)

    def begin(mode: str, *, runner: bool = False, **variables: str) -> subprocess.Popen[str]:
        if runner:
            (tmp_path / "launcher.py").write_text(RUNNER)
        process = subprocess.Popen(
            [sys.executable, "starts.py", mode],
            cwd=tmp_path,
            env=environment() | {"PYTHONPATH": f"{HOME}:{tmp_path}"} | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 20
        while not all((tmp_path / f"ready{r}").exists() for r in range(2)):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)
        return process

    yield begin
    kill_processes_in(tmp_path)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_exit_code_is_the_ranks(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], code: int
) -> None:
    process = start(str(code))
    assert process.wait(timeout=20) == code
    assert not processes_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_asks_the_ranks_to_stop(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = start("polite")
    process.send_signal(number)
    _, text = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "ending in order (again to end at once)" in text
    assert not processes_in(tmp_path)


def test_a_second_signal_ends_everything(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("stubborn")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "ending in order" in process.stderr.readline()
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    deadline = time.monotonic() + 10
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_in(tmp_path)


def test_a_killed_launcher_is_no_success(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "below.py").write_text(LAUNCHER)
    process = start("stubborn", runner=True)
    os.kill(int((tmp_path / "below.pid").read_text()), signal.SIGKILL)
    _, text = process.communicate(timeout=20)
    assert process.returncode == 5
    assert "the deepspeed launcher ended before the ranks did" in text
    deadline = time.monotonic() + 10
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_in(tmp_path)


def test_variables_arrive_as_they_are(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    wild = {"MY_JSON": '{"a": [1, "b c"]}', "MY_TEXT": "it's (so) $HOME `x` ;|", "MY_NONE": ""}
    process = start("0", **wild)
    assert process.wait(timeout=20) == 0
    seen = json.loads((tmp_path / "ready1").read_text())
    assert {name: seen[name] for name in wild} == wild
    assert seen[STARTER] == str(process.pid)


def test_environment_of_ranks() -> None:
    found = local_environment({"PYTHONPATH": f"/mine:{HOME}:", "A": "b c"}, accelerator="cpu")
    assert found["PYTHONPATH"] == f"{HOME}:/mine"
    assert found["DS_ACCELERATOR"] == "cpu"
    assert found["PYTHONSAFEPATH"] == "1"
    assert found["A"] == "b c"


def test_a_local_run_never_reads_a_hostfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A /job/hostfile, DeepSpeed's default, would turn the run into one on several nodes."""
    from deepspeed.launcher import runner

    command = local_command("launch.train", ["--config", "a b.json"], nproc=3, port=29999)
    arguments = command[command.index("deepspeed.launcher.runner") + 1 :]
    parsed = runner.parse_args(args=arguments)
    assert runner.fetch_hostfile(parsed.hostfile) is None
    assert (parsed.num_gpus, parsed.master_port) == (3, 29999)
    assert (parsed.user_script, parsed.user_args) == ("launch.train", ["--config", "a b.json"])


def test_ports_are_free() -> None:
    import socket

    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
    assert port > 1023
