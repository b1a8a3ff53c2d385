"""The quickstart: what it makes of text, and the whole road on a small file of the user's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_engine.config.load import load_run
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.errors import DataError, LaunchError
from ds_engine.training.tracking.jsonl import JsonlTracker, read_log
from launch.accelerator import Accelerator
from launch.baseline import count_labels, entropy, validation_baselines
from launch.check import check_run
from launch.quickstart import Family, Quickstart, outcome_table, run_quickstart, train_command
from launch.quickstart_text import (
    default_prompts,
    filled,
    plain_text,
    standard_library,
    write_split,
)
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


# the baseline


def test_entropy_of_known_frequencies() -> None:
    assert entropy(np.array([4, 2, 0, 2])) == pytest.approx(1.5 * math.log(2))
    assert str(entropy(np.array([0, 7]))) == "0.0"


def test_labels_that_count_are_counted_for_each_term() -> None:
    """Sample by sample with its own number, words and a class, masks of 0 left out."""
    rows = {
        (10, 0): ([3, 1, 3], [1, 1, 0], 1, 1),
        (11, 1): ([0, 5, 5], [0, 1, 1], 0, 1),
        (12, 2): ([2, 2, 2], [0, 0, 0], 1, 0),
        (13, 3): ([9, 9, 9], [1, 1, 1], 1, 1),  # not evaluated
    }

    def objective(sample: int, number: int) -> Any:
        return SimpleNamespace(targets=tuple(map(np.array, rows[sample, number])))

    words, classes = count_labels(objective, [10, 11, 12, 13], 3)  # type: ignore[arg-type]
    assert words.tolist() == [0, 1, 0, 1, 0, 2]
    assert classes.tolist() == [1, 1]


def settings_of(family: Family, folder: Path, *overrides: str, **more: Any) -> Quickstart:
    (folder / "my.txt").write_text(story(600))
    data, run = folder / "data", folder / "run"
    return Quickstart(family, folder / "my.txt", data, run, 1, overrides, **more)


def test_baseline_of_gpt_is_the_entropy_of_the_next_tokens_it_evaluates(tmp_path: Path) -> None:
    """By hand: 2 batches of 4 rows of 8 labels, over one document of tokens 0..6 in turn."""
    for name in ("train", "validation"):
        with IndexedWriter(str(tmp_path / name), vocab_size=4096) as writer:
            writer.add_document(np.arange(1000) % 7)
    settings = Quickstart(
        *("gpt", None, tmp_path, tmp_path / "run", 1),
        ("data.sequence_length=8", "training.evaluate_batches=2", "deepspeed.train_batch_size=4"),
    )
    found = validation_baselines(check_run(load_run(settings.run_file, settings.settings), 1, ""))
    labels = [(place + 1) % 7 for place in range(64)]
    shares = [labels.count(token) / 64 for token in range(7)]
    assert found == {"loss": pytest.approx(-sum(p * math.log(p) for p in shares))}


def test_baselines_of_bert_are_below_those_of_all_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masked words and sentence pairs have their own, and the accuracy that of its labels."""
    pairs = ("model.sentence_head=true", "data.objective.sentence=sentence_order")
    settings = settings_of("bert", tmp_path, "data.sequence_length=64", *pairs, prepare_only=True)
    assert run_quickstart(settings) == 0
    resolved = check_run(load_run(settings.run_file, settings.settings), 1, "")
    found = validation_baselines(resolved)
    assert list(found) == ["masked_lm_loss", "sentence_loss", "sentence_accuracy"]
    share = found["sentence_accuracy"]
    assert 0.5 <= share < 1
    binary = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert found["sentence_loss"] == pytest.approx(binary)
    assert 1.0 < found["masked_lm_loss"] < math.log(resolved.model.vocab_size)
    assert "to train: ds-engine train --config" in capsys.readouterr().out


def test_without_validation_data_there_is_no_baseline(tmp_path: Path) -> None:
    file = settings_of("gpt", tmp_path).run_file
    run = load_run(file, ("data.validation=[]", "training.evaluate_every=0"))
    assert validation_baselines(check_run(run, 1, "")) == {}


# what it says


def test_the_command_that_trains_leaves_out_what_the_run_file_says() -> None:
    cpu = Accelerator("cpu", 1)
    usual = Quickstart("t5", None, Path("data/quickstart_t5"), Path("runs/t5_tiny"), 2)
    command = train_command(usual, cpu)
    assert command.startswith("ds-engine train --config ")
    assert command.endswith("ds_configs/runs/t5_tiny.json --nproc 2")
    other = Quickstart("t5", None, usual.folder, Path("runs/b c"), 2, ("training.steps=7",))
    words = train_command(other, cpu).split("--set ")[1:]
    assert words == ["'checkpoint.directory=\"runs/b c\"' ", "training.steps=7"]
    assert "--nproc" not in train_command(usual, Accelerator("cuda", 1))


@pytest.mark.parametrize(("family", "mark"), [("t5", "<extra_id_0>"), ("bert", r"\[MASK\]")])
def test_a_prompt_without_a_place_to_fill_is_refused_at_once(
    tmp_path: Path, family: Family, mark: str
) -> None:
    settings = settings_of(family, tmp_path, prompts=("nothing to fill",))
    with pytest.raises(LaunchError, match=f"'nothing to fill' has no {mark}"):
        run_quickstart(settings)
    assert not settings.folder.exists()


def test_prompts_come_from_the_users_held_out_text(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    for text, t5, bert in (
        ("a b c d e f", "a b<extra_id_0> d<extra_id_1> f", "a b c [MASK] e f"),
        ("alone", "<extra_id_0>", "[MASK]"),
    ):
        path.write_text(json.dumps({"text": text}) + "\n")
        assert default_prompts("t5", path) == (t5,)
        assert default_prompts("bert", path) == (bert,)
        assert default_prompts("gpt", path) == (text[:5],)
    assert default_prompts("bert", None) == ("import [MASK]", "return [MASK]")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<extra_id_0> os<extra_id_1>argv<extra_id_2></s>", "import« os»; f(«argv»)"),
        ("<extra_id_1>x<extra_id_1>y", "import<extra_id_0>; f(«x»)"),
        ("os </s>", "import<extra_id_0>; f(<extra_id_1>)"),
        ("", "import<extra_id_0>; f(<extra_id_1>)"),
    ],
)
def test_sentinels_are_replaced_by_what_was_written(answer: str, expected: str) -> None:
    assert filled("import<extra_id_0>; f(<extra_id_1>)", answer) == expected


def test_the_outcome_is_shown_beside_its_baseline(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "log.jsonl", run_id="r", first_step=0)
    tracker.log(1, {"validation/masked_lm_loss": 9.0, "validation/sentence_accuracy": 0.4})
    tracker.log(2, {"validation/masked_lm_loss": 4.5, "validation/sentence_accuracy": 0.75})
    tracker.log(2, {"validation/loss": math.nan})
    tracker.close(0)
    baselines = {"masked_lm_loss": 6.25, "sentence_accuracy": 0.51, "loss": 1.0, "other_loss": 2.0}
    lines = [" ".join(line.split()) for line in outcome_table(tmp_path, baselines).splitlines()]
    assert lines[1:5] == [
        "Loss of masked words 4.500 6.250 nats per masked token",
        "Accuracy of sentence pairs 75.0% 51.0%",
        "Loss not finite 1.000 nats per token",
        "Other loss not logged 2.000 nats",
    ]


# the whole road


def quickstart(folder: Path, *options: str) -> str:
    """What ``ds-engine quickstart`` says of a story and a few steps."""
    (folder / "my.txt").write_text(story(1500))
    program = Path(sys.executable).parent / "ds-engine"
    settings = [
        "--data=my.txt",
        "--set=training.steps=12",
        "--set=training.log_every=4",
        "--set=training.lr_schedule.warmup_steps=2",
        "--set=training.evaluate_batches=2",
    ]
    done = subprocess.run(
        [program, "quickstart", *settings, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_whole_road_on_the_users_text(tmp_path: Path) -> None:
    said = quickstart(tmp_path, "--prompt=The quick", "--set=model.num_layers=2")
    run = tmp_path / "runs" / "gpt_tiny"
    rows = read_log(run / "log.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == [4, 8, 12]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert (run / "curves" / "training.png").stat().st_size > 10_000
    (wandb_file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    assert [row["train/loss"] for row in wandb_history(wandb_file) if "train/loss" in row] == losses
    assert (run / "checkpoints" / "step_00000012" / "manifest.json").is_file()
    for words in ("validation loss", "unigram entropy", "The quick", "2 data-parallel replicas"):
        assert words in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shown", "again"),
    [
        ("t5", ("filled in", "    wrote: ", "nats per token"), "generate --checkpoint"),
        ("bert", ("guessed", "[MASK]", "nats per token"), "fill-mask --checkpoint"),
    ],
)
def test_the_whole_road_of_the_other_families(
    tmp_path: Path, family: str, shown: tuple[str, ...], again: str
) -> None:
    said = quickstart(
        tmp_path,
        f"--family={family}",
        "--nproc=1",
        "--set=model.num_layers=1",
        "--set=data.sequence_length=64",
        "--set=tracking.wandb=null",
    )
    run = tmp_path / "runs" / f"{family}_tiny"
    losses = [row["train/loss"] for row in read_log(run / "log.jsonl") if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert (run / "curves" / "training.png").stat().st_size > 10_000
    assert (tmp_path / "data" / f"quickstart_{family}" / "train.bin").is_file()
    for words in (*shown, f"ds-engine {again} runs/{family}_tiny", "unigram entropy"):
        assert words in said
