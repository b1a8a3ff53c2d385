import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_engine.errors import LaunchError
from ds_engine.training.run_folder import RunFolder, write_json


def test_names(tmp_path):
    folder = RunFolder(tmp_path)
    names = [
        folder.config_path,
        folder.log_path,
        folder.run_path,
        folder.curves,
        folder.wandb,
        folder.checkpoint(100),
    ]
    assert [str(path.relative_to(tmp_path)) for path in names] == [
        "config.json",
        "log.jsonl",
        "run.json",
        "curves",
        "wandb",
        "checkpoints/step_00000100",
    ]


def test_a_trailing_slash_names_the_same_folder(tmp_path):
    assert RunFolder(Path(f"{tmp_path}/")) == RunFolder(tmp_path)


def test_create_may_be_repeated(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a").create().create()
    assert folder.checkpoints.is_dir()
    assert folder.curves.is_dir()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(LaunchError, match=r"checkpoint\.directory = .*runs/a.* cannot be created"):
        RunFolder(tmp_path / "runs" / "a").create()


def test_the_run_id_is_made_once(tmp_path):
    first = RunFolder(tmp_path / "a").run_id()
    assert RunFolder(tmp_path / "a").run_id() == first
    assert RunFolder(tmp_path / "b").run_id() != first
    assert json.loads((tmp_path / "a" / "run.json").read_text())["run_id"] == first


def test_processes_that_race_for_the_run_id_agree(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        ids = set(pool.map(lambda _: RunFolder(tmp_path / "a").run_id(), range(64)))
    assert len(ids) == 1
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "checkpoints",
        "curves",
        "run.json",
    ]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run_id": 3}'])
def test_a_damaged_run_file_is_not_replaced_by_a_new_id(tmp_path, content):
    folder = RunFolder(tmp_path)
    folder.run_path.write_text(content)
    with pytest.raises(LaunchError, match=r"run\.json.*restore"):
        folder.run_id()
    assert folder.run_path.read_text() == content


def test_write_json_replaces_the_whole_file_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"step": float("nan")})

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_the_config_comes_back(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({"seed": 1, "model": {"norm": {"epsilon": 1e-5}}})
    stored = json.loads(folder.config_path.read_text())
    assert stored == {"seed": 1, "model": {"norm": {"epsilon": 1e-5}}}


def kept(folder):
    return {path.name: path.read_text() for path in folder.tokenizer.iterdir()}


def test_the_tokenizers_files_replace_those_of_an_earlier_start(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    sources = [tmp_path / name for name in ("tokenizer.json", "a-vocab.json", "a-merges.txt")]
    for path in sources:
        path.write_text(path.name)
        path.chmod(0o444)
    folder.keep_tokenizer(sources[:1])
    assert kept(folder) == {"tokenizer.json": "tokenizer.json"}
    folder.keep_tokenizer(sources[1:])
    assert kept(folder) == {path.name: path.name for path in sources[1:]}
    folder.keep_tokenizer(sorted(folder.tokenizer.iterdir()))  # a run may name its own copy
    assert kept(folder) == {path.name: path.name for path in sources[1:]}


def test_a_tokenizer_that_cannot_be_copied_is_named_and_the_old_one_stays(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    (tmp_path / "a.json").write_text("old")
    folder.keep_tokenizer([tmp_path / "a.json"])
    (tmp_path / "a.json").write_text("new")
    with pytest.raises(
        LaunchError, match=r"gone\.txt\) cannot be copied to .*No such file.*readable"
    ):
        folder.keep_tokenizer([tmp_path / "a.json", tmp_path / "gone.txt"])
    assert kept(folder) == {"a.json": "old"}
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints",
        "curves",
        "tokenizer",
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"checkpoint\.directory writable"):
        RunFolder(tmp_path / "file").keep_tokenizer([tmp_path / "a.json"])
