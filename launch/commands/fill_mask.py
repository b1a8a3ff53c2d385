"""``ds-engine fill-mask``: guess masked words with a trained BERT."""

import json
import sys
from pathlib import Path

import click

from launch.options import CHECKPOINT, read_lines
from launch.rank import is_rank


@click.command()
@CHECKPOINT
@click.option("--text", "texts", multiple=True, help="Text with [MASK] in it; may be repeated.")
@click.option(
    "--text-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One text per line.",
)
@click.option("--top-k", default=5, show_default=True, type=click.IntRange(min=1), help="Guesses.")
@click.option("--tensor", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Another one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    checkpoint: Path,
    texts: tuple[str, ...],
    text_file: Path | None,
    top_k: int,
    tensor: int,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Guess the masked words of texts with a trained BERT.

    Example: ds-engine fill-mask --checkpoint runs/bert_tiny --text "import [MASK]"
    """
    if tensor > 1 and not is_rank():
        from launch.local import run_command_as_ranks

        sys.exit(run_command_as_ranks(sys.argv[1:], tensor))
    from launch.fill_mask import fill_texts

    if text_file is not None:
        texts = (*texts, *read_lines(text_file))
    if not texts:
        raise click.UsageError("give at least one --text, or a --text-file")
    found = fill_texts(checkpoint, texts, top_k=top_k, tensor=tensor, tokenizer=tokenizer)
    if found is None:
        return
    if as_json:
        rows = [[[[f.piece, f.probability] for f in place] for place in row] for row in found]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    for text, row in zip(texts, found, strict=True):
        click.echo(text)
        for number, place in enumerate(row, 1):
            guesses = "  ".join(f"{f.piece} {f.probability:.3f}" for f in place)
            click.echo(f"  {number}: {guesses}")
