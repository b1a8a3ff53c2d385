import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from ds_engine.errors import DataError
from preprocessing.run import Options
from preprocessing.tokenize import load_tokenizer, tokenizer_files
from preprocessing.train_tokenizer import train_tokenizer


def test_end_of_document_text_is_only_text(tokenizer):
    loaded = load_tokenizer(tokenizer)
    text = "a <|endoftext|> b"
    for ids in (loaded.encode(text), loaded.encode_batch([text])[0]):
        assert loaded.eod_id not in ids
        assert loaded.decode(ids) == text
    assert loaded.eod_token == "<|endoftext|>"
    assert loaded.decode([loaded.eod_id]) == "<|endoftext|>"


@given(st.text(st.characters(blacklist_categories=["Cs"])))
@settings(max_examples=50, deadline=None)
def test_round_trip_of_any_text(tokenizer, text):
    loaded = load_tokenizer(tokenizer)
    ids = loaded.encode(text)
    assert loaded.decode(ids) == text
    assert all(0 < token < loaded.vocab_size for token in ids)


def test_truncation_padding_and_added_tokens_of_the_file_are_off(tokenizer, tmp_path):
    model = Tokenizer.from_file(tokenizer)
    model.enable_truncation(3)
    model.enable_padding(length=50)
    model.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    text = "the cat sat on the mat " * 10
    assert loaded.decode(loaded.encode(text)) == text
    assert [loaded.decode(ids) for ids in loaded.encode_batch(["the", text])] == ["the", text]


def test_an_end_token_that_the_file_does_not_call_special(tokenizer, tmp_path):
    content = json.loads(Path(tokenizer).read_text())
    content["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert 0 not in load_tokenizer(tmp_path).encode("<|endoftext|>")


def test_vocabulary_size_counts_holes(tmp_path):
    words = Tokenizer.from_file(str(word_tokenizer(tmp_path, {"a": 0, "b": 500})))
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "words.json"))
    assert load_tokenizer(tmp_path / "words.json").vocab_size >= 501


def test_choice_of_the_end_token(tokenizer, tmp_path):
    model = Tokenizer.from_file(tokenizer)
    model.add_special_tokens([AddedToken("<stop>")])
    model.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json", eod="<stop>")
    assert (loaded.eod_token, loaded.eod_id) == ("<stop>", 270)
    with pytest.raises(DataError, match=r"no token '<nope>'"):
        load_tokenizer(tokenizer, eod="<nope>")
    with pytest.raises(DataError, match="would end the document"):
        # A token that text itself produces cannot end a document.
        load_tokenizer(word_tokenizer(tmp_path, {"</s>": 0, "a": 1}))
    with pytest.raises(DataError, match=r"none of the usual.*--eod"):
        load_tokenizer(word_tokenizer(tmp_path, {"a": 0}))


def word_tokenizer(folder, vocabulary):
    from tokenizers import models

    model = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    model.save(str(folder / "words.json"))
    return folder / "words.json"


def test_gpt2_files(tokenizer, tmp_path):
    Tokenizer.from_file(tokenizer).model.save(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    assert vocabulary["<|endoftext|>"] == 0
    loaded = load_tokenizer(tmp_path)
    expected = load_tokenizer(tokenizer)
    text = "the cat <|endoftext|> sat"
    assert loaded.encode(text) == expected.encode(text)
    assert loaded.vocab_size == expected.vocab_size
    (tmp_path / "merges.txt").unlink()
    for call in (load_tokenizer, tokenizer_files):
        with pytest.raises(DataError, match=r"merges\.txt is missing"):
            call(tmp_path)


def test_sentencepiece(sentencepiece_model):
    loaded = load_tokenizer(sentencepiece_model.parent)
    assert (loaded.eod_token, loaded.eod_id) == ("</s>", 2)
    assert loaded.decode(loaded.encode("the cat sat")) == "the cat sat"
    assert 2 not in loaded.encode("the cat </s> sat")
    assert loaded.encode_batch(["the", "cat"]) == [loaded.encode("the"), loaded.encode("cat")]
    assert loaded.unknown_id == 0


def test_ids_that_are_no_tokens_are_refused(tokenizer, sentencepiece_model):
    for path in (tokenizer, sentencepiece_model):
        loaded = load_tokenizer(path)
        assert loaded.decode([loaded.vocab_size - 1])
        for token in (loaded.vocab_size, -1):
            with pytest.raises(DataError, match=rf"token {token} is not in the tokenizer.*0 to"):
                loaded.decode([5, token])


def test_the_files_of_a_tokenizer_are_those_that_are_read(tokenizer, sentencepiece_model, tmp_path):
    sources = {name: tmp_path / name for name in ("json", "gpt2", "sentencepiece")}
    for folder in sources.values():
        folder.mkdir()
        (folder / "weights.safetensors").write_text("huge")
    shutil.copy(tokenizer, sources["json"])
    Tokenizer.from_file(tokenizer).model.save(str(sources["gpt2"]), "gpt2")
    shutil.copy(sentencepiece_model, sources["sentencepiece"])
    cases = [
        (sources["json"], ["tokenizer.json"]),
        (sources["json"] / "tokenizer.json", ["tokenizer.json"]),
        (sources["gpt2"] / "gpt2-vocab.json", ["gpt2-vocab.json", "gpt2-merges.txt"]),
        (sources["sentencepiece"], ["m.model"]),
        (sources["sentencepiece"] / "m.model", ["m.model"]),
    ]
    for path, names in cases:
        files = tokenizer_files(path)
        assert [file.name for file in files] == names
        alone = tmp_path / "alone"
        alone.mkdir()
        for file in files:
            shutil.copy(file, alone)
        text = "the cat sat on the dog"
        assert load_tokenizer(alone / names[0]).encode(text) == load_tokenizer(path).encode(text)
        shutil.rmtree(alone)
    with pytest.raises(DataError, match="does not exist"):
        tokenizer_files(tmp_path / "none")


def test_unusable_files(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.model").write_bytes(b"junk")
    with pytest.raises(DataError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path / "x.model")


def test_training_a_tokenizer(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "zebra zebra"}\nbad\n')
    output = tmp_path / "out" / "tokenizer.json"
    inputs = [str(tmp_path / "a.jsonl")]
    with pytest.raises(DataError, match=r"a\.jsonl:2: invalid_json"):
        train_tokenizer(inputs, str(output), Options(tokenizer=""), vocab_size=300)
    assert not output.exists()
    options = Options(tokenizer="", max_bad_fraction=0.5)
    size, report = train_tokenizer(inputs, str(output), options, vocab_size=300)
    assert 257 < size < 300  # "zebra" has only so many pairs
    assert report.documents == 1
    assert len(load_tokenizer(output).encode("zebra")) < 5
    with pytest.raises(DataError, match="exists"):
        train_tokenizer(inputs, str(output), options, vocab_size=300)
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(inputs, str(tmp_path / "b.json"), options, vocab_size=256)
