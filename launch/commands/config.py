"""``ds-engine config``: check a run file against a world size, or show it resolved."""

import json

import click

from ds_engine.config.load import load_run, run_to_dict
from ds_engine.config.memory import GIB, model_states
from ds_engine.config.reader import did_you_mean
from ds_engine.config.reference import KeyReference, markdown, merge, reference
from ds_engine.config.schema import RunConfig
from ds_engine.errors import ConfigError
from launch.check import ResolvedRun, check_run
from launch.options import OVERRIDES
from models.registry import FAMILIES


@click.group()
def command() -> None:
    """Check and show run files.

    Example: ds-engine config check ds_configs/runs/gpt_tiny.json --world-size 1
    """


@command.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--world-size", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@OVERRIDES
def check(file: str, world_size: int, overrides: tuple[str, ...]) -> None:
    """Check FILE for a number of ranks, and say what it means.

    Example: ds-engine config check ds_configs/runs/gpt3_5b.json --world-size 16
    """
    resolved = check_run(load_run(file, overrides), world_size, "--world-size")
    rows = summary(resolved)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")
    for text in resolved.warnings:
        click.echo(f"warning: {text}", err=True)


@command.command()
@click.argument("file", type=click.Path(dir_okay=False))
@OVERRIDES
def show(file: str, overrides: tuple[str, ...]) -> None:
    """Print FILE as one JSON object, includes and overrides resolved.

    Example: ds-engine config show ds_configs/runs/gpt_tiny.json --set training.steps=10
    """
    click.echo(json.dumps(run_to_dict(load_run(file, overrides)), indent=2))


@command.command()
@click.argument("prefix", default="")
def keys(prefix: str) -> None:
    """Print the reference of all keys, or of those below PREFIX, as a Markdown table.

    Example: ds-engine config keys training.lr_schedule
    """
    rows = [row for row in all_keys() if f"{row.path}.".startswith(f"{prefix}." if prefix else "")]
    if not rows:
        names = [row.path for row in all_keys()]
        raise ConfigError(f"{prefix} is not a known key{did_you_mean(prefix, names)}")
    click.echo(markdown(rows))


def all_keys() -> list[KeyReference]:
    """Every key of a run file and of each model family."""
    rows = []
    for row in reference(RunConfig):
        rows.append(row)
        if row.path == "model":
            families = {name: reference(each.config, "model") for name, each in FAMILIES.items()}
            rows += merge(families)
    return rows


def summary(resolved: ResolvedRun) -> list[tuple[str, str]]:
    """What a checked run means, as (name, text) rows."""
    dims, batch, data = resolved.dims, resolved.batch, resolved.run.data
    lengths = data.sequence_length, data.decoder_sequence_length
    parameters = resolved.model.num_parameters()
    share = parameters / (dims.tensor * dims.pipeline)
    states = model_states(share, resolved.deepspeed, dims.data)
    flops = resolved.model.flops_per_sample(*lengths) * batch.train_batch_size
    tokens = batch.train_batch_size * sum(length or 0 for length in lengths)
    every = resolved.run.training.activation_checkpointing.every
    return [
        (
            "layout",
            f"{dims.world} ranks = tensor {dims.tensor} x pipeline {dims.pipeline} x context "
            f"{dims.context} x data {dims.data}",
        ),
        ("batch", f"{batch.explain()} ({tokens:,} tokens)"),
        ("objective", f"{data.objective.type}, {_rows(*lengths)}"),
        (
            "model",
            f"{resolved.model.family}, {parameters:,} parameters, vocabulary "
            f"{resolved.model.vocab_size}, padded {resolved.model.padded_vocab_size(dims.tensor)}",
        ),
        (
            "memory",
            f"about {states.total_gib:.2f} GiB per rank without activations: weights "
            f"{states.weights / GIB:.2f}, gradients {states.gradients / GIB:.2f}, optimizer "
            f"{states.optimizer / GIB:.2f}",
        ),
        ("recompute", _recompute(every)),
        (
            "compute",
            f"{flops:.3e} FLOPs per step, {flops * resolved.run.training.steps:.3e} in all",
        ),
    ]


def _rows(encoder: int, decoder: int | None) -> str:
    if decoder is None:
        return f"{encoder} tokens a sample"
    return f"{encoder} tokens a sample in the encoder and {decoder} in the decoder"


def _recompute(every: int | None) -> str:
    if not every:
        return "off: all activations are kept"
    return "every layer's activations" if every == 1 else f"one layer's activations in {every}"
