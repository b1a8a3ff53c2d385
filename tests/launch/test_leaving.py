"""How a rank leaves its world: together when done, at once when it failed, never hanging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.deepspeed_launcher import free_port
from launch.rank import leaving
from tests.launch.tiny import HOME, environment

RANK = """
import os, sys, time
from launch.rank import leaving
rank, mode = os.environ["RANK"], sys.argv[1]
with leaving():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    if rank == "1" and mode == "error":
        raise ValueError("only here")
    if rank == "1" and mode == "exit":
        sys.exit(3)
    if rank == "0" and mode == "late":
        time.sleep(1)
    print("done", flush=False)
    if mode == "click":
        sys.exit(0)
print("not reached")
"""


def two_ranks(folder: Path, mode: str) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of each rank."""
    (folder / "rank.py").write_text(RANK)
    variables = environment() | {"PYTHONPATH": str(HOME), "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "rank.py", mode],
            cwd=folder,
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *answer) for rank, answer in zip(ranks, answers, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "late", "click"])
def test_ranks_that_are_done_leave_together(tmp_path: Path, mode: str) -> None:
    for code, output, _ in two_ranks(tmp_path, mode):
        assert (code, output) == (0, "done\n")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("error", 1), ("exit", 3)])
def test_a_rank_that_fails_waits_for_nobody(tmp_path: Path, mode: str, code: int) -> None:
    (other, output, _), (failed, nothing, errors) = two_ranks(tmp_path, mode)
    assert (failed, nothing) == (code, "")
    assert ("ValueError: only here" in errors) == (mode == "error")
    # Without a launcher to end it, the other sees the connection go.
    assert (other, output) == (1, "done\n")


def test_what_joined_no_world_leaves_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with leaving():
        pass
    with pytest.raises(SystemExit) as end, leaving():
        sys.exit(5)
    assert end.value.code == 5
    with pytest.raises(KeyError), leaving():
        raise KeyError
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with leaving():
        pass
