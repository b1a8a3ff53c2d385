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
