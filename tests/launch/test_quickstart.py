"""The quickstart: what it makes of text, and the whole road on a small file of the user's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.errors import DataError
from ds_engine.training.tracking.jsonl import read_log
from launch.quickstart import unigram_entropy
from launch.quickstart_text import plain_text, standard_library, write_split
from tests.read_wandb import wandb_history

ROOT = Path(__file__).parent.parent.parent
LINE = "The quick brown fox number {n} jumps over lazy dog number {m}, and then it rests.\n"


def documents(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def story(lines: int) -> str:
    return "".join(LINE.format(n=i, m=i * 7 % 31) for i in range(lines))


def test_standard_library_is_split_by_file(tmp_path: Path) -> None:
    split = write_split(None, tmp_path)
    names = [
        {json.loads(line)["name"] for line in path.read_text().splitlines()}
        for path in (split.train, split.validation)
    ]
    assert names[0].isdisjoint(names[1])
    assert 0.01 < len(names[1]) / split.documents < 0.12
    assert "os.py" in names[0] | names[1]
    assert split.characters > 5_000_000
    assert dict(standard_library())["os.py"] in documents(split.train) + documents(split.validation)


def test_a_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    text = story(1000)
    path = tmp_path / "my.txt"
    path.write_text(text)
    assert "".join(piece for _, piece in plain_text(path)) == text
    split = write_split(path, tmp_path / "out")
    both = documents(split.train) + documents(split.validation)
    assert sum(map(len, both)) == len(text)
    assert all(piece.endswith("\n") for piece in both)
    assert documents(split.validation)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "does not exist"),
        ("my.csv", "a,b", "use .txt or .jsonl"),
        ("short.txt", "too short", "too few to train on"),
        ("bad.jsonl", '{"text": "a"}\nnot json\n', "bad.jsonl:2"),
        ("other.jsonl", '{"body": "a"}\n', "other.jsonl:1"),
        ("number.jsonl", '{"text": 3}\n', "not a string"),
    ],
)
def test_unusable_data_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        write_split(path, tmp_path / "out")


def test_latin_1_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("déjà vu\n".encode("latin-1") * 4000)
    with pytest.raises(DataError, match="not UTF-8"):
        write_split(path, tmp_path / "out")


def test_unigram_entropy_of_known_frequencies(tmp_path: Path) -> None:
    with IndexedWriter(str(tmp_path / "data"), vocab_size=10) as writer:
        writer.add_document(np.array([1, 1, 2, 3]))
        writer.add_document(np.array([1, 1, 2, 3]))
    assert unigram_entropy(tmp_path / "data") == pytest.approx(1.5 * math.log(2))


@pytest.mark.slow
def test_the_whole_road_on_the_users_text(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(story(1500))
    options = [
        "--data=my.txt",
        "--prompt=The quick",
        "--set=training.steps=12",
        "--set=training.log_every=4",
        "--set=training.lr_schedule.warmup_steps=2",
        "--set=model.num_layers=2",
        "--set=training.evaluate_batches=2",
    ]
    program = Path(sys.executable).parent / "ds-engine"
    done = subprocess.run(
        [program, "quickstart", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "quickstart"
    rows = read_log(run / "log.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == [4, 8, 12]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert (run / "curves" / "training.png").stat().st_size > 10_000
    (wandb_file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    assert [row["train/loss"] for row in wandb_history(wandb_file) if "train/loss" in row] == losses
    assert (run / "checkpoints" / "step_00000012" / "manifest.json").is_file()
    for words in ("validation loss", "unigram entropy", "The quick", "2 data-parallel replicas"):
        assert words in done.stdout
