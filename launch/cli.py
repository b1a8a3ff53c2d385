"""The ``ds-engine`` command: a table of sub-commands, each imported only when it runs."""

import importlib

import click

from ds_engine.config.reader import nearest
from ds_engine.errors import DsEngineError
from launch.guard import check_packages
from launch.rank import fail, follow_starter, leaving, record_exit

COMMANDS = {
    "config": ("launch.commands.config", "Check and show run files."),
    "train": ("launch.commands.train", "Train a model here; the same command resumes it."),
    "eval": ("launch.commands.eval", "Evaluate a checkpoint on validation data."),
    "generate": ("launch.commands.generate", "Generate text from a checkpoint."),
    "fill-mask": ("launch.commands.fill_mask", "Fill the masked words of a text, with BERT."),
    "classify": ("launch.commands.classify", "Tell the class of texts, with a fine-tuned BERT."),
    "verify": ("launch.commands.verify", "Prove that a layout equals one process, on CPU."),
    "plot": ("launch.commands.plot", "Draw the curves of a run."),
    "doctor": ("launch.commands.doctor", "Report what this machine can run, and what is amiss."),
    "preprocess": ("launch.commands.preprocess", "Turn text into indexed datasets."),
    "tokenizer": ("launch.commands.tokenizer", "Train a tokenizer."),
    "quickstart": ("launch.commands.quickstart", "Prepare data and train a tiny model in minutes."),
}


class LazyGroup(click.Group):
    """Lists ``COMMANDS`` without importing them, and reports our errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the table, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command, or names the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            ctx.fail(f'no command "{args[0]}"{hint}')
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Runs the command; an error that the user can act on becomes a line and an exit code."""
        try:
            result = super().invoke(ctx)
        except DsEngineError as error:
            fail(error)
        except SystemExit as end:
            record_exit(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise
        record_exit(0)
        return result


def _version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib import metadata  # 20 ms that only this option pays

        try:
            version = metadata.version("ds-engine")
        except metadata.PackageNotFoundError:
            version = "(not installed; run `pip install -e .`)"
        click.echo(f"ds-engine {version}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Train GPT, T5 and BERT models with DeepSpeed, every layout proven equal to one process.

    Example: ds-engine config check ds_configs/runs/gpt3_126m.json --world-size 8
    """


def main() -> None:
    """Entry point of ``ds-engine``."""
    try:
        check_packages()
        follow_starter()
    except DsEngineError as error:
        fail(error)
    with leaving():
        cli(prog_name="ds-engine")


if __name__ == "__main__":
    main()
