"""``ds-engine doctor``: what this machine has, what is amiss, and what to do about it."""

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from launch.doctor import Finding


@click.command(short_help="Examine this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds that torch and DeepSpeed may take to answer.",
)
@click.pass_context
def command(context: click.Context, as_json: bool, timeout: float) -> None:
    """Examine this machine: versions, accelerator, compilers, launchers, memory, disk and
    leftovers.

    The exit code is 1 when something would stop training.

    Example: ds-engine doctor --json
    """
    from launch.doctor import examine, exit_code
    from launch.doctor_probes import read_machine

    machine = read_machine(folder=Path.cwd(), environment=os.environ, timeout=timeout)
    findings = examine(machine)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    context.exit(exit_code(findings))


def _show(findings: "list[Finding]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    table = Table("", "what", "found", "to do", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(
            Text(finding.status, style=styles[finding.status]),
            finding.name,
            Text(finding.text),
            Text(finding.fix),
        )
    console = Console()
    console.print(table)
    counts = {status: sum(f.status == status for f in findings) for status in styles}
    console.print(f"\n{counts['problem']} problems, {counts['note']} notes, {counts['ok']} ok")
