"""Classes of texts: those of the logits, in any batch and tensor layout, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ds_engine.errors import ConfigError, DataError, DsEngineError, NumericsError
from ds_engine.inference.classify import Example, classify
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from launch.cli import cli as group
from models.bert import build_plan
from models.common.definition import PlanOptions
from tests.inference.test_fill_mask import BERT, WORDS
from tests.inference.test_tensor_parallel import _handle
from tests.launch.test_generate_eval import in_world
from tests.launch.untrained import model_section, write_run
from tests.worlds import run_world

SINGLE = TensorParallel.single()
EXAMPLES = [
    Example([2, 7, 9, 11, 3], 5),
    Example([2, 5, 3, 8, 21, 33, 3], 3),
    Example([2, 5, 8, 21, 33, 3, 3], 7),
    Example([2, 3], 2),
]
CONFIGS = {
    "bert": replace(BERT, num_labels=3),
    "pre_norm": replace(BERT, num_labels=5, norm_first=True, num_token_types=0),
}


def build(name, tp=SINGLE):
    return SequentialModel(build_plan(CONFIGS[name], tp, PlanOptions(seed=3)))


@torch.no_grad()
def by_hand(model, example):
    """Probabilities (C,) of one example without padding."""
    tokens = torch.tensor([list(example.tokens)])
    positions = torch.arange(tokens.shape[1])[None]
    types = (positions >= example.second).long()
    inputs = (tokens, positions, torch.zeros_like(tokens), types, torch.zeros(1).long())
    return model.eval()(inputs)[0].double().softmax(-1).tolist()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_probabilities_are_those_of_each_example_by_itself(name, batch_size):
    model = build(name)
    found = classify(model, EXAMPLES, SINGLE, batch_size=batch_size)
    assert all(module.training for module in model.modules())
    assert len(found) == len(EXAMPLES)
    for example, row in zip(EXAMPLES, found, strict=True):
        assert row == pytest.approx(by_hand(model, example), abs=1e-6)
        assert sum(row) == pytest.approx(1)
    assert classify(model, [], SINGLE) == []


def test_the_second_text_is_read_as_such():
    first, second = (Example([2, 5, 3, 8, 3], place) for place in (5, 3))
    found = classify(build("bert"), [first, second], SINGLE)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize(
    ("example", "changes", "kind", "text"),
    [
        (Example([], 0), {}, DataError, "empty"),
        (Example([2, WORDS, 3], 3), {}, DataError, "vocab_size = 61"),
        (Example([2] * 17, 17), {}, ConfigError, "17 tokens, more than model.max_sequence"),
        (Example([2, 3], 5), {}, ConfigError, "begins at 5"),
        (Example([2, 3], 2), {"batch_size": 0}, ConfigError, "batch_size = 0"),
    ],
)
def test_what_cannot_be_classified_is_refused(example, changes, kind, text):
    with pytest.raises(kind, match=text):
        classify(build("bert"), [example], SINGLE, max_sequence_length=16, **changes)


def test_damaged_weights_are_an_error():
    model = build("bert")
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    with pytest.raises(NumericsError, match="checkpoint"):
        classify(model, EXAMPLES, SINGLE)


def _body(rank, size):
    tp = _handle(size)
    found = [classify(build(name, tp), EXAMPLES, tp, batch_size=3) for name in CONFIGS]
    problems = []
    other = [Example([2, 5 + rank, 3], 3)]
    for handle, examples in ((tp, other), (_handle(size, sequence=True), EXAMPLES)):
        try:
            classify(build("bert", handle), examples, handle)
        except DsEngineError as error:
            problems.append(str(error))
    return found, problems


def test_all_ranks_find_what_one_process_finds():
    ranks = run_world(2, _body, 2)
    assert ranks[0] == ranks[1]
    found, (different, sequence) = ranks[0]
    assert "different prompts" in different
    assert "parallel.sequence = true cannot classify" in sequence
    for name, rows in zip(CONFIGS, found, strict=True):
        for example, row in zip(EXAMPLES, rows, strict=True):
            assert row == pytest.approx(by_hand(build(name), example), abs=1e-5)


# -- ds-engine classify ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models: one that classifies, one of pairs, and others."""
    folder = tmp_path_factory.mktemp("runs")
    for name, family, changes in (
        ("classes", "bert", {"num_labels": 3}),
        ("pairs", "bert", {"num_labels": 2}),
        ("many", "bert", {"num_labels": 12}),
        ("bert", "bert", {}),
        ("gpt", "gpt", {}),
        ("t5", "t5", {}),
    ):
        write_run(folder / name, model_section(family, **changes))
    for name, names, pairs in (("classes", ["a", "b", "c"], False), ("pairs", ["x", "y"], True)):
        (folder / name / "classes.json").write_text(json.dumps({"names": names, "pairs": pairs}))
    return folder


def run(runs: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.chdir(runs)
    found = CliRunner().invoke(group, ["classify", *arguments])
    assert found.exit_code == 0, found.output
    return found.output


def test_the_command_prints_a_table_or_json(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_bytes("\ufeffone line\r\nanother\u2028line\n".encode())
    words = ("--checkpoint", "classes", "--text", "hello", "--text-file", str(lines))
    rows = json.loads(run(runs, monkeypatch, *words, "--json"))
    assert [row["text"] for row in rows] == ["hello", "one line", "another\u2028line"]
    for row in rows:
        assert list(row["probabilities"]) == ["a", "b", "c"]
        assert sum(row["probabilities"].values()) == pytest.approx(1)
        assert row["probability"] == max(row["probabilities"].values())
        assert row["probabilities"][row["class"]] == row["probability"]
    header, *table = run(runs, monkeypatch, *words).splitlines()[:3]
    assert header.split() == ["class", "a", "b", "c", "text"]
    assert table[0].split()[0] == rows[0]["class"]
    assert table[0].endswith("  hello")
    two = in_world(2, runs, "classify", *words, "--tensor", "2", "--json")
    for row, other in zip(json.loads(two), rows, strict=True):
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


def test_pairs_and_classes_without_names(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("one\ntwo")
    second.write_text("three\nfour\n")
    words = ("--text", "a", "--pair", "b", "--text-file", str(first), "--pair-file", str(second))
    rows = json.loads(run(runs, monkeypatch, "--checkpoint", "pairs", *words, "--json"))
    given = [(row["text"], row["pair"]) for row in rows]
    assert given == [("a", "b"), ("one", "three"), ("two", "four")]
    assert list(rows[0]["probabilities"]) == ["x", "y"]
    table = run(runs, monkeypatch, "--checkpoint", "many", "--text", "a").splitlines()
    assert table[0].split() == ["class", "probability", "next", "text"]
    assert table[1].split()[0] in map(str, range(12))


def test_a_text_is_cut_as_in_training(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--checkpoint", "classes", "--json", "--text")
    cut = json.loads(run(runs, monkeypatch, *words, "ab" * 30, "--truncate"))
    whole = json.loads(run(runs, monkeypatch, *words, "ab" * 15))
    assert cut[0]["probabilities"] == whole[0]["probabilities"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["classes"], "give at least one --text"),
        (["classes", "--text", ""], "text 1 is empty"),
        (["classes", "--text", "a", "--text", 16 * "ab"], "text 2 (abab"),
        (["classes", "--text", 16 * "ab"], "34 tokens, more than the 32"),
        (["classes", "--text", 16 * "ab"], "--truncate"),
        (["classes", "--text", "a", "--pair", "b"], "trained on single texts"),
        (["pairs", "--text", "a"], "give each --text its --pair"),
        (["pairs", "--text", "a", "--text", "b", "--pair", "c"], "2 texts of --text and 1 of"),
        (["pairs", "--pair-file", "gpt/tokenizer.json"], "needs --text-file"),
        (["bert", "--text", "a"], "checkpoint.initialize_from=bert"),
        (["gpt", "--text", "a"], "ds-engine generate --checkpoint gpt"),
        (["t5", "--text", "a"], "ds-engine generate --checkpoint t5"),
    ],
)
def test_the_command_says_what_to_do_instead(
    runs: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(runs)
    found = CliRunner().invoke(group, ["classify", "--checkpoint", *arguments])
    assert found.exit_code == 2, found.output
    assert text in found.output


def test_a_file_that_is_no_text_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(runs)
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    words = ["classify", "--checkpoint", "classes", "--text-file", str(tmp_path / "latin")]
    found = CliRunner().invoke(group, words)
    assert found.exit_code == 3
    assert "is not UTF-8 (byte 0)" in found.output
