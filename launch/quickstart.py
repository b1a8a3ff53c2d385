"""The whole road in one command: text, tokenizer, data, training, curves, generated text."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from ds_engine.config.load import load_run
from ds_engine.data.indexed import IndexedDataset
from ds_engine.errors import LaunchError
from launch.accelerator import Accelerator, find_accelerator
from launch.check import check_run
from launch.deepspeed_launcher import HOME
from launch.local import start_ranks
from launch.quickstart_text import Split, write_split
from preprocessing.run import Options, preprocess
from preprocessing.train_tokenizer import train_tokenizer

RUN_FILE = HOME / "ds_configs" / "runs" / "gpt_tiny.json"


@dataclass(frozen=True)
class Quickstart:
    """Where the quickstart reads and writes, and how it runs.

    Attributes:
        data: the user's ``.txt`` or ``.jsonl``, or None for Python's standard library.
        folder: for prepared data.
        run: run folder.
        nproc: ranks.
        overrides: changes to the run file.
        prompt: what to continue at the end.
    """

    data: Path | None
    folder: Path
    run: Path
    nproc: int
    overrides: tuple[str, ...]
    prompt: str


def unigram_entropy(prefix: Path) -> float:
    """Entropy in nats of the frequencies of an indexed data set's tokens.

    No model that ignores context can have a lower loss on this data, not even one that knows the
    frequencies of these very tokens.
    """
    data = IndexedDataset(str(prefix))
    counts = np.zeros(0, dtype=np.int64)
    for document in range(len(data)):
        found = np.bincount(np.asarray(data[document], dtype=np.int64))
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def prepare(settings: Quickstart, vocab_size: int) -> Split:
    """Write text, tokenizer and indexed data into the folder; what is there is replaced."""
    folder = settings.folder
    split = write_split(settings.data, folder)
    click.echo(
        f"text: {split.documents:,} documents, {split.characters / 1e6:.1f} MB: {split.origin}"
    )
    tokenizer = str(folder / "tokenizer.json")
    options = Options(tokenizer=tokenizer, workers=settings.nproc, overwrite=True)
    train_tokenizer([str(split.train)], tokenizer, options, vocab_size=vocab_size)
    for path in (split.train, split.validation):
        report = preprocess([str(path)], str(path.with_suffix("")), options)
        click.echo(f"{path.stem}: {report.tokens:,} tokens")
    return split


def run_quickstart(settings: Quickstart) -> int:
    """Do everything; returns the training's exit code.

    Raises:
        DsEngineError: unusable data, or a training that failed.
    """
    folder, data = settings.run, settings.folder
    sources = (
        f"data.train={json.dumps([{'path': str(data / 'train')}])}",
        f"data.validation={json.dumps([{'path': str(data / 'validation')}])}",
        f"data.tokenizer={json.dumps(str(data / 'tokenizer.json'))}",
        f"checkpoint.directory={json.dumps(str(folder))}",
    )
    overrides = (*sources, *settings.overrides)
    run = load_run(RUN_FILE, overrides)
    resolved = check_run(run, settings.nproc, "--nproc")
    if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir()):
        raise LaunchError(
            f"{folder} holds an earlier run; remove it, or choose another place with --run"
        )
    prepare(settings, resolved.model.vocab_size)
    entropy = unigram_entropy(data / "validation")

    accelerator = find_accelerator(os.environ)
    if not accelerator.is_cpu and accelerator.devices < settings.nproc:
        accelerator = Accelerator("cpu", 1)  # two small ranks on the CPU rather than none
    arguments = ["--config", str(RUN_FILE), *(w for o in overrides for w in ("--set", o))]
    code = start_ranks(
        "launch.train",
        arguments,
        nproc=settings.nproc,
        source="--nproc",
        accelerator=accelerator,
    )
    if code:
        return code
    _show(settings, entropy)
    return 0


def _show(settings: Quickstart, entropy: float) -> None:
    from ds_engine.training.plot import plot_run
    from ds_engine.training.tracking.jsonl import read_log
    from launch.generate import Sampling, generate_texts

    folder = settings.run
    curves = plot_run(folder, references={"unigram entropy": entropy})
    losses = [
        row["validation/loss"] for row in read_log(folder / "log.jsonl") if "validation/loss" in row
    ]
    sampling = Sampling(max_new_tokens=120, temperature=0.7, top_p=0.95)
    texts = generate_texts(folder, (settings.prompt,), sampling) or [""]
    click.echo(f"\n{'-' * 30} generated {'-' * 30}\n{texts[0]}\n{'-' * 71}")
    rows = [
        ("validation loss", f"{losses[-1]:.3f} nats per token"),
        ("unigram entropy", f"{entropy:.3f} nats per token (no context at all)"),
        ("curves", curves),
        ("log", folder / "log.jsonl"),
        ("wandb, offline", folder / "wandb"),
        ("checkpoint", folder / "checkpoints"),
        ("tokenizer, data", settings.folder),
        ("more text", f'ds-engine generate --checkpoint {folder} --prompt "import os"'),
    ]
    for name, value in rows:
        click.echo(f"{name:<16} {value}")
