"""``ds-engine preprocess``: text files to an indexed data set."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from preprocessing.report import Report


class InputsCommand(click.Command):
    """A command whose ``--input`` takes all values up to the next option: ``--input a b c``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, after giving each value of ``--input`` an option of its own."""
        return super().parse_args(ctx, repeat_option(args, "--input"))


def repeat_option(args: Sequence[str], name: str) -> list[str]:
    """Return ``args`` with ``name a b`` written as ``name a name b``, which click understands.

    A value that begins with a dash ends the list; write such a file as ``./-name``.
    """
    result: list[str] = []
    taking = fresh = False
    for position, value in enumerate(args):
        if value == "--":
            return [*result, *args[position:]]
        if value == name:
            taking = fresh = True
        elif value.startswith(f"{name}="):
            taking, fresh = True, False
        elif value.startswith("-") and value != "-":
            taking = False
        elif taking:
            if not fresh:
                result.append(name)
            fresh = False
        result.append(value)
    return result


@click.command("preprocess", cls=InputsCommand)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="PATH...",
    help="Files (.jsonl .json .ndjson .txt .text .md, also with .gz) and folders.",
)
@click.option(
    "--tokenizer",
    required=True,
    metavar="PATH",
    help="tokenizer.json, GPT-2 vocab.json, BERT vocab.txt, sentencepiece .model, or their folder.",
)
@click.option("--output", required=True, metavar="PREFIX", help="Writes PREFIX.bin and .idx.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--text-key", default="text", show_default=True, help="Key of the text in JSON lines."
)
@click.option("--eod", metavar="TOKEN", help="End-of-document token; default: <|endoftext|>, </s>.")
@click.option(
    "--max-bad-fraction",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of records that may be dropped or repaired before the run fails.",
)
@click.option(
    "--split-lines", is_flag=True, help="Text files hold one document a line, not a file."
)
@click.option("--glob", "pattern", default="*", show_default=True, help="Which files of a folder.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["jsonl", "text"]),
    help="Read every file this way, whatever its ending.",
)
@click.option(
    "--split-sentences",
    is_flag=True,
    help="For BERT: one sequence a sentence (English), without end-of-document tokens.",
)
@click.option(
    "--fields",
    metavar="KEY,KEY...",
    help="For fine-tuning: one sequence for each of these keys of JSON lines, such as "
    "input,target, without end-of-document tokens.",
)
@click.option("--label", metavar="KEY", help="The last of --fields holds a class, not text.")
@click.option(
    "--label-names",
    metavar="NAME,NAME...",
    help="Classes 0, 1, ...; default: all that the input has, sorted. Name them so that training "
    "and validation data agree.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def command(
    inputs: tuple[str, ...],
    tokenizer: str,
    output: str,
    workers: int,
    text_key: str,
    eod: str | None,
    max_bad_fraction: float,
    split_lines: bool,
    pattern: str,
    format_: str | None,
    split_sentences: bool,
    fields: str | None,
    label: str | None,
    label_names: str | None,
    overwrite: bool,
) -> None:
    """Tokenize text into an indexed data set that training reads (Megatron's .bin/.idx).

    Every document ends with the end-of-document token, but with --split-sentences and --fields,
    where a document is several sequences, there is none: the index holds its end. Bad records are
    dropped or repaired by fixed rules and listed with file and line in PREFIX.report.json; by
    default one bad record fails the run. Nothing is written under PREFIX unless all went well, and
    the output is the same for any number of workers.

    Example: ds-engine preprocess --input my.jsonl --tokenizer data/t5.json --output data/train

    Example: ds-engine preprocess --fields text,label --label label --input labelled.jsonl
    --tokenizer data/bert.json --output data/classify
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from preprocessing.run import Options, preprocess

    # One process a core is our way to be parallel; threads inside each would only compete.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = Options(
        tokenizer=tokenizer,
        eod=eod,
        text_key=text_key,
        workers=workers,
        max_bad_fraction=max_bad_fraction,
        split_lines=split_lines,
        pattern=pattern,
        format="jsonl" if format_ == "jsonl" else "text" if format_ == "text" else None,
        overwrite=overwrite,
        split_sentences=split_sentences,
        fields=_names(fields),
        label=label,
        label_names=_names(label_names),
    )
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("tokenizing", total=None)
        report = preprocess(
            inputs,
            output,
            options,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    print_report(report)
    inside = f" of {report.sequences:,} sequences" if split_sentences or fields else ""
    click.echo(
        f"{output}.bin and .idx: {report.documents:,} documents{inside}, {report.tokens:,} tokens"
    )
    if label is not None:
        classes = enumerate(report.settings["labels"])
        click.echo("classes: " + ", ".join(f"{number} {name}" for number, name in classes))


def _names(given: str | None) -> tuple[str, ...]:
    """The names of a list with commas between."""
    return () if given is None else tuple(name.strip() for name in given.split(","))


def print_report(report: "Report") -> None:
    """Print what was dropped and repaired, if anything was."""
    from rich.console import Console
    from rich.table import Table

    from preprocessing.document import RULES

    if not report.kinds and not report.unknown_tokens:
        return
    table = Table("kind", "rule", "count", "first")
    for kind, count in sorted(report.kinds.items()):
        first = next((item.where for item in report.problems if item.kind == kind), "")
        table.add_row(kind, RULES[kind], f"{count:,}", first)
    if report.unknown_tokens:
        table.add_row("unknown token", "kept", f"{report.unknown_tokens:,}", "")
    Console(stderr=True).print(table)
