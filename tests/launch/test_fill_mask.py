"""``ds-engine fill-mask`` with a BERT, and what other commands and families say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import cli as group
from tests.launch.test_generate_eval import in_world
from tests.launch.untrained import model_section, write_run

TEXTS = ("--text", "import [MASK] as [MASK]", "--text", "[MASK]")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "bert", model_section("bert"))
    write_run(folder / "classes", model_section("bert", num_labels=3))
    write_run(folder / "gpt", model_section("gpt"))
    return folder


def fill(runs: Path, size: int, *more: str) -> str:
    words = ("fill-mask", "--checkpoint", "bert", *TEXTS, "--tensor", str(size), *more)
    return in_world(size, runs, *words)


def test_masks_are_filled_in_every_tensor_layout(runs: Path) -> None:
    rows = json.loads(fill(runs, 1, "--json", "--top-k", "3"))
    assert [[len(place) for place in row] for row in rows] == [[3, 3], [3]]
    for row in rows:
        for place in row:
            values = [probability for _, probability in place]
            assert values == sorted(values, reverse=True)
            assert all(isinstance(piece, str) for piece, _ in place)
    text = fill(runs, 1)
    assert text.startswith("import [MASK] as [MASK]\n  1: ")
    assert text.count("\n") == 5
    assert fill(runs, 2) == text


def test_the_mask_is_read_and_plain_text_around_it_stays_text(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch import fill_mask as module
    from preprocessing.tokenize import load_tokenizer

    words, read = load_tokenizer(runs / "bert" / "tokenizer.json"), []

    def nothing(model, rows, tp, **options):  # type: ignore[no-untyped-def]
        read.append((rows, options["mask_id"], options["max_sequence_length"]))
        return [[] for _ in rows]

    monkeypatch.setattr(module, "fill_mask", nothing)
    texts = ("import [MASK] as a", "\n[MASK][MASK]", "a [CLS][MASK]")
    assert module.fill_texts(runs / "bert", texts) == [[], [], []]
    cls, sep, mask = (words.token_id(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    rows = [
        [cls, *words.encode("import"), mask, *words.encode(" as a"), sep],
        [cls, *words.encode("\n"), mask, mask, sep],
        [cls, *words.encode("a [CLS]"), mask, sep],
    ]
    assert rows[2].count(cls) == 1
    assert read == [(rows, mask, 64)]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--checkpoint", "bert", "--text", "no mask"], 2, "has no [MASK]"),
        (["--checkpoint", "bert"], 2, "give at least one --text"),
        (["--checkpoint", "gpt", "--text", "[MASK]"], 2, "use ds-engine generate"),
        (["--checkpoint", "classes", "--text", "[MASK]"], 2, "fine-tuned for classes"),
        (["--checkpoint", "bert", "--text", 70 * "ab" + "[MASK]"], 2, "max_sequence_length = 64"),
    ],
)
def test_what_cannot_be_filled_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, text: str
) -> None:
    monkeypatch.chdir(runs)
    found = CliRunner().invoke(group, ["fill-mask", *arguments])
    assert found.exit_code == code, found.output
    assert text in found.output


def test_a_bert_writes_no_text(runs: Path) -> None:
    words = ["generate", "--checkpoint", str(runs / "bert"), "--prompt", "a"]
    found = CliRunner().invoke(group, words)
    assert found.exit_code == 2
    assert "ds-engine fill-mask --checkpoint" in found.output
