import json

import pytest
from click.testing import CliRunner

from ds_engine.data.indexed import IndexedDataset
from ds_engine.errors import DataError
from launch.commands.preprocess import command, repeat_option
from launch.commands.tokenizer import command as tokenizer_command


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--input a b --o x", "--input a --input b --o x"),
        ("--input a --input b c", "--input a --input b --input c"),
        ("--input=a b --o", "--input=a --input b --o"),
        ("--o x --input a", "--o x --input a"),
        ("--input a b -- c", "--input a --input b -- c"),
        ("--input --o x", "--input --o x"),
    ],
)
def test_one_flag_takes_several_values(given, expected):
    assert repeat_option(given.split(), "--input") == expected.split()


def test_the_commands_as_documented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat on the mat"}\n{"text": ""}\n')
    (tmp_path / "b.txt").write_text("the dog sat on the cat")
    run = CliRunner().invoke
    train = "train --input a.jsonl b.txt --vocab-size 270 --output tokenizer.json"
    result = run(tokenizer_command, train.split(), catch_exceptions=False)
    assert result.exit_code == 0
    assert "tokenizer.json: 270 entries from 2 documents" in result.output
    arguments = "--input a.jsonl b.txt --tokenizer tokenizer.json --output out/x --workers 1"
    result = run(command, arguments.split(), catch_exceptions=False)
    assert result.exit_code == 0
    assert "2 documents" in result.output
    assert "empty" in result.output
    assert len(IndexedDataset("out/x")) == 2
    assert json.loads((tmp_path / "out/x.report.json").read_text())["problems"]["empty"] == {
        "count": 1,
        "rule": "dropped",
    }
    with pytest.raises(DataError, match="exist"):
        run(command, arguments.split(), catch_exceptions=False)
    assert run(command, ["--help"]).exit_code == 0
    assert run(command, ["--tokenizer", "t", "--output", "x"]).exit_code == 2
