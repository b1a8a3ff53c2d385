"""``ds-engine tokenizer``: make a tokenizer."""

import click

from launch.commands.preprocess import InputsCommand, print_report


@click.group("tokenizer")
def command() -> None:
    """Make a tokenizer.

    Example: ds-engine tokenizer train --kind t5 --input my.txt --vocab-size 4096 --output t5.json
    """


@command.command("train", cls=InputsCommand)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="PATH...",
    help="Files (.jsonl .json .ndjson .txt .text .md, also with .gz) and folders.",
)
@click.option("--vocab-size", type=click.IntRange(min=1), required=True, help="Entries wanted.")
@click.option("--output", required=True, metavar="FILE", help="The tokenizer.json to write.")
@click.option(
    "--kind",
    type=click.Choice(["bpe", "wordpiece", "t5"]),
    default="bpe",
    show_default=True,
    help="bpe: bytes, for GPT. wordpiece: for BERT. t5: bytes, with <pad>, </s>, sentinels.",
)
@click.option("--lowercase", is_flag=True, help="wordpiece: lower case, without accents.")
@click.option(
    "--sentinels",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="t5: how many <extra_id_N>.",
)
@click.option(
    "--text-key", default="text", show_default=True, help="Key of the text in JSON lines."
)
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
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def train(
    inputs: tuple[str, ...],
    vocab_size: int,
    output: str,
    kind: str,
    lowercase: bool,
    sentinels: int,
    text_key: str,
    max_bad_fraction: float,
    split_lines: bool,
    pattern: str,
    overwrite: bool,
) -> None:
    """Train a tokenizer: byte-level BPE for GPT or T5, or WordPiece for BERT.

    Documents end with <|endoftext|> (bpe), </s> (t5) or [SEP] (wordpiece).

    Example: ds-engine tokenizer train --input my.jsonl --vocab-size 4096 --output data/my.json
    """
    from preprocessing.run import Options
    from preprocessing.train_tokenizer import train_tokenizer

    options = Options(
        tokenizer=output,
        text_key=text_key,
        max_bad_fraction=max_bad_fraction,
        split_lines=split_lines,
        pattern=pattern,
        overwrite=overwrite,
    )
    size, report = train_tokenizer(
        inputs,
        output,
        options,
        vocab_size=vocab_size,
        kind="t5" if kind == "t5" else "wordpiece" if kind == "wordpiece" else "bpe",
        lowercase=lowercase,
        sentinels=sentinels,
    )
    print_report(report)
    if size < vocab_size:
        click.echo(
            f"the text has pairs for {size} entries only, not {vocab_size}; set model.vocab_size "
            f"to {size} or more",
            err=True,
        )
    click.echo(f"{output}: {size:,} entries from {report.documents:,} documents")
