"""``ds-engine generate`` with an encoder-decoder, and beam search of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import cli as group
from launch.options import read_lines
from tests.launch.test_generate_eval import in_world
from tests.launch.untrained import model_section, write_run

PROMPTS = ("--prompt", "the <extra_id_0> sat", "--prompt", "", "--prompt", "the cat sat")
BEAMS = ("--num-beams", "3", "--length-penalty", "0.8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "t5", model_section("t5"))
    write_run(folder / "gpt", model_section("gpt"))
    return folder


def generate(runs: Path, name: str, size: int, *more: str) -> str:
    words = ("generate", "--checkpoint", name, *PROMPTS, "--max-new-tokens", "10")
    return in_world(size, runs, *words, "--tensor", str(size), *more)


@pytest.mark.parametrize("name", ["t5", "gpt"])
def test_texts_are_the_same_for_all_tensor_degrees(runs: Path, name: str) -> None:
    likeliest = generate(runs, name, 1)
    assert len(likeliest.split("\n----\n")) == 3
    assert likeliest.startswith("the <extra_id_0> sat") == (name == "gpt")
    searched = generate(runs, name, 1, *BEAMS)
    assert searched != likeliest
    assert generate(runs, name, 2) == likeliest
    assert generate(runs, name, 2, *BEAMS) == searched


def test_a_sentinel_in_a_prompt_is_a_sentinel_and_appears_by_name(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch import generate as module

    read = []

    def answer(model, sources, settings, tp, **options):  # type: ignore[no-untyped-def]
        read.append((sources, settings.stop_ids, options["start_id"]))
        return [[2, *sources[0][:1], 3]]

    monkeypatch.setattr(module, "generate_from", answer)
    texts = module.generate_texts(runs / "t5", ("a <extra_id_1>b",), module.Sampling(4))
    assert texts == ["<extra_id_0>a<extra_id_1>"]
    ((sources, stops, start),) = read
    # The space before a sentinel belongs to the word that is missing.
    assert sources == [[sources[0][0], 3, sources[0][2], 1]]
    assert (stops, start) == ((1,), 0)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--num-beams", "2", "--temperature", "0.5"], "give one of them"),
        (["--length-penalty", "2"], "with --num-beams only"),
        (["--num-beams", "200"], "compares 400 words a step"),
    ],
)
def test_beams_that_cannot_be_are_refused(runs: Path, more: list[str], text: str) -> None:
    words = ["generate", "--checkpoint", str(runs / "t5"), "--prompt", "a", *more]
    found = CliRunner().invoke(group, words)
    assert found.exit_code == 2
    assert text in found.output


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--top-k", "5"], "--temperature above 0 only"),
        (["--top-p", "0.9"], "--temperature above 0 only"),
        (["--eod", "</s>"], "--eod </s> has no effect"),
    ],
)
def test_options_without_an_effect_are_refused(runs: Path, more: list[str], text: str) -> None:
    words = ["generate", "--checkpoint", str(runs / "t5"), "--prompt", "a", *more]
    found = CliRunner().invoke(group, words)
    assert found.exit_code == 2
    assert text in found.output


@pytest.mark.parametrize(("command", "option"), [("generate", "prompt"), ("fill-mask", "text")])
def test_a_file_of_texts_that_is_not_utf8_is_refused(
    runs: Path, tmp_path: Path, command: str, option: str
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    words = [command, "--checkpoint", str(runs / "t5"), f"--{option}-file"]
    found = CliRunner().invoke(group, [*words, str(tmp_path / "latin.txt")])
    assert found.exit_code == 3
    assert "latin.txt is not UTF-8 (byte 3)" in found.output


def test_the_lines_of_a_file_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    for content, lines in ((b"", []), (b"a\x0bb\r\n\nc\n", ["a\x0bb", "", "c"]), (b"\n", [""])):
        file.write_bytes(content)
        assert read_lines(file) == lines
