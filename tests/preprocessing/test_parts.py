"""Documents of several sequences: sentences, fields, classes."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

import preprocessing.run
from ds_engine.data.indexed import IndexedDataset
from ds_engine.errors import DataError
from launch.commands.preprocess import command
from preprocessing.run import Options, preprocess
from preprocessing.sentences import split_sentences
from preprocessing.tokenize import load_tokenizer

TEXT = 'Dr. Cat sat on the mat.  "No!" said the dog.\n\nThen e.g. it sat. \n'


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parts_of(prefix, tokenizer):
    """The documents of a data set as lists of their sequences' texts."""
    loaded = load_tokenizer(tokenizer)
    data = IndexedDataset(prefix)
    starts = data.document_sequences()
    return [
        [loaded.decode(data[i].tolist()) for i in range(*starts[d : d + 2])]
        for d in range(data.num_documents)
    ]


@given(st.text(st.sampled_from("aB. !?\n\t\"')\u00a0\u2028\u3002 e.g.Dr. \U0001f600"), max_size=60))
@example("")
@example(" \n ")
@example("One.Two. Three?! (Four.) \u201cFive.\u201d ")
@settings(max_examples=200, deadline=None)
def test_sentences_joined_give_the_text_back(text):
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert split_sentences(text) == sentences
    if text.strip():
        assert all(sentence.strip() for sentence in sentences)


def test_sentences_and_where_white_space_goes():
    assert split_sentences(TEXT) == [
        "Dr. Cat sat on the mat.",
        '  "No!" said the dog.',
        "\n\nThen e.g. it sat. \n",
    ]
    assert split_sentences("one sentence") == ["one sentence"]


def test_a_sentence_is_a_sequence_and_no_end_is_written(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"text": TEXT}, {"text": ""}, {"text": "the cat"}])
    options = Options(tokenizer, split_sentences=True)
    report = preprocess([source], str(tmp_path / "x"), options)
    first, *others = split_sentences(TEXT.rstrip())
    assert parts_of(tmp_path / "x", tokenizer) == [[f" {first}", *others], [" the cat"]]
    assert load_tokenizer(tokenizer).eod_id not in IndexedDataset(tmp_path / "x").tokens
    assert (report.documents, report.sequences, report.kinds) == (2, 4, {"empty": 1})
    saved = json.loads((tmp_path / "x.report.json").read_text())
    assert (saved["ends_documents"], saved["sequences"]) == (False, 4)
    assert saved["inputs"][0]["tokens"] == saved["tokens"] == report.tokens


def test_white_space_does_not_tell_the_first_or_last_sentence(tmp_path, tokenizer):
    """Else a model would learn the order of two sentences from the space before their words."""
    source = write(tmp_path / "a.jsonl", [{"text": "The cat sat. The cat sat. The cat sat.\n"}] * 3)
    preprocess([source], str(tmp_path / "x"), Options(tokenizer, split_sentences=True))
    data = IndexedDataset(tmp_path / "x")
    sentences = np.split(data.tokens, data.sequence_token_offsets()[1:-1])
    assert len(sentences) == 9
    assert {tuple(sentence.tolist()) for sentence in sentences} == {tuple(sentences[0].tolist())}


def test_sentences_of_which_nothing_is_left_are_no_sequences(tmp_path, bert):
    source = write(tmp_path / "a.jsonl", [{"text": "The cat. \u200b\u200b! The dog."}])
    path = write(tmp_path / "b.jsonl", [{"text": "\u200b\u200b"}, {"text": "cat"}])
    for name, text in (("x", source), ("y", path)):
        preprocess([text], str(tmp_path / name), Options(bert, split_sentences=True))
        assert IndexedDataset(tmp_path / name).lengths.min() > 0
    assert IndexedDataset(tmp_path / "y").num_documents == 1


FIELDS = ("input", "target")


def test_fields_are_sequences_in_order(tmp_path, tokenizer):
    rows = [
        {"target": "the dog", "input": "the cat", "more": 1},
        {"input": "a", "target": "b. C?"},
        {"input": "", "target": "x"},
        {"input": "x", "target": ""},
    ]
    source = write(tmp_path / "a.jsonl", rows)
    report = preprocess([source], str(tmp_path / "x"), Options(tokenizer, fields=FIELDS))
    assert parts_of(tmp_path / "x", tokenizer) == [["the cat", "the dog"], ["a", "b. C?"]]
    assert (report.documents, report.sequences, report.kinds) == (2, 4, {"empty": 2})
    assert load_tokenizer(tokenizer).eod_id not in IndexedDataset(tmp_path / "x").tokens


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"input": "a"}, "missing_text"),
        ({"input": "a", "target": 3}, "text_not_string"),
        ({"input": None, "target": "a"}, "text_not_string"),
        (["input", "target"], "not_an_object"),
    ],
)
def test_bad_fields(tmp_path, tokenizer, row, kind):
    source = write(tmp_path / "a.jsonl", [{"input": "a", "target": "b"}, row])
    options = Options(tokenizer, fields=FIELDS)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {kind}"):
        preprocess([source], str(tmp_path / "x"), options)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    report = preprocess([source], str(tmp_path / "x"), replace(options, max_bad_fraction=0.5))
    assert report.kinds == {kind: 1}
    assert parts_of(tmp_path / "x", tokenizer) == [["a", "b"]]


def labelled(tokenizer, **changes):
    return replace(Options(tokenizer, fields=("text", "label"), label="label"), **changes)


def classes_of(prefix):
    data = IndexedDataset(prefix)
    last = data.document_sequences()[1:] - 1
    assert all(data.lengths[last] == 1)
    return [int(data[i][0]) for i in last]


@pytest.mark.parametrize(
    ("values", "names", "numbers"),
    [
        (["pos", "neg", "pos"], ["neg", "pos"], [1, 0, 1]),
        ([10, 9, -1], ["-1", "9", "10"], [2, 1, 0]),  # by value, not by their digits
        ([True, False], ["false", "true"], [1, 0]),
        (["10", "9"], ["10", "9"], [0, 1]),
    ],
)
def test_classes_are_collected_and_sorted(tmp_path, tokenizer, values, names, numbers):
    source = write(tmp_path / "a.jsonl", [{"text": "cat", "label": value} for value in values])
    report = preprocess([source], str(tmp_path / "x"), labelled(tokenizer))
    assert report.settings["labels"] == names
    assert json.loads((tmp_path / "x.report.json").read_text())["labels"] == names
    assert classes_of(tmp_path / "x") == numbers


def test_named_classes(tmp_path, tokenizer):
    rows = [{"text": "cat", "label": value} for value in ("pos", "neg")]
    source = write(tmp_path / "a.jsonl", rows)
    options = labelled(tokenizer, label_names=("pos", "neutral", "neg"))
    report = preprocess([source], str(tmp_path / "x"), options)
    assert classes_of(tmp_path / "x") == [0, 2]
    assert report.settings["labels"] == ["pos", "neutral", "neg"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: label 'neg' is not one of pos, other"):
        preprocess([source], str(tmp_path / "y"), labelled(tokenizer, label_names=("pos", "other")))
    for names in (("a", "a"), ("a",), ("a", "")):
        with pytest.raises(DataError, match="--label-names"):
            preprocess([source], str(tmp_path / "y"), labelled(tokenizer, label_names=names))
    assert not (tmp_path / "y.idx").exists()


def test_a_pair_may_be_empty_but_the_first_text_not(tmp_path, tokenizer):
    rows = [
        {"text": "cat", "pair": "", "label": 0},
        {"text": "cat", "pair": "dog", "label": 1},
        {"text": "", "pair": "dog", "label": 1},
    ]
    source = write(tmp_path / "a.jsonl", rows)
    options = labelled(tokenizer, fields=("text", "pair", "label"))
    report = preprocess([source], str(tmp_path / "x"), options)
    data = IndexedDataset(tmp_path / "x")
    assert data.document_sequences().tolist() == [0, 3, 6]
    assert [part[:2] for part in parts_of(tmp_path / "x", tokenizer)] == [
        ["cat", ""],
        ["cat", "dog"],
    ]
    assert classes_of(tmp_path / "x") == [0, 1]
    assert report.kinds == {"empty": 1}


@pytest.mark.parametrize("value", [1.0, None, ["a"], ""])
def test_what_is_no_class(tmp_path, tokenizer, value):
    rows = [{"text": "cat", "label": label} for label in ("a", "b", value)]
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:3: label_not_class dropped"):
        preprocess([source], str(tmp_path / "x"), labelled(tokenizer))
    options = labelled(tokenizer, max_bad_fraction=0.5)
    assert preprocess([source], str(tmp_path / "x"), options).settings["labels"] == ["a", "b"]


def test_classes_that_cannot_be_told(tmp_path, tokenizer):
    def fails(values, message):
        rows = [{"text": "cat", "label": value} for value in values]
        source = write(tmp_path / "a.jsonl", rows)
        with pytest.raises(DataError, match=message):
            preprocess([source], str(tmp_path / "x"), labelled(tokenizer))

    fails([1, 0, "1"], r"several kinds: .*'1' at .*a\.jsonl:3")
    fails([1, 0, True], r"several kinds: .*True at .*a\.jsonl:3")
    fails(["a", "a"], r"all labels are 'a'.*--label-names")
    source = write(tmp_path / "b.jsonl", [{"text": "cat", "lable": 1}])
    with pytest.raises(DataError, match=r"b\.jsonl:1: missing_text.*no key 'label'.*'lable'"):
        preprocess([source], str(tmp_path / "x"), labelled(tokenizer))


@pytest.mark.parametrize(
    "changes",
    [
        {"split_sentences": True},
        {"fields": ("text", "pair", "label"), "label": "label"},
    ],
)
def test_the_bytes_do_not_depend_on_the_workers(tmp_path, tokenizer, monkeypatch, changes):
    monkeypatch.setattr(preprocessing.run, "_BATCH_RECORDS", 4)
    texts = [f"The cat sat on mat {k}. Dr. Dog sat! On it?" * (k % 5) for k in range(40)]
    rows = [
        {"text": text, "pair": "x" * (k % 3), "label": "cba"[k % 3]} for k, text in enumerate(texts)
    ]
    source = write(tmp_path / "a.jsonl", rows)
    options = replace(Options(tokenizer), **changes)
    for workers in (1, 3):
        preprocess([source], str(tmp_path / f"w{workers}"), replace(options, workers=workers))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"w1{ending}").read_bytes() == (tmp_path / f"w3{ending}").read_bytes()
    reports = [json.loads((tmp_path / f"w{n}.report.json").read_text()) for n in (1, 3)]
    assert {**reports[0], "output": ""} == {**reports[1], "output": ""}
    assert reports[0]["documents"] == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": ("a", "b"), "split_sentences": True}, "exclude each other"),
        ({"fields": ("a", "b"), "text_key": "c"}, "--text-key c exclude"),
        ({"fields": ("a",)}, "two or more"),
        ({"fields": ("a", "a")}, "different"),
        ({"fields": ("a", "b"), "format": "text"}, "JSON lines"),
        ({"fields": ("a", "b"), "label": "a"}, "last of --fields"),
        ({"label": "a"}, "last of --fields"),
        ({"fields": ("a", "b", "c", "d"), "label": "d"}, "one text or two"),
        ({"label_names": ("a", "b")}, "needs --label"),
        ({"fields": ("a", "b")}, r"a\.txt is read as text"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, tokenizer, changes, message):
    (tmp_path / "a.txt").write_text("cat")
    with pytest.raises(DataError, match=message):
        preprocess(
            [str(tmp_path / "a.txt")], str(tmp_path / "x"), replace(Options(tokenizer), **changes)
        )


def test_the_commands(tmp_path, tokenizer):
    rows = [{"text": "the cat", "label": value} for value in ("pos", "neg")]
    source = write(tmp_path / "a.jsonl", rows)
    common = ["--input", source, "--tokenizer", tokenizer, "--output"]

    def run(name, *arguments):
        result = CliRunner().invoke(
            command, [*common, str(tmp_path / name), *arguments], catch_exceptions=False
        )
        assert result.exit_code == 0
        return result.output

    said = run("x", "--fields", "text,label", "--label", "label", "--label-names", "pos, neg")
    assert "2 documents of 4 sequences" in said
    assert "classes: 0 pos, 1 neg" in said
    assert classes_of(tmp_path / "x") == [0, 1]
    assert "2 documents of 2 sequences" in run("y", "--split-sentences")
    assert "2 documents, " in run("z")
