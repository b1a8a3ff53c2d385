"""What every program that may run as one of many ranks does when it starts and when it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click

from ds_engine.errors import DsEngineError

STARTER = "DS_ENGINE_STARTER"
EXIT_FILE = "DS_ENGINE_EXIT_FILE"
# Seconds in which rank 0 says what went wrong, closes its trackers and ends everybody.
GRACE = 5.0


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def follow_starter(*, every: float = 1.0) -> None:
    """Stop this rank as by SIGTERM when the ``ds-engine`` that started it is gone.

    A killed starter or a closed session cannot pass a signal on, and DeepSpeed's launchers do not
    notice: without this, ranks would train on with nobody to stop them.

    Args:
        every: seconds between two looks.
    """
    number = os.environ.get(STARTER, "")
    if not is_rank() or not number.isdigit():
        return
    import psutil

    def gone() -> bool:
        try:
            return not starter.is_running() or starter.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def watch() -> None:
        while not gone():
            time.sleep(every)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        starter = psutil.Process(int(number))
    except psutil.NoSuchProcess:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    threading.Thread(target=watch, name="follow-starter", daemon=True).start()


def record_exit(code: int) -> None:
    """Leave rank 0's exit code for the ``ds-engine`` that started it, see ``launch.local``."""
    path = os.environ.get(EXIT_FILE)
    if path and os.environ.get("RANK") == "0":
        with contextlib.suppress(OSError):  # the starter is gone, and nobody will read it
            Path(path).write_text(f"{code}\n")


def fail(error: DsEngineError) -> NoReturn:
    """Turn an error that a user can act on into one line and the process's exit code.

    Most errors are the same on all ranks, and the first rank to leave makes the launcher end the
    others: so rank 0 goes first. A rank that is still there after ``GRACE`` seconds has an error of
    its own, and says it.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(GRACE)
    where = f" (rank {rank})" if is_rank() and os.environ["WORLD_SIZE"] != "1" else ""
    click.echo(f"error{where}: {error}", err=True)
    if not is_rank():
        sys.exit(error.exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: other ranks may be in a collective, and torch's teardown would wait for them.
    os._exit(error.exit_code)


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Around the whole of a command: how a rank leaves the others, if it has joined a world.

    Done: all wait for each other and close the connections before anybody goes. Else the first to
    go closes them under the threads of the others, which may end those (SIGABRT) with their work
    done. Failed: at once, because the others may be in a collective and never come; the launcher
    ends them. Either way Python's own teardown, where torch's threads may still run, is left out.
    """
    code = 0
    try:
        yield
    except SystemExit as end:
        if not _in_world():
            raise
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        if not _in_world():
            raise
        traceback.print_exc()
        code = 1
    if _in_world():
        code = code or _part()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _in_world() -> bool:
    """Whether this rank is connected to others; never imports torch for a command that did not."""
    if not is_rank() or "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _part() -> int:
    """Leave the world with all others; return the exit code."""
    import torch.distributed as dist

    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:
        return 1  # another rank failed meanwhile, and says so itself
    return 0
