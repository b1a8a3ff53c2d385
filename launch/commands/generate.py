"""``ds-engine generate``: write texts with a trained model."""

import sys
from pathlib import Path

import click

from launch.options import CHECKPOINT, read_lines
from launch.rank import is_rank


@click.command()
@CHECKPOINT
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; may be repeated.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One prompt per line.",
)
@click.option("--max-new-tokens", default=100, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, help="0: the likeliest token.")
@click.option("--top-k", type=click.IntRange(min=1), help="Draw among the k likeliest tokens.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw within this probability.")
@click.option(
    "--num-beams",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Search for the likeliest text with so many beams.",
)
@click.option(
    "--length-penalty",
    default=1.0,
    show_default=True,
    help="With beams: above 0 prefers longer texts, below 0 shorter ones.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--tensor", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Another one.")
@click.option("--eod", metavar="TOKEN", help="End-of-document token, as given to preprocess.")
def command(
    checkpoint: Path,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    num_beams: int,
    length_penalty: float,
    seed: int,
    tensor: int,
    tokenizer: Path | None,
    eod: str | None,
) -> None:
    """Continue prompts with a trained model; a T5 reads the prompt and writes its own text.

    Example: ds-engine generate --checkpoint runs/gpt_tiny --prompt "def main" --temperature 0.8
    """
    if num_beams > 1 and temperature > 0:
        raise click.UsageError("--num-beams searches and --temperature draws: give one of them")
    if num_beams == 1 and length_penalty != 1:
        raise click.UsageError("--length-penalty has an effect with --num-beams only")
    if temperature == 0 and (top_k is not None or top_p != 1):
        raise click.UsageError("--top-k and --top-p have an effect with --temperature above 0 only")
    if tensor > 1 and not is_rank():
        from launch.local import run_command_as_ranks

        sys.exit(run_command_as_ranks(sys.argv[1:], tensor))
    from launch.generate import Sampling, generate_texts

    if prompt_file is not None:
        prompts = (*prompts, *read_lines(prompt_file))
    if not prompts:
        raise click.UsageError("give at least one --prompt, or a --prompt-file")
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, num_beams, length_penalty)
    texts = generate_texts(
        checkpoint, prompts, sampling, tensor=tensor, tokenizer=tokenizer, eod=eod
    )
    if texts is not None:
        click.echo("\n----\n".join(texts))
