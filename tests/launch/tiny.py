"""A tiny run on disk, and real launcher processes that leave nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HOME = Path(__file__).resolve().parent.parent.parent
STEPS = 60


def run_object(**training: Any) -> dict[str, Any]:
    return {
        "model": {
            "family": "gpt",
            "vocab_size": 300,
            "num_layers": 2,
            "hidden_size": 32,
            "max_sequence_length": 64,
            "attention": {"num_heads": 4, "dropout": 0.1},
            "mlp": {"intermediate_size": 64},
            "hidden_dropout": 0.1,
        },
        "data": {
            "train": [{"path": "data/train"}],
            "validation": [{"path": "data/validation"}],
            "sequence_length": 32,
            "tokenizer": "data/tokenizer.json",
        },
        "training": {
            "steps": STEPS,
            "lr_schedule": {"warmup_steps": 5},
            "log_every": 1,
            "evaluate_every": 30,
            "evaluate_batches": 2,
            **training,
        },
        "checkpoint": {"directory": "runs/whole", "every": 10, "keep_last": 2},
        "tracking": {"progress": False},
        "deepspeed": {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
        },
    }


def write_run(folder: Path) -> Path:
    """``run.json`` with data and a tokenizer beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from ds_engine.data.indexed_writer import IndexedWriter

    random = np.random.default_rng(3)
    for name, documents in (("train", 200), ("validation", 20)):
        with IndexedWriter(folder / "data" / name, vocab_size=300) as writer:
            for _ in range(documents):
                writer.add_document(random.integers(0, 257, random.integers(3, 90)))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(
        ["a"],
        trainers.BpeTrainer(
            vocab_size=257,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    words.save(str(folder / "data" / "tokenizer.json"))
    path = folder / "run.json"
    path.write_text(json.dumps(run_object()))
    return path


def whole_body(rank: int, folder: Path) -> int:
    """The run without any interruption, in a test world of two ranks."""
    from launch.train import train

    os.chdir(folder)
    return train("run.json", ())


def cli_body(rank: int, folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """``ds-engine ARGUMENTS`` as a rank of a test world: (exit code, what it printed)."""
    from launch.cli import cli as group

    os.chdir(folder)
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output):
        try:
            group.main([*arguments], prog_name="ds-engine", standalone_mode=False)
        except SystemExit as error:
            code = int(error.code or 0)
    return code, output.getvalue()


def environment() -> dict[str, str]:
    """As a user's shell, without what pytest or a test world may have set."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", *arguments]


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose whole family is ended with the test."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(HOME)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family = [psutil.Process(process.pid)]
    try:
        yield process
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def ranks_of(folder: Path) -> dict[int, int]:
    """Rank -> process number of all ranks that run in ``folder``."""
    found = {}
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.cwd() == str(folder) and "RANK" in (variables := each.environ()):
                found[int(variables["RANK"])] = each.pid
    return found


def processes_in(folder: Path) -> list[str]:
    """Whatever still runs in ``folder``."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.cwd() == str(folder) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(each.cmdline()))
    return found


def kill_processes_in(folder: Path) -> None:
    """End whatever still runs in ``folder``."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.cwd() == str(folder):
                each.kill()


def wait_until(condition: Callable[[], bool], process: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"it did not come to pass:\n{process.stdout.read()}")
        time.sleep(0.02)


def last_step(run: Path) -> int:
    """The last step in the log, 0 without one."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((run / "log.jsonl").read_text().splitlines()):
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                if "train/loss" in row:
                    return int(row["step"])
    return 0


def losses(run: Path) -> dict[int, dict[str, float]]:
    """What the run's log says of each step, without times."""
    from ds_engine.training.tracking.jsonl import read_log

    names = ("train/loss", "train/grad_norm", "train/lr", "train/tokens", "validation/loss")
    return {
        int(row["step"]): {n: row[n] for n in names if n in row}
        for row in read_log(run / "log.jsonl")
    }
