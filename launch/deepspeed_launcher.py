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


def local_command(
    module: str,
    arguments: Sequence[str],
    *,
    nproc: int,
    port: int,
    visible_devices: str = "",
) -> list[str]:
    """The launcher's command line for ``nproc`` ranks of ``python -m module arguments`` here.

    ``--hostfile`` names no file on purpose: /job/hostfile, DeepSpeed's default, must not turn a
    local run into one on several nodes.

    Args:
        module: what each rank runs.
        arguments: of the module.
        nproc: ranks.
        port: for their rendezvous.
        visible_devices: ``CUDA_VISIBLE_DEVICES``. DeepSpeed forgets it when it is told a number of
            devices and would take the first ones, which may be somebody else's; so the first
            ``nproc`` of these are named.
    """
    chosen = visible_devices.split(",")[:nproc] if visible_devices else []
    devices = f"--include=localhost:{','.join(chosen)}" if chosen else f"--num_gpus={nproc}"
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile=",
        devices,
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
        accelerator: name of the device. Only ``cpu`` is written down: any other one DeepSpeed
            finds by itself.
    """
    environment = dict(inherited)
    if accelerator == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    # -P: the working directory must not shadow our packages (launch.guard names them).
    environment.setdefault("PYTHONSAFEPATH", "1")
    # DeepSpeed calls collectives by names that torch 2.13 has deprecated.
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    paths = [str(HOME), *environment.get("PYTHONPATH", "").split(":")]
    environment["PYTHONPATH"] = ":".join(dict.fromkeys(p for p in paths if p))
    return environment
