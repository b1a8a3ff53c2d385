from pathlib import Path

import pytest

from preprocessing.run import Options
from preprocessing.train_tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Path of a small byte-level tokenizer; <|endoftext|> has id 0."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text("the cat sat on the mat and the dog sat on the cat\n" * 20)
    path = str(folder / "tokenizer.json")
    train_tokenizer([str(folder / "a.txt")], path, Options(tokenizer=path), vocab_size=270)
    return path


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    """Path of a small sentencepiece model, the only one in its folder."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    (folder / "a.txt").write_text("the cat sat on the mat and the dog sat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "a.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "m.model"


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """Path of a small lower-case WordPiece tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "a.txt").write_text("The cat sat on the mat, and the dog sat on the cats.\n" * 20)
    path = str(folder / "tokenizer.json")
    train_tokenizer(
        [str(folder / "a.txt")],
        path,
        Options(tokenizer=path),
        vocab_size=60,
        kind="wordpiece",
        lowercase=True,
    )
    return path


@pytest.fixture(scope="session")
def t5(tmp_path_factory):
    """Path of a small T5 tokenizer with three sentinels."""
    folder = tmp_path_factory.mktemp("t5")
    (folder / "a.txt").write_text("the cat sat on the mat and the dog sat on the cat\n" * 20)
    path = str(folder / "tokenizer.json")
    train_tokenizer(
        [str(folder / "a.txt")],
        path,
        Options(tokenizer=path),
        vocab_size=275,
        kind="t5",
        sentinels=3,
    )
    return path


@pytest.fixture(scope="session")
def t5_sentencepiece(tmp_path_factory):
    """Path of a sentencepiece model laid out as T5's: padding 0, end 1, unknown 2, no beginning."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder: Path = tmp_path_factory.mktemp("t5_sentencepiece")
    (folder / "a.txt").write_text("the cat sat on the mat and the dog sat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "a.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    return folder / "spiece.model"
