"""Running the launcher as a child whose ranks cannot outlive us and are ended in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from launch.rank import STARTER

FORWARDED = (signal.SIGTERM, signal.SIGINT)
CLI = "launch.cli"


def rank_processes(launcher: int, module: str) -> list[int]:
    """Process numbers of the ranks below a launcher."""
    import psutil

    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                line = child.cmdline()
                if "-m" in line and line[line.index("-m") + 1 :][:1] == [module]:
                    found.append(child.pid)
    return found


def run_ranks(command: Sequence[str], environment: Mapping[str, str], module: str) -> int:
    """Run a launcher to its end and return its exit code.

    SIGTERM and SIGINT go to the ranks, which finish their step and save; a second one ends
    everything at once. Should this process be killed, the ranks stop in order by themselves
    (``launch.rank.follow_starter``).
    """
    variables = {**environment, STARTER: str(os.getpid())}
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    asked = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        ranks = rank_processes(process.pid, module)
        if asked == 1 and ranks:
            print("stopping after this step (again to end at once)", file=sys.stderr, flush=True)
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command_as_ranks(
    arguments: Sequence[str], nproc: int, *, accelerator: str | None = None
) -> int:
    """Run ``ds-engine`` with the same arguments as ``nproc`` ranks; return the exit code.

    The command sees that it is a rank (``launch.rank.is_rank``) and does its part.

    Args:
        arguments: of ``ds-engine``.
        nproc: number of ranks.
        accelerator: DeepSpeed's name of the device to use; default: what this machine has.
    """
    from launch.accelerator import find_accelerator
    from launch.deepspeed_launcher import free_port, local_command, local_environment

    name = accelerator or find_accelerator(dict(os.environ)).name
    environment = local_environment(os.environ, accelerator=name)
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    command = local_command(CLI, arguments, nproc=nproc, port=free_port())
    return run_ranks(command, environment, CLI)
