import gzip
import json
import os
import signal
import time
from dataclasses import replace

import pytest

from ds_engine.data.indexed import IndexedDataset
from ds_engine.errors import DataError
from preprocessing.pool import ordered_map
from preprocessing.run import Options, preprocess
from preprocessing.tokenize import load_tokenizer


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(prefix, tokenizer):
    loaded = load_tokenizer(tokenizer)
    data = IndexedDataset(prefix)
    documents = [data[i].tolist() for i in range(len(data))]
    assert all(document[-1] == loaded.eod_id for document in documents)
    assert all(loaded.eod_id not in document[:-1] for document in documents)
    return [loaded.decode(document[:-1]) for document in documents]


def test_text_comes_back_and_the_report_counts(tmp_path, tokenizer):
    texts = ["the cat", "a <|endoftext|> inside", "zwölf \U0001f600", " "]
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.txt").write_text("one file\n\nis one document\n")
    prefix = str(tmp_path / "out" / "x")
    seen = []
    report = preprocess(
        [jsonl, str(tmp_path / "b.txt")],
        prefix,
        Options(tokenizer=tokenizer),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert texts_of(prefix, tokenizer) == [*texts, "one file\n\nis one document\n"]
    total = os.path.getsize(jsonl) + os.path.getsize(tmp_path / "b.txt")
    assert seen[-1] == (total, total)
    stored = json.loads((tmp_path / "out" / "x.report.json").read_text())
    assert stored["documents"] == report.documents == 5
    assert stored["tokens"] == IndexedDataset(prefix).num_tokens
    assert [entry["documents"] for entry in stored["inputs"]] == [4, 1]
    assert (stored["eod_id"], stored["vocab_size"]) == (0, 270)
    assert sorted(os.listdir(tmp_path / "out")) == ["x.bin", "x.idx", "x.report.json"]


def test_any_number_of_workers_writes_the_same_bytes(tmp_path, tokenizer):
    texts = [f"document {k} " + "the cat " * (k % 7) for k in range(5000)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for workers in (1, 2):
        preprocess([source], str(tmp_path / f"w{workers}"), Options(tokenizer, workers=workers))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"w1{ending}").read_bytes() == (tmp_path / f"w2{ending}").read_bytes()
    assert texts_of(tmp_path / "w2", tokenizer) == texts


def test_bad_records_fail_by_default_and_leave_nothing(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": 1}\n\n{"text": "\xff"}\nbroken\n{"text": ""}\n')
    options = Options(tokenizer=tokenizer)
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl:2: text_not_string.*a\.jsonl:5: invalid"):
            preprocess([str(path)], str(tmp_path / "x"), replace(options, workers=workers))
    with pytest.raises(DataError, match=r"3 of 6 records"):
        preprocess([str(path)], str(tmp_path / "x"), replace(options, max_bad_fraction=0.49))
    assert os.listdir(tmp_path) == ["a.jsonl"]
    report = preprocess([str(path)], str(tmp_path / "x"), replace(options, max_bad_fraction=0.5))
    assert texts_of(tmp_path / "x", tokenizer) == ["good", "\ufffd"]
    assert report.kinds == {
        "text_not_string": 1,
        "empty": 2,
        "invalid_utf8": 1,
        "invalid_json": 1,
    }
    listed = json.loads((tmp_path / "x.report.json").read_text())["listed"]
    assert [item["where"].rsplit(":")[-1] for item in listed] == ["2", "3", "4", "5", "6"]


def test_existing_output(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", ["the"])
    options = Options(tokenizer=tokenizer)
    preprocess([source], str(tmp_path / "x"), options)
    before = (tmp_path / "x.bin").read_bytes()
    write_jsonl(tmp_path / "a.jsonl", ["the cat sat"])
    with pytest.raises(DataError, match="exist"):
        preprocess([source], str(tmp_path / "x"), options)
    assert (tmp_path / "x.bin").read_bytes() == before
    preprocess([source], str(tmp_path / "x"), replace(options, overwrite=True))
    assert texts_of(tmp_path / "x", tokenizer) == ["the cat sat"]


def test_split_lines_gzip_and_folders(tmp_path, tokenizer):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_bytes(b"one\r\ntwo\n\nthree")
    (tmp_path / "in" / "deep" / "c.txt.gz").write_bytes(gzip.compress(b"four\n"))
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zero"}\n'))
    (tmp_path / "in" / "skip.bin").write_bytes(b"\xff")
    options = Options(tokenizer, split_lines=True, pattern="*.txt*")
    report = preprocess([str(tmp_path / "in")], str(tmp_path / "x"), options)
    assert texts_of(tmp_path / "x", tokenizer) == ["one", "two", "three", "four"]
    assert report.kinds == {"empty": 1}
    preprocess([str(tmp_path / "in")], str(tmp_path / "y"), Options(tokenizer, pattern="*.gz"))
    assert texts_of(tmp_path / "y", tokenizer) == ["zero", "four\n"]


@pytest.mark.parametrize("cut", [3, 40])
def test_a_truncated_gzip_is_an_error_not_a_shorter_file(tmp_path, tokenizer, cut):
    content = gzip.compress(b'{"text": "good"}\n' * 50)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content[: len(content) - 5] if cut == 40 else content[:cut])
    options = Options(tokenizer, max_bad_fraction=1.0)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is truncated or damaged after \d+"):
        preprocess([str(path)], str(tmp_path / "x"), options)
    path.write_bytes(content[:30] + b"\x00\x00\x00" + content[33:])
    with pytest.raises(DataError, match="truncated or damaged"):
        preprocess([str(path)], str(tmp_path / "x"), options)
    assert os.listdir(tmp_path) == ["a.jsonl.gz"]


def test_unusable_inputs(tmp_path, tokenizer):
    options = Options(tokenizer=tokenizer)

    def fails(inputs, message, **changes):
        with pytest.raises(DataError, match=message):
            preprocess(inputs, str(tmp_path / "x"), replace(options, **changes))

    fails([str(tmp_path / "none.txt")], "does not exist")
    fails([], "no input file")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    fails([str(tmp_path / "empty.jsonl")], r"no document in .* 2 records")
    (tmp_path / "a.csv").write_text("text\n")
    fails([str(tmp_path / "a.csv")], "--format")
    (tmp_path / "folder").mkdir()
    fails([str(tmp_path / "folder")], "no file that matches")
    fails([str(tmp_path / "empty.jsonl")], "workers", workers=0)
    fails([str(tmp_path / "empty.jsonl")], "max-bad-fraction", max_bad_fraction=2.0)
    assert preprocess(
        [str(tmp_path / "a.csv")], str(tmp_path / "x"), replace(options, format="text")
    ).documents


def die(item):
    if item == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def fail(item):
    if item == 3:
        raise RuntimeError("no such thing")
    return item * 2


def linger(item):
    time.sleep(0.02 if item % 2 else 0)
    return os.getpid(), item


def test_a_killed_worker_is_named_and_nothing_hangs():
    began = time.monotonic()
    results = []
    with pytest.raises(DataError, match=r"process \d+ was killed by SIGKILL.*line \d+ to line \d"):
        for result in ordered_map(die, range(50), workers=2, describe=lambda k: f"line {k}"):
            results.append(result)
    assert results == list(range(len(results)))
    assert len(results) <= 7
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_worker_names_its_batch(workers):
    with pytest.raises(DataError, match="item 3: RuntimeError: no such thing"):
        list(ordered_map(fail, range(9), workers=workers, describe=lambda k: f"item {k}"))


def test_order_is_kept_and_both_workers_work():
    done = list(ordered_map(linger, range(40), workers=2, describe=str))
    assert [item for _, item in done] == list(range(40))
    assert os.getpid() not in {pid for pid, _ in done}


def test_items_are_read_only_a_little_ahead():
    read = []
    items = (read.append(k) or k for k in range(1000))
    results = ordered_map(linger, items, workers=2, describe=str)
    next(results)
    assert len(read) <= 8
    results.close()
