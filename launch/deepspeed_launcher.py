"""Command and environment to start one machine's ranks through the ``deepspeed`` launcher."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def local_command(module: str, arguments: Sequence[str], *, nproc: int, port: int) -> list[str]:
    """The launcher's command line for ``nproc`` ranks of ``python -m module arguments`` here.

    ``--hostfile`` names no file on purpose: /job/hostfile, DeepSpeed's default, must not turn a
    local run into one on several nodes.
    """
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile=",
        f"--num_gpus={nproc}",
        f"--master_port={port}",
        "--no_local_rank",
        "--log_level=error",
        "--module",
        module,
        *arguments,
    ]


def local_environment(inherited: Mapping[str, str], *, accelerator: str) -> dict[str, str]:
    """Environment of the launcher and its ranks.

    Args:
        inherited: the caller's environment.
        accelerator: DeepSpeed's name of the device, ``cuda`` or ``cpu``.
    """
    environment = dict(inherited)
    environment.setdefault("DS_ACCELERATOR", accelerator)
    # -P: the working directory must not shadow our packages (launch.guard names them).
    environment.setdefault("PYTHONSAFEPATH", "1")
    # DeepSpeed calls collectives by names that torch 2.13 has deprecated.
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    paths = [str(HOME), *environment.get("PYTHONPATH", "").split(":")]
    environment["PYTHONPATH"] = ":".join(dict.fromkeys(p for p in paths if p))
    return environment
