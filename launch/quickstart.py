"""The whole road in one command: text, tokenizer, data, training, curves, a demonstration."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import click

from ds_engine.config.load import load_run
from ds_engine.errors import LaunchError
from launch.accelerator import Accelerator, find_accelerator
from launch.check import ResolvedRun, check_run
from launch.deepspeed_launcher import HOME
from launch.local import start_ranks
from launch.quickstart_text import Split, default_prompts, filled, write_split
from preprocessing.run import Options, preprocess
from preprocessing.train_tokenizer import Kind, train_tokenizer

Family = Literal["gpt", "t5", "bert"]

TOKENIZERS: Mapping[Family, Kind] = MappingProxyType(
    {"gpt": "bpe", "t5": "t5", "bert": "wordpiece"}
)
# What a prompt must name for the model to have something to do.
MARKS: Mapping[Family, str] = MappingProxyType({"t5": "<extra_id_0>", "bert": "[MASK]"})
RULE = 71
NO_CONTEXT = """\
no context: the unigram entropy of the very targets that were evaluated, or the share of
their most frequent label; no model that ignores its input is better"""


@dataclass(frozen=True)
class Quickstart:
    """Where the quickstart reads and writes, and how it runs.

    Attributes:
        family: of the model.
        data: the user's ``.txt`` or ``.jsonl``, or None for Python's standard library.
        folder: for prepared data.
        run: run folder.
        nproc: ranks.
        overrides: changes to the run file.
        prompts: what to continue or to fill at the end; empty: something that suits the text.
        prepare_only: stop before the training, and say how to start it.
    """

    family: Family
    data: Path | None
    folder: Path
    run: Path
    nproc: int
    overrides: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    prepare_only: bool = False

    @property
    def run_file(self) -> Path:
        """The run file of the family."""
        return HOME / "ds_configs" / "runs" / f"{self.family}_tiny.json"

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides of the run file: where things lie, then the user's."""
        train, validation = str(self.folder / "train"), str(self.folder / "validation")
        return (
            f"data.train={json.dumps([{'path': train}])}",
            f"data.validation={json.dumps([{'path': validation}])}",
            f"data.tokenizer={json.dumps(str(self.folder / 'tokenizer.json'))}",
            f"checkpoint.directory={json.dumps(str(self.run))}",
            *self.overrides,
        )


def prepare(settings: Quickstart, vocab_size: int) -> Split:
    """Write text, tokenizer and indexed data into the folder; what is there is replaced."""
    folder = settings.folder
    split = write_split(settings.data, folder)
    click.echo(
        f"text: {split.documents:,} documents, {split.characters / 1e6:.1f} MB: {split.origin}"
    )
    tokenizer = str(folder / "tokenizer.json")
    options = Options(
        tokenizer=tokenizer,
        workers=settings.nproc,
        overwrite=True,
        split_sentences=settings.family == "bert",
    )
    entries, _ = train_tokenizer(
        [str(split.train)],
        tokenizer,
        options,
        vocab_size=vocab_size,
        kind=TOKENIZERS[settings.family],
    )
    click.echo(f"tokenizer: {TOKENIZERS[settings.family]}, {entries:,} entries")
    for path in (split.train, split.validation):
        report = preprocess([str(path)], str(path.with_suffix("")), options)
        click.echo(f"{path.stem}: {report.tokens:,} tokens")
    return split


def run_quickstart(settings: Quickstart) -> int:
    """Do everything; returns the training's exit code.

    Raises:
        DsEngineError: unusable data, or a training that failed.
    """
    mark, folder = MARKS.get(settings.family, ""), settings.run
    for prompt in settings.prompts:
        if mark not in prompt:
            raise LaunchError(
                f"--prompt {prompt!r} has no {mark}; put it where {settings.family} should fill "
                "something in"
            )
    resolved = check_run(load_run(settings.run_file, settings.settings), settings.nproc, "--nproc")
    if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir()):
        raise LaunchError(
            f"{folder} holds an earlier run; remove it, or choose another place with --run"
        )
    split = prepare(settings, resolved.model.vocab_size)
    accelerator = find_accelerator(os.environ)
    if settings.prepare_only:
        click.echo(f"to train: {train_command(settings, accelerator)}")
        return 0
    from launch.baseline import validation_baselines

    # Before the training: data that the objective cannot use is found here.
    baselines = validation_baselines(resolved)
    if not accelerator.is_cpu and accelerator.devices < settings.nproc:
        accelerator = Accelerator("cpu", 1)  # two small ranks on the CPU rather than none
    words = [word for override in settings.settings for word in ("--set", override)]
    code = start_ranks(
        "launch.train",
        ["--config", str(settings.run_file), *words],
        nproc=settings.nproc,
        source="--nproc",
        accelerator=accelerator,
    )
    if code == 0:
        _show(settings, resolved, baselines, split)
    return code


def train_command(settings: Quickstart, accelerator: Accelerator) -> str:
    """The command that trains on what was prepared; settings of the run file are left out."""
    file, here = settings.run_file, Path.cwd()
    unchanged = load_run(file)
    words = ["ds-engine", "train", "--config"]
    words.append(str(file.relative_to(here) if file.is_relative_to(here) else file))
    if accelerator.is_cpu or settings.nproc <= accelerator.devices:
        words += ["--nproc", str(settings.nproc)]
    for override in settings.settings:
        if load_run(file, (override,)) != unchanged:
            words += ["--set", override]
    return shlex.join(words)


def _show(
    settings: Quickstart, resolved: ResolvedRun, baselines: Mapping[str, float], split: Split
) -> None:
    from ds_engine.training.plot import plot_run

    folder = settings.run
    curves = plot_run(folder, baselines=baselines)
    prompts = settings.prompts or default_prompts(
        settings.family, None if settings.data is None else split.validation
    )
    text = demonstrate(settings.family, folder, prompts)
    title = {"gpt": " generated ", "t5": " filled in ", "bert": " guessed "}[settings.family]
    click.echo(f"\n{title.center(RULE, '-')}\n{text}\n{'-' * RULE}")
    click.echo(outcome_table(folder, baselines))
    rows: list[tuple[str, object]] = [("curves", curves), ("log", folder / "log.jsonl")]
    if resolved.run.tracking.wandb is not None:
        rows.append(("wandb, offline", folder / "wandb"))
    rows += [
        ("checkpoint", folder / "checkpoints"),
        ("tokenizer, data", settings.folder),
        ("once more", _again(settings.family, folder, prompts[0])),
    ]
    for name, value in rows:
        click.echo(f"{name:<16} {value}")


def outcome_table(run: Path, baselines: Mapping[str, float]) -> str:
    """The last validation of a run beside what is possible without reading the input.

    Args:
        run: run folder.
        baselines: see ``validation_baselines``.
    """
    from ds_engine.training.plot import measure_label
    from ds_engine.training.tracking.jsonl import read_log

    last = {name: value for row in read_log(run / "log.jsonl") for name, value in row.items()}
    lines = [f"{'':<26} {'validation':>10} {'no context':>10}"]
    for name, baseline in baselines.items():
        title, unit = measure_label(name)
        form = "{:.1%}" if name.endswith("accuracy") else "{:.3f}"
        value = last.get(f"validation/{name}", "not logged")  # None: it was not finite
        shown = form.format(value) if isinstance(value, float) else value or "not finite"
        lines.append(f"{title:<26} {shown:>10} {form.format(baseline):>10} {unit}".rstrip())
    if len(lines) == 1:
        return "no validation data, so there is nothing to compare"
    return "\n".join((*lines, NO_CONTEXT))


def demonstrate(family: Family, run: Path, prompts: tuple[str, ...]) -> str:
    """What a trained model makes of prompts, for people."""
    from launch.generate import Sampling, generate_texts

    if family == "bert":
        from launch.fill_mask import fill_texts

        lines = []
        for prompt, places in zip(prompts, fill_texts(run, prompts) or [], strict=True):
            lines.append(prompt)
            for place in places:
                guesses = "  ".join(f"{guess.piece} {guess.probability:.2f}" for guess in place)
                lines.append(f"    {guesses}")
        return "\n".join(lines)
    if family == "t5":
        texts = generate_texts(run, prompts, Sampling(max_new_tokens=40)) or []
        pairs = zip(prompts, texts, strict=True)
        return "\n\n".join(
            f"{filled(prompt, text).rstrip()}\n    wrote: {text!r}" for prompt, text in pairs
        )
    sampling = Sampling(max_new_tokens=120, temperature=0.7, top_p=0.95)
    return "\n\n".join(generate_texts(run, prompts, sampling) or [])


def _again(family: Family, run: Path, prompt: str) -> str:
    if family == "bert":
        return shlex.join(["ds-engine", "fill-mask", "--checkpoint", str(run), "--text", prompt])
    return shlex.join(["ds-engine", "generate", "--checkpoint", str(run), "--prompt", prompt])
