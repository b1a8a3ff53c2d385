"""Folders of checkpoints that are either complete or not there.

A checkpoint is written to a hidden temporary folder, every file is synced, a manifest with size and
SHA-256 of each is written last, and one rename makes it visible; ``latest`` is replaced by rename
after that. A kill at any moment leaves the earlier checkpoints and, at worst, a temporary folder
that the next save removes. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ds_engine.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
PREFIX = "step_"
NAME = re.compile(rf"{PREFIX}\d+")
FORMAT = 1
BLOCK = 1 << 22


def folder_name(step: int) -> str:
    """``step_00000100`` for step 100."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Step number in a folder's name.

    Raises:
        CheckpointError: it is not the name of a checkpoint.
    """
    digits = path.name.removeprefix(PREFIX)
    if not path.name.startswith(PREFIX) or not digits.isdigit():
        raise CheckpointError(f"{path} is not a checkpoint; they are called {PREFIX}NNNNNNNN")
    return int(digits)


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a file whose folder is not visible yet."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """``write_file`` of indented JSON."""
    write_file(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file that was just written; it is synced on the way."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return {"size": path.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


def temporary_folder(root: Path, step: int) -> Path:
    """Where a checkpoint of ``step`` is written before it is complete."""
    return root / f".{folder_name(step)}.tmp"


def commit(root: Path, step: int, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Turn a written temporary folder into a checkpoint; one process calls this.

    Args:
        root: folder of all checkpoints.
        step: of the checkpoint.
        files: name -> ``describe_file`` of everything that all ranks wrote.
    """
    temporary, final = temporary_folder(root, step), root / folder_name(step)
    manifest = {"format": FORMAT, "step": step, "files": {k: dict(v) for k, v in files.items()}}
    write_json(temporary / MANIFEST, manifest)
    sync_folder(temporary)
    if final.exists():  # saved before, after a rewind: the old one goes only when the new is whole
        old = root / f".{folder_name(step)}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        temporary.rename(final)
        sync_folder(root)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)
        sync_folder(root)
    pointer = root / f".{LATEST}.tmp"
    write_file(pointer, (final.name + "\n").encode())
    pointer.rename(root / LATEST)
    sync_folder(root)
    return final


def read_json(path: Path) -> Any:
    """Parse a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is missing or not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def verify(path: Path, *, hashes: bool = True, only: Sequence[str] | None = None) -> None:
    """Hold a checkpoint against its manifest.

    Args:
        path: folder of the checkpoint.
        hashes: read the files; else names and sizes only.
        only: names of the files to look at, those that the manifest does not list left out.

    Raises:
        CheckpointError: naming the file that is missing, short, changed or cannot be read.
    """
    expected = _read_manifest(path)
    try:
        for name, (size, sha256) in expected.items():
            if only is not None and name not in only:
                continue
            _verify_file(path / name, size, sha256, hashes=hashes)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error}") from error


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """File name -> (size, SHA-256)."""
    manifest = read_json(path / MANIFEST)
    try:
        found, step = manifest["format"], manifest["step"]
        expected = {k: (v["size"], v["sha256"]) for k, v in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: it is no manifest") from error
    if found != FORMAT:
        raise CheckpointError(f"{path} has format {found}, this version reads {FORMAT}")
    # A copy under another kind of name is welcome; one that claims another step would lie.
    if NAME.fullmatch(path.name) and step != step_of(path):
        raise CheckpointError(
            f"{path} holds the checkpoint of step {step}; rename the folder to {folder_name(step)}"
        )
    return expected


def _verify_file(file: Path, size: int, sha256: str, *, hashes: bool) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    actual = file.stat().st_size
    if actual != size:
        raise CheckpointError(f"{file} has {actual} bytes, its manifest says {size}")
    if not hashes:
        return
    with file.open("rb") as opened:
        found = _sha256(opened)
    if found != sha256:
        raise CheckpointError(
            f"{file} has changed: SHA-256 {found[:12]}…, its manifest says {str(sha256)[:12]}…"
        )


def checkpoints(root: Path) -> list[Path]:
    """All visible checkpoints, newest first, complete or not."""
    if not root.is_dir():
        return []
    # Whatever else a user keeps here ("step_00000100 good copy") is not ours.
    found = (p for p in root.iterdir() if p.is_dir() and NAME.fullmatch(p.name))
    return sorted(found, key=step_of, reverse=True)


def newest_complete(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that matches its manifest, and what was wrong with newer ones."""
    problems = []
    for path in checkpoints(root):
        try:
            verify(path)
        except CheckpointError as error:
            problems.append(f"{path.name} is not usable: {error}")
        else:
            return path, problems
    return None, problems


def find(path: Path, *, only: Sequence[str] | None = None) -> Path:
    """The complete checkpoint that a user means by a folder.

    Args:
        path: a run folder (its newest complete checkpoint is taken) or a checkpoint folder.
        only: see ``verify``.

    Raises:
        CheckpointError: there is no usable checkpoint.
    """
    if (path / MANIFEST).is_file():
        verify(path, only=only)
        return path
    newest, problems = newest_complete(path / "checkpoints")
    if newest is None:
        found = "".join(f"; {problem}" for problem in problems)
        raise CheckpointError(
            f"{path} has no usable checkpoint{found}; give a run folder (the run's "
            "checkpoint.directory) or one of its checkpoints/step_NNNNNNNN"
        )
    return newest


def _leftovers(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        if path.name.startswith(f".{PREFIX}") and path.suffix in (".tmp", ".old"):
            yield path


def recover(root: Path) -> None:
    """Tidy up after a killed save: hidden folders go, an old checkpoint without a new one returns.

    One process calls this, and only the one that saves: another's save may be under way.
    """
    if not root.is_dir():
        return
    for path in list(_leftovers(root)):
        # A kill between the two renames of a replaced checkpoint: the old one is still whole.
        final = root / path.name.removeprefix(".").removesuffix(path.suffix)
        if path.suffix == ".old" and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)


def prepare(root: Path, step: int) -> Path:
    """Make an empty temporary folder for ``step``, removing what a killed save left behind."""
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    temporary = temporary_folder(root, step)
    temporary.mkdir()
    return temporary


def keep_newest(root: Path, count: int | None, *, saved: int) -> None:
    """Delete all but the ``count`` newest undamaged checkpoints (None keeps all).

    Args:
        root: folder of all checkpoints.
        count: of checkpoints to keep.
        saved: step of the checkpoint that was just saved. Later ones were unusable when the run
            went back before them; they must not push a good one out, and are left to be replaced.
    """
    if count is None:
        return
    kept = 0
    for path in [p for p in checkpoints(root) if step_of(p) <= saved]:
        if kept < count:
            kept += _has_all_bytes(path)
            continue
        # Hidden first: a kill in the middle must not leave half a checkpoint under its name.
        # An old checkpoint that cannot be removed is no reason to end a run that was just saved.
        doomed = root / f".{path.name}.tmp"
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _has_all_bytes(path: Path) -> bool:
    try:
        verify(path, hashes=False)
    except CheckpointError:
        return False
    return True
