"""Running the launcher as a child whose ranks cannot outlive us and are ended in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from ds_engine.errors import LaunchError
from launch.accelerator import Accelerator, find_accelerator
from launch.deepspeed_launcher import free_port, local_command, local_environment
from launch.rank import EXIT_FILE, STARTER

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


def start_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    nproc: int,
    source: str,
    accelerator: Accelerator | None = None,
) -> int:
    """Run ``python -m module arguments`` as ``nproc`` ranks here, and return their exit code.

    Args:
        module: what each rank runs.
        arguments: of the module.
        nproc: number of ranks.
        source: where the number comes from, for messages.
        accelerator: the device to use; default: what this machine has.

    Raises:
        ConfigError: there are more ranks than devices.
        LaunchError: the launcher ended and the ranks did not.
    """
    accelerator = accelerator or find_accelerator(os.environ)
    accelerator.check_ranks(nproc, source)
    visible = "" if accelerator.is_cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "")
    command = local_command(
        module, arguments, nproc=nproc, port=free_port(), visible_devices=visible
    )
    environment = local_environment(os.environ, accelerator=accelerator.name)
    return run_ranks(command, environment, module)


def run_ranks(command: Sequence[str], environment: Mapping[str, str], module: str) -> int:
    """Run a launcher to its end and return its exit code.

    SIGTERM and SIGINT go to the ranks, which end in order (training finishes its step and saves); a
    second one ends everything at once. Should this process be killed, the ranks stop by themselves
    (``launch.rank.follow_starter``).

    DeepSpeed's launcher says 0 when it was killed itself, so its word is believed only together
    with that of rank 0, which leaves its own exit code in a file.

    Raises:
        LaunchError: the launcher ended without an error and rank 0 had not finished.
    """
    with tempfile.TemporaryDirectory(prefix="ds_engine_") as folder:
        ended = Path(folder) / "exit_code"
        variables = {**environment, STARTER: str(os.getpid()), EXIT_FILE: str(ended)}
        code = _run(command, variables, module)
        if code == 0 and not ended.is_file():
            raise LaunchError(
                "the deepspeed launcher ended before the ranks did (was it killed?); the ranks "
                "were ended too. Start the command again: training resumes from its last checkpoint"
            )
    return code


def _run(command: Sequence[str], environment: Mapping[str, str], module: str) -> int:
    process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
    asked = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        ranks = rank_processes(process.pid, module)
        if asked == 1 and ranks:
            print("ending in order (again to end at once)", file=sys.stderr, flush=True)
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        code = process.wait()
        return 128 - code if code < 0 else code  # ended by a signal: what a shell would say
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived their launcher
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
    device = None if accelerator is None else Accelerator(accelerator, nproc)
    return start_ranks(CLI, arguments, nproc=nproc, source="asked for", accelerator=device)
