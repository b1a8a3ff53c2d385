"""What every program that may run as one of many ranks does when it starts and when it fails."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from ds_engine.errors import ConfigError, DsEngineError


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def fail(error: DsEngineError) -> NoReturn:
    """Turn an error that a user can act on into one line and the process's exit code.

    A wrong configuration is the same on every rank, so rank 0 alone says it.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not isinstance(error, ConfigError):
        where = f" (rank {rank})" if is_rank() and os.environ["WORLD_SIZE"] != "1" else ""
        click.echo(f"error{where}: {error}", err=True)
    if not is_rank():
        sys.exit(error.exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: other ranks may be in a collective, and torch's teardown would wait for them.
    os._exit(error.exit_code)
