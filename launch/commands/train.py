"""``ds-engine train``: check a run, then start its ranks through the deepspeed launcher."""

import os
import shlex
import sys

import click

from ds_engine.config.load import load_run
from launch.check import check_files, check_run
from launch.options import CONFIG, OVERRIDES

MODULE = "launch.train"


@click.command()
@CONFIG
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Ranks on this machine; default: one per accelerator device, 1 on a CPU.",
)
@OVERRIDES
@click.option("--dry-run", is_flag=True, help="Print what would run, and stop.")
def command(config: str, nproc: int | None, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Train a model on this machine; the same command resumes it.

    Example: ds-engine train --config ds_configs/runs/gpt_tiny.json --nproc 2
    """
    from launch.accelerator import find_accelerator
    from launch.local import start_ranks

    run = load_run(config, overrides)
    accelerator = find_accelerator(os.environ)
    ranks = nproc or accelerator.devices
    source = "--nproc" if nproc else f"the {accelerator.devices} {accelerator.name} device(s) here"
    resolved = check_run(run, ranks, source)
    accelerator.check_ranks(ranks, source)
    arguments = ["--config", config, *(word for o in overrides for word in ("--set", o))]
    if dry_run:
        click.echo(f"{ranks} ranks of: python -m {MODULE} {shlex.join(arguments)}")
        click.echo(f"{resolved.dims.describe()}; {resolved.batch.explain()}")
        return
    check_files(resolved.run)
    from launch.objective import make_objective

    # Each rank makes its own; what cannot be made is said here, once and before any of them starts.
    make_objective(resolved.run, resolved.model)
    sys.exit(start_ranks(MODULE, arguments, nproc=ranks, source=source, accelerator=accelerator))
