"""Pretraining, fine-tuning and use of a BERT and a T5, by the commands that a user gives."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ds_engine.config.load import read_run
from ds_engine.training.tracking.jsonl import read_log
from launch.check import check_run
from launch.cli import cli as group
from launch.labels import Classes, check_classes, keep_classes, run_classes
from tests.worlds import run_world

KINDS = {
    "weather": ("rain", "sun", "wind", "cloud", "storm", "snow"),
    "food": ("bread", "soup", "rice", "apple", "cheese", "salt"),
}
FILLERS = ("the", "a", "some", "much", "good", "bad", "and")
GERMAN = {
    "one": "eins",
    "two": "zwei",
    "three": "drei",
    "four": "vier",
    "dog": "hund",
    "cat": "katze",
    "horse": "pferd",
    "bird": "vogel",
}
SIZES = {"vocab_size": 400, "num_layers": 2, "hidden_size": 32, "max_sequence_length": 32}


def run_section(name: str, model: dict[str, Any], data: dict[str, Any], steps: int) -> Any:
    return {
        "seed": 5,
        "model": {**SIZES, **model},
        "data": {
            "train": [{"path": f"data/{name}"}],
            "validation": [{"path": f"data/{name}_held_out"}],
            "sequence_length": 24,
            **data,
        },
        "training": {
            "steps": steps,
            "lr_schedule": {"type": "cosine", "warmup_steps": 5},
            "log_every": 5,
            "evaluate_every": steps,
            "evaluate_batches": 4,
        },
        "checkpoint": {"directory": f"runs/{name}", "every": 0},
        "tracking": {"progress": False},
        "deepspeed": {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.005, "betas": [0.9, 0.95]}},
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 16,
            "gradient_clipping": 1.0,
        },
    }


def train_body(rank: int, home: Path, section: dict[str, Any]) -> str:
    """``ds-engine train`` as one rank: "" or its error."""
    from ds_engine.errors import DsEngineError
    from launch.train import train

    os.chdir(home)
    Path("run.json").write_text(json.dumps(section))
    try:
        return str(train("run.json", ()) or "")
    except DsEngineError as error:
        return str(error)


def train(home: Path, section: dict[str, Any]) -> list[dict[str, float]]:
    """Train to the end; the rows of the log."""
    assert run_world(1, train_body, home, section) == [""]
    folder = home / section["checkpoint"]["directory"]
    return [row for row in read_log(folder / "log.jsonl") if "step" in row]


def loss_falls(rows: list[dict[str, float]]) -> bool:
    found = [row["train/loss"] for row in rows if "train/loss" in row]
    return found[-1] < 0.9 * found[0]


def command(home: Path, *words: str, code: int = 0) -> str:
    """What ``ds-engine WORDS`` prints in ``home``; with an exit code that is wanted, its error."""
    before = Path.cwd()
    os.chdir(home)
    try:
        found = CliRunner().invoke(group, [*words])
    finally:
        os.chdir(before)
    assert found.exit_code == code, found.output
    return found.stderr if code else found.stdout


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentences(count: int, seed: int) -> list[dict[str, str]]:
    """Texts that use the words of one kind."""
    source, rows = random.Random(seed), []
    for number in range(count):
        kind = list(KINDS)[number % 2]
        words = [source.choice(KINDS[kind] if n % 3 == 1 else FILLERS) for n in range(8)]
        rows.append({"text": " ".join(words), "kind": kind})
    return rows


def preprocess(home: Path, name: str, *more: str) -> None:
    words = ("--input", f"{name}.jsonl", "--output", f"data/{name}", *more)
    command(home, "preprocess", *words)


BERT = {
    "family": "bert",
    "attention": {"num_heads": 4},
    "mlp": {"intermediate_size": 64},
    "norm_first": True,
    "sentence_head": False,
    "init_std": 0.05,
}
CLASSES = ("--fields", "text,kind", "--label", "kind", "--tokenizer", "bert.json")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, text, and the same text with its classes."""
    home = tmp_path_factory.mktemp("labelled")
    write_rows(home / "kinds.jsonl", sentences(200, 1))
    write_rows(home / "kinds_held_out.jsonl", sentences(48, 2))
    words = ("--input", "kinds.jsonl", "--vocab-size", "200", "--output", "bert.json")
    command(home, "tokenizer", "train", *words, "--kind", "wordpiece")
    for name in ("kinds", "kinds_held_out"):
        preprocess(home, name, *CLASSES)
        command(
            home,
            *("preprocess", "--input", f"{name}.jsonl", "--tokenizer", "bert.json"),
            *("--output", f"data/plain{name.removeprefix('kinds')}", "--split-sentences"),
        )
    return home


def classify_section(steps: int = 60, **data: Any) -> dict[str, Any]:
    model = {**BERT, "num_labels": 2}
    return run_section("kinds", model, {"tokenizer": "bert.json", **data}, steps)


@pytest.mark.slow
def test_a_bert_learns_to_classify(labelled: Path) -> None:
    home, tokenizer = labelled, {"tokenizer": "bert.json"}
    assert loss_falls(train(home, run_section("plain", BERT, tokenizer, 40)))
    section = classify_section()
    section["checkpoint"]["initialize_from"] = "runs/plain"
    rows = train(home, section)
    assert loss_falls(rows)
    held_out = [row for row in rows if "validation/classification_accuracy" in row]
    assert held_out[-1]["validation/classification_accuracy"] > 0.9
    assert "validation/perplexity" not in held_out[-1]

    words = ("--checkpoint", "runs/kinds")
    found = json.loads(command(home, "eval", *words, "--json"))
    assert found["validation/tokens"] == 48
    assert found["validation/classification_accuracy"] > 0.9
    assert "accuracy" in command(home, "eval", *words, "--data", "data/kinds_held_out")

    given = sentences(48, 2)
    texts = [word for row in given for word in ("--text", row["text"])]
    judged = json.loads(command(home, "classify", *words, *texts, "--json"))
    right = [row["kind"] == one["class"] for row, one in zip(given, judged, strict=True)]
    # The command reads a text exactly as training and evaluation did.
    assert sum(right) / 48 == pytest.approx(found["validation/classification_accuracy"])
    table = command(home, "classify", *words, "--text", "the rain and much wind")
    header, line = table.splitlines()
    assert header.split() == ["class", "food", "weather", "text"]
    assert line.startswith("weather ")

    # The same labels under other numbers are no measure of this run.
    preprocess(home, "kinds_held_out", *CLASSES, "--label-names", "weather,food", "--overwrite")
    answer = command(home, "eval", *words, code=2)
    assert "has the classes weather, food, but the run has food, weather" in answer
    preprocess(home, "kinds_held_out", *CLASSES, "--overwrite")
    answer = command(home, "eval", *words, "--data", "data/absent", code=3)
    assert "create it with `ds-engine preprocess`" in answer


@pytest.mark.slow
def test_examples_that_do_not_fit_are_refused_before_training(labelled: Path) -> None:
    section = classify_section(sequence_length=8)
    section["checkpoint"]["directory"] = "runs/short"
    (answer,) = run_world(1, train_body, labelled, section)
    assert "examples are longer than data.sequence_length = 8" in answer
    assert "set data.objective.truncate to true" in answer
    assert not (labelled / "runs/short/log.jsonl").exists()


def problems(home: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(home)
    return check_classes(check_run(read_run(section), 1, "the test").run)


def test_labels_must_mean_the_same_everywhere(
    labelled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    section = classify_section()
    section["checkpoint"]["directory"] = str(tmp_path / "run")
    assert problems(labelled, section, monkeypatch) == []
    run = read_run(section)
    known = Classes(("food", "weather"), pairs=False)
    assert run_classes(tmp_path, run) == known
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    keep_classes(tmp_path / "run", run)

    more = ("--label-names", "weather,food", "--overwrite")
    preprocess(labelled, "kinds", *CLASSES, "--output", "data/turned", *more)
    section["data"]["validation"] = [{"path": "data/turned"}]
    (text,) = problems(labelled, section, monkeypatch)
    assert "data.validation.0.path = data/turned has the classes weather, food" in text
    assert "but data.train.0.path = data/kinds has food, weather" in text
    assert "--label-names" in text

    section["data"] = {**section["data"], "train": section["data"]["validation"]}
    (text,) = problems(labelled, section, monkeypatch)
    assert "goes on with what it has learned about food, weather" in text
    # What the run kept is believed, whatever lies beside the data now.
    assert run_classes(tmp_path / "run", read_run(section)) == known
    section["checkpoint"]["directory"] = str(tmp_path / "new")
    assert problems(labelled, section, monkeypatch) == []

    section["model"]["num_labels"] = 3
    (text,) = problems(labelled, section, monkeypatch)
    assert "model.num_labels = 3, but data.train.0.path = data/turned has 2 classes" in text
    # Data without a report may come from elsewhere: nothing is known, and nothing refused.
    section["data"]["train"] = section["data"]["validation"] = [{"path": "data/absent"}]
    assert problems(labelled, section, monkeypatch) == []
    assert run_classes(tmp_path / "new", read_run(section)) is None


T5 = {
    "family": "t5",
    "attention": {"num_heads": 4, "bias": False},
    "mlp": {"intermediate_size": 64, "activation": "geglu_tanh", "bias": False},
}


@pytest.mark.slow
def test_a_t5_learns_to_translate(tmp_path: Path) -> None:
    home = tmp_path
    numbers, animals = list(GERMAN)[:4], list(GERMAN)[4:]
    pairs = [
        {"input": f"{a} {b}", "target": f"{GERMAN[a]} {GERMAN[b]}"}
        for a, b in itertools.product(numbers, animals)
    ]
    write_rows(home / "pairs.jsonl", pairs)
    write_rows(home / "plain.jsonl", [{"text": t} for p in pairs for t in p.values()] * 4)
    words = ("--input", "plain.jsonl", "--vocab-size", "340", "--sentinels", "20")
    command(home, "tokenizer", "train", *words, "--kind", "t5", "--output", "t5.json")
    for name in ("plain", "pairs"):
        fields = ("--fields", "input,target") if name == "pairs" else ()
        for suffix in ("", "_held_out"):
            command(
                home,
                *("preprocess", "--input", f"{name}.jsonl", "--tokenizer", "t5.json"),
                *("--output", f"data/{name}{suffix}", *fields),
            )
    tokenizer = {"tokenizer": "t5.json"}
    assert loss_falls(train(home, run_section("plain", T5, tokenizer, 20)))
    data = {
        **tokenizer,
        "objective": {"type": "text_to_text"},
        "decoder_sequence_length": 16,
    }
    section = run_section("pairs", T5, data, 150)
    section["checkpoint"]["initialize_from"] = "runs/plain"
    assert loss_falls(train(home, section))
    prompts = [word for pair in pairs for word in ("--prompt", pair["input"])]
    for more in ((), ("--num-beams", "3")):
        text = command(
            home,
            *("generate", "--checkpoint", "runs/pairs", *prompts, "--max-new-tokens", "12", *more),
        )
        answers = text.rstrip("\n").split("\n----\n")
        right = [a == pair["target"] for a, pair in zip(answers, pairs, strict=True)]
        assert sum(right) / len(pairs) > 0.9, answers

    short = run_section("pairs", T5, {**data, "decoder_sequence_length": 2}, 5)
    short["checkpoint"]["directory"] = "runs/short"
    (answer,) = run_world(1, train_body, home, short)
    assert "decoder_sequence_length" in answer
    assert "truncate" in answer
    assert not (home / "runs/short/log.jsonl").exists()
