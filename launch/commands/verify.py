"""``ds-engine verify``: prove that a run's layout computes what one process computes."""

import sys

import click

from ds_engine.config.deepspeed import check_deepspeed, check_rules, fold_deepspeed
from ds_engine.config.load import load_run
from ds_engine.config.reader import raise_problems
from launch.options import CONFIG, OVERRIDES
from launch.rank import is_rank
from launch.verify_plan import describe, plan_proof


@click.command()
@CONFIG
@OVERRIDES
@click.option("--data", default=2, show_default=True, type=click.IntRange(min=1), help="Replicas.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--max-processes", default=8, show_default=True, type=click.IntRange(min=1))
def command(
    config: str, overrides: tuple[str, ...], data: int, steps: int, max_processes: int
) -> None:
    """Prove on this machine's CPU that a layout equals one process; exit code 1 if not.

    The run's model options, layout, ZeRO stage and recomputation are kept, sizes are shrunk.

    Example: ds-engine verify --config ds_configs/runs/gpt_tiny.json --set parallel.tensor=2
    """
    run = fold_deepspeed(load_run(config, overrides))
    raise_problems(check_deepspeed(run.deepspeed) or check_rules(run.deepspeed, run.parallel))
    plan = plan_proof(run, data=data, max_processes=max_processes)
    if not is_rank():
        from launch.local import run_command_as_ranks

        for note in plan.notes:
            click.echo(f"note: {note}")
        click.echo(f"proving {describe(run, plan)}, {steps} steps on {plan.dims.world} processes")
        sys.exit(run_command_as_ranks(sys.argv[1:], plan.dims.world, accelerator="cpu"))
    from launch.verify import prove, table, verdict

    proofs = prove(run, plan, steps=steps)
    if not proofs[0].rows:
        return
    for proof in proofs:
        click.echo(f"\n{proof.precision}, against one process in fp32")
        click.echo(table(proof))
    text, equal = verdict(proofs)
    click.echo(f"\n{text}")
    if not equal:
        sys.exit(1)
