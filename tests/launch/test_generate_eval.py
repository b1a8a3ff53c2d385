"""Using a finished run: generation and evaluation give the same in every tensor layout."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ds_engine.training.run_folder import RunFolder
from launch.generate import continued
from launch.inference import own_tokenizer
from preprocessing.tokenize import load_tokenizer, tokenizer_files
from tests.launch.tiny import HOME, cli, cli_body, environment, losses
from tests.worlds import run_world

PROMPTS = ("--prompt", "abc", "--prompt", "a longer prompt", "--prompt", "")
SHORT = ("--max-new-tokens", "12")


def in_world(size: int, home: Path, *arguments: str) -> str:
    """What rank 0 prints; the others print nothing, and nobody fails."""
    answers = run_world(size, cli_body, home, arguments)
    assert [code for code, _ in answers] == [0] * size
    assert [text for _, text in answers[1:]] == [""] * (size - 1)
    return answers[0][1]


def generate(home: Path, tensor: int, *more: str) -> str:
    words = ("generate", "--checkpoint", "runs/whole", *PROMPTS, *SHORT)
    return in_world(tensor, home, *words, "--tensor", str(tensor), *more)


def test_generation_is_the_same_for_all_tensor_degrees(home: Path) -> None:
    likeliest = generate(home, 1)
    assert len(likeliest.split("\n----\n")) == 3
    assert likeliest.startswith("abc")
    assert generate(home, 2) == likeliest
    drawn = ("--temperature", "1.0", "--top-k", "50", "--seed", "4")
    sampled = generate(home, 1, *drawn)
    assert sampled != likeliest
    assert generate(home, 2, *drawn) == sampled
    assert generate(home, 4, *drawn) == sampled


@pytest.mark.slow
def test_generation_starts_its_own_ranks(home: Path) -> None:
    found = subprocess.run(
        cli("generate", "--checkpoint", "runs/whole", *PROMPTS, *SHORT, "--tensor", "2"),
        cwd=home,
        env=environment() | {"PYTHONPATH": str(HOME)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout == generate(home, 1)


def test_evaluation_is_the_same_for_all_layouts(home: Path) -> None:
    words = ("eval", "--checkpoint", "runs/whole", "--json")
    whole = json.loads(in_world(1, home, *words))
    assert whole["validation/tokens"] > 500
    # the run's own last evaluation saw the first 16 samples
    part = json.loads(in_world(1, home, *words, "--max-samples", "16"))
    assert part["validation/loss"] == pytest.approx(
        losses(home / "runs" / "whole")[60]["validation/loss"], rel=1e-6
    )
    for size, more in ((2, ("--tensor", "2")), (2, ("--nproc", "2")), (1, ())):
        found = json.loads(in_world(size, home, *words, *more, "--micro-batch-size", "3"))
        assert found["validation/tokens"] == whole["validation/tokens"]
        assert found["validation/loss"] == pytest.approx(whole["validation/loss"], rel=1e-6)
    text = in_world(1, home, "eval", "--checkpoint", "runs/whole", "--data", "data/train")
    assert text.startswith("loss ")
    assert "perplexity" in text


def test_one_checkpoint_and_a_damaged_one(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "runs" / "whole", run)
    words = ("eval", "--json", "--max-samples", "4", "--checkpoint")
    older = in_world(1, home, *words, str(run / "checkpoints" / "step_00000050"))
    newest = in_world(1, home, *words, str(run))
    assert newest != older
    for file in (run / "checkpoints" / "step_00000060").glob("model-*"):
        file.write_bytes(file.read_bytes()[:-9])
    assert in_world(1, home, *words, str(run)) == older
    ((code, _),) = run_world(1, failing_body, home, str(run / "checkpoints" / "step_00000060"))
    assert code == 4


def failing_body(rank: int, folder: Path, checkpoint: str) -> tuple[int, str]:
    """``ds-engine eval`` that fails: outside of ranks ``fail`` exits in the ordinary way."""
    import os

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    return cli_body(rank, folder, ("eval", "--checkpoint", checkpoint))


def test_the_end_of_document_token_can_be_another(home: Path, tmp_path: Path) -> None:
    """As after ``ds-engine preprocess --eod TOKEN``: that token ends a continuation."""
    words = ("generate", "--checkpoint", "runs/whole", "--prompt", "ab", *SHORT)
    pieces = home / "data" / "tokenizer.json"
    whole = in_world(1, home, *words).rstrip("\n")
    first = load_tokenizer(pieces).encode(whole.removeprefix("ab"))[0]
    content = json.loads(pieces.read_text())
    vocabulary = content["model"]["vocab"]
    (name,) = (name for name, token in vocabulary.items() if token == first)
    vocabulary["<stop>"] = vocabulary.pop(name)
    content["added_tokens"].append({**content["added_tokens"][0], "id": first, "content": "<stop>"})
    named = tmp_path / "tokenizer.json"
    named.write_text(json.dumps(content))
    other = ("--tokenizer", str(named))
    assert in_world(1, home, *words, *other).rstrip("\n") == "ab" + 12 * "<stop>"
    assert in_world(1, home, *words, *other, "--eod", "<stop>").rstrip("\n") == "ab"


def byte_level(tokens: int) -> Tokenizer:
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    model.train_from_iterator(["the cat sat"] * 5, trainer)
    return model


def pieces_of(kind: str, folder: Path) -> Path:
    """A tokenizer of each kind that writes spaces in its own way."""
    from tokenizers import decoders, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    if kind == "sentencepiece":
        sentencepiece = pytest.importorskip("sentencepiece")
        (folder / "a.txt").write_text("the cat sat on the mat and the dog sat\n" * 50)
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "a.txt"),
            model_prefix=str(folder / "m"),
            vocab_size=40,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        return folder / "m.model"
    if kind == "byte_level":
        model = byte_level(270)
    elif kind == "metaspace":
        words = [f"{space}{word}" for space in "\u2581" for word in ("the", "cat", "sat")]
        vocabulary = {word: n for n, word in enumerate(["<unk>", "<s>", *words])}
        model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        model.decoder = decoders.Metaspace()
        model.add_special_tokens(["</s>"])
    else:
        vocabulary = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "##s": 4}
        model = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        model.pre_tokenizer = pre_tokenizers.Whitespace()
        model.decoder = decoders.WordPiece()
        model.add_special_tokens(["<eos>"])
    model.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level", "metaspace", "wordpiece"])
def test_a_continuation_keeps_its_spaces(kind: str, tmp_path: Path) -> None:
    words = load_tokenizer(pieces_of(kind, tmp_path))
    whole = words.encode("the cat sat")
    start = words.encode("the cat")
    assert whole[: len(start)] == start
    assert continued(words, "the cat", start, whole[len(start) :]) == "the cat sat"
    assert continued(words, "the cat", start, []) == "the cat"
    # An empty prompt begins a document, which begins without a space.
    assert continued(words, "", [], whole) == "the cat sat"
    # A tokenizer that drops the space at the end of a prompt does not make two of one.
    if kind != "byte_level":
        spaced = words.encode("the cat ")
        assert continued(words, "the cat ", spaced, whole[len(start) :]) == "the cat sat"


def test_a_decoder_that_rewrites_what_it_has_written() -> None:
    class Contracting:
        """Writes "do n't" as "don't", as clean-up rules do."""

        def decode(self, ids: Sequence[int]) -> str:
            return " ".join(("do", "n", "'t")[n] for n in ids).replace("do n 't", "don't")

    assert continued(Contracting(), "do n", [0, 1], [2]) == "do n't"  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level", "gpt2"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_a_run_finds_the_tokenizer_that_it_kept(kind: str, as_folder: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if kind == "gpt2":
        source.mkdir()
        byte_level(270).model.save(str(source))
        file = source / "vocab.json"
    else:
        file = pieces_of(kind, source)
    (source / "weights.safetensors").write_text("huge")
    named = source if as_folder else file
    expected = load_tokenizer(named).encode("the cat sat")
    run = RunFolder(tmp_path / "run").create()
    assert own_tokenizer(run.path, str(named)) == named
    run.keep_tokenizer(tokenizer_files(named))
    shutil.rmtree(source)
    assert load_tokenizer(own_tokenizer(run.path, str(named))).encode("the cat sat") == expected
    assert not (run.tokenizer / "weights.safetensors").exists()


def test_a_degree_that_does_not_fit_is_refused(home: Path) -> None:
    from click.testing import CliRunner

    from launch.cli import cli as group

    words = ["generate", "--checkpoint", str(home / "runs" / "whole")]
    assert "give at least one --prompt" in CliRunner().invoke(group, words).output
    empty = home / "data"
    found = CliRunner().invoke(group, ["generate", "--checkpoint", str(empty), "--prompt", "a"])
    assert found.exit_code == 4
    assert "no usable checkpoint" in found.output
