"""``ds-engine classify``: the classes of texts, by a fine-tuned BERT."""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launch.options import CHECKPOINT, read_lines
from launch.rank import is_rank

if TYPE_CHECKING:
    from launch.classify import Text

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COLUMNS = 6  # classes that have a column each; of more, the likeliest are listed


@click.command()
@CHECKPOINT
@click.option("--text", "texts", multiple=True, help="What to classify; may be repeated.")
@click.option("--pair", "pairs", multiple=True, help="The second text of each --text, in order.")
@click.option("--text-file", type=FILE, help="One text per line.")
@click.option("--pair-file", type=FILE, help="The second texts of --text-file, one per line.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long at their end.")
@click.option(
    "--batch-size",
    default=32,
    show_default=True,
    type=click.IntRange(min=1),
    help="Texts in a forward pass; changes speed and memory alone.",
)
@click.option("--tensor", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Another one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    checkpoint: Path,
    texts: tuple[str, ...],
    pairs: tuple[str, ...],
    text_file: Path | None,
    pair_file: Path | None,
    truncate: bool,
    batch_size: int,
    tensor: int,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Tell the class of texts, with the probability of each class, by a fine-tuned BERT.

    Example: ds-engine classify --checkpoint runs/bert_classify_tiny --text "a fine film"

    Example: ds-engine classify --checkpoint runs/nli --text "a dog runs" --pair "a pet moves"
    """
    if tensor > 1 and not is_rank():
        from launch.local import run_command_as_ranks

        sys.exit(run_command_as_ranks(sys.argv[1:], tensor))
    from launch.classify import classify_texts

    given = _paired(texts, pairs, "--text", "--pair")
    if text_file is not None:
        seconds = () if pair_file is None else read_lines(pair_file)
        given += _paired(read_lines(text_file), seconds, str(text_file), str(pair_file))
    elif pair_file is not None:
        raise click.UsageError("--pair-file needs --text-file, whose texts it completes")
    if not given:
        raise click.UsageError('give at least one --text "...", or a --text-file')
    found = classify_texts(
        checkpoint,
        given,
        tensor=tensor,
        batch_size=batch_size,
        truncate=truncate,
        tokenizer=tokenizer,
    )
    if found is None:
        return
    if as_json:
        rows = [_row(text, row) for text, row in zip(given, found, strict=True)]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    for line in table(given, found):
        click.echo(line)


def _paired(texts: Sequence[str], pairs: Sequence[str], first: str, second: str) -> "list[Text]":
    from launch.classify import Text

    if pairs and len(pairs) != len(texts):
        raise click.UsageError(
            f"{len(texts)} texts of {first} and {len(pairs)} of {second}: each needs its own"
        )
    rows = itertools.zip_longest(texts, pairs) if pairs else ((text, None) for text in texts)
    return [Text(text, pair) for text, pair in rows]


def _row(text: "Text", probabilities: Mapping[str, float]) -> dict[str, object]:
    """A JSON object about one text."""
    name, probability = likeliest(probabilities)[0]
    pair = {} if text.pair is None else {"pair": text.pair}
    return {
        "text": text.text,
        **pair,
        "class": name,
        "probability": probability,
        "probabilities": dict(probabilities),
    }


def likeliest(probabilities: Mapping[str, float]) -> list[tuple[str, float]]:
    """Classes with their probabilities, likeliest first."""
    return sorted(probabilities.items(), key=lambda item: -item[1])


def table(texts: "Sequence[Text]", found: Sequence[Mapping[str, float]]) -> list[str]:
    """Lines for people: the class, the probabilities, the text."""
    names = list(found[0])
    few = len(names) <= COLUMNS
    rows = [["class", *(names if few else ["probability", "next"]), "text"]]
    for text, row in zip(texts, found, strict=True):
        (name, best), *rest = likeliest(row)
        if few:
            numbers = [f"{row[each]:.3f}" for each in names]
        else:
            numbers = [f"{best:.3f}", ", ".join(f"{n} {p:.3f}" for n, p in rest[:3])]
        rows.append([name, *numbers, text.short()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
