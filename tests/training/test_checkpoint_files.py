"""Checkpoint folders are complete or not there, whenever the process that writes them is killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_engine.errors import CheckpointError
from ds_engine.training.checkpoint import files

KILLED = 9


def save(root: Path, step: int, text: str, keep_last: int | None = None) -> None:
    """What ``Checkpointer.save`` does, with text files for tensors."""
    folder = files.prepare(root, step)
    entries = {}
    for name in ("model.safetensors", "state.json"):
        files.write_file(folder / name, f"{name} {text}".encode() * 20)
        entries[name] = files.describe_file(folder / name)
    files.commit(root, step, entries)
    files.keep_newest(root, keep_last, saved=step)


def text_of(path: Path) -> str:
    return (path / "state.json").read_text()[:16].removeprefix("state.json ")[:3]


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def _counted(after: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap file-system calls so that the process ends before call number ``after``."""
    calls = iter(range(10**9))

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == after:
                os._exit(KILLED)
            return function(*args, **kwargs)

        return call

    return wrap


def _torn_write(path: Path, data: bytes) -> None:
    """The page cache may hold any part of what was written when the machine stops."""
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        os.fsync(file.fileno())
        file.write(data[len(data) // 2 :])
        file.flush()
        os.fsync(file.fileno())


def killed_saves(
    root: Path, prepare: Callable[[], None], work: Callable[[], None]
) -> Iterator[int]:
    """Run ``work`` in a child that dies before its 1st, 2nd, ... file-system call."""
    for after in range(200):
        shutil.rmtree(root, ignore_errors=True)
        prepare()
        child = os.fork()
        if child == 0:
            try:
                wrap = _counted(after)
                files.write_file = _torn_write
                os.fsync, os.unlink, os.rmdir = wrap(os.fsync), wrap(os.unlink), wrap(os.rmdir)
                os.mkdir, os.rename = wrap(os.mkdir), wrap(os.rename)
                work()
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            assert after > 5, "the calls are not counted"
            return
        assert code == KILLED
        yield after


def test_kill_during_a_new_checkpoint_leaves_the_old_one(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    found = []
    for _ in killed_saves(root, lambda: save(root, 1, "old"), lambda: save(root, 2, "new")):
        path, problems = files.newest_complete(root)
        assert path is not None
        assert not problems, "an incomplete checkpoint was visible"
        found.append((path.name, text_of(path)))
        assert files.checkpoints(root)[-1].name == "step_00000001"
        if (root / "latest").exists():
            assert (root / (root / "latest").read_text().strip()).is_dir()
        save(root, 3, "aft")
        assert [n for n in names(root) if n.startswith(".step")] == []
        assert text_of(files.newest_complete(root)[0]) == "aft"
    assert set(found) == {("step_00000001", "old"), ("step_00000002", "new")}


def test_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    found = set()
    for _ in killed_saves(root, lambda: save(root, 2, "old"), lambda: save(root, 2, "new")):
        files.recover(root)
        path, problems = files.newest_complete(root)
        assert path is not None
        assert not problems
        found.add(text_of(path))
        assert [n for n in names(root) if n.startswith(".step")] == []
    assert found == {"old", "new"}


def test_kill_during_retention_leaves_whole_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"

    def prepare() -> None:
        for step in (1, 2, 3):
            save(root, step, "old")

    for _ in killed_saves(root, prepare, lambda: files.keep_newest(root, 1, saved=3)):
        for path in files.checkpoints(root):
            files.verify(path)
        assert files.newest_complete(root)[0].name == "step_00000003"


def damage(path: Path, how: str) -> None:
    model, manifest = path / "model.safetensors", path / "manifest.json"
    data = bytearray(model.read_bytes())
    if how == "torn":
        model.write_bytes(data[:-7])
    elif how == "flipped bit":
        data[11] ^= 1
        model.write_bytes(data)
    elif how == "missing file":
        model.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_bytes(manifest.read_bytes()[:50])
    elif how == "not UTF-8":
        manifest.write_bytes(b"\xff\xfe\x00")
    elif how == "another JSON":
        manifest.write_text("[1, 2]")
    elif how == "no sizes":
        manifest.write_text('{"format": 1, "step": 2, "files": {"model.safetensors": {}}}')
    elif how == "newer format":
        manifest.write_text(json.dumps({"format": 99, "step": 2, "files": {}}))
    elif how == "wrong name":
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 7'))
    elif how == "a folder":
        model.unlink()
        model.mkdir()


DAMAGES = {
    "torn": "bytes, its manifest says",
    "flipped bit": "model.safetensors has changed: SHA-256",
    "missing file": "model.safetensors is missing",
    "no manifest": "manifest.json is missing",
    "half a manifest": "manifest.json is damaged",
    "not UTF-8": "manifest.json is damaged",
    "another JSON": "manifest.json is damaged",
    "no sizes": "manifest.json is damaged",
    "newer format": "has format 99, this version reads 1",
    "wrong name": "holds the checkpoint of step 7",
    "a folder": "model.safetensors is missing",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named_and_the_older_checkpoint_is_used(tmp_path: Path, how: str) -> None:
    save(tmp_path, 1, "old")
    save(tmp_path, 2, "new")
    damage(tmp_path / "step_00000002", how)
    with pytest.raises(CheckpointError, match=DAMAGES[how]):
        files.verify(tmp_path / "step_00000002")
    path, problems = files.newest_complete(tmp_path)
    assert path == tmp_path / "step_00000001"
    assert len(problems) == 1
    assert problems[0].startswith("step_00000002 is not usable: ")


def test_unreadable_file_is_damage_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, "old")
    save(tmp_path, 2, "new")
    whole = Path.open

    def fails(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parent.name == "step_00000002" and path.suffix == ".safetensors":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fails)
    path, problems = files.newest_complete(tmp_path)
    assert path == tmp_path / "step_00000001"
    assert "Input/output error" in problems[0]


def test_nothing_usable(tmp_path: Path) -> None:
    assert files.newest_complete(tmp_path / "absent") == (None, [])
    assert files.newest_complete(tmp_path) == (None, [])
    save(tmp_path, 2, "new")
    damage(tmp_path / "step_00000002", "torn")
    path, problems = files.newest_complete(tmp_path)
    assert path is None
    assert len(problems) == 1


def test_latest_names_the_last_saved_one(tmp_path: Path) -> None:
    for step in (3, 20, 7):
        save(tmp_path, step, "any")
        assert (tmp_path / "latest").read_text() == f"step_{step:08d}\n"


def test_order_is_by_number_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    for step in (2, 10, 100_000_000):
        save(tmp_path, step, "any")
    for other in ("step_00000010 good copy", "step_best", "old"):
        (tmp_path / other).mkdir()
    (tmp_path / "step_00000099").write_text("a file")
    assert [files.step_of(p) for p in files.checkpoints(tmp_path)] == [100_000_000, 10, 2]
    save(tmp_path, 100_000_001, "any", keep_last=1)
    assert [files.step_of(p) for p in files.checkpoints(tmp_path)] == [100_000_001]
    assert {"step_00000010 good copy", "step_best", "old"} <= set(names(tmp_path))


@pytest.mark.parametrize("name", ["step_x", "step_", "latest", "step_-1"])
def test_a_folder_of_another_name_is_no_checkpoint(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        files.step_of(Path(name))


def test_a_copy_under_another_name_can_be_used(tmp_path: Path) -> None:
    save(tmp_path, 2, "new")
    files.verify((tmp_path / "step_00000002").rename(tmp_path / "best"))


@pytest.mark.parametrize(("keep", "left"), [(None, [4, 3, 2, 1]), (3, [4, 3, 2]), (1, [4])])
def test_retention(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    # A path that ends in a slash made another engine keep everything.
    root = Path(f"{tmp_path}/")
    for step in (1, 2, 3, 4):
        save(root, step, "any", keep)
    assert [files.step_of(p) for p in files.checkpoints(root)] == left


def test_retention_never_prefers_a_damaged_later_checkpoint(tmp_path: Path) -> None:
    """Step 9 is damaged, the run goes on from 3 and saves 4: neither 4 nor all of 3 may go."""
    for step in (2, 3, 9):
        save(tmp_path, step, "any")
    damage(tmp_path / "step_00000009", "flipped bit")
    assert files.newest_complete(tmp_path)[0].name == "step_00000003"
    save(tmp_path, 4, "any", keep_last=1)
    path, problems = files.newest_complete(tmp_path)
    assert path is not None
    assert path.name == "step_00000004"
    assert len(problems) == 1
    save(tmp_path, 9, "new", keep_last=1)
    assert files.newest_complete(tmp_path) == (tmp_path / "step_00000009", [])
    assert [p.name for p in files.checkpoints(tmp_path)] == ["step_00000009"]
