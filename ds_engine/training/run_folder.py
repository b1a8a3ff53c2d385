"""The folder of one run: the name of everything in it, and JSON writes that survive a crash.

::

    <checkpoint.directory>/
      run.json                     {"run_id": ...}: made once, kept for the life of the run
      config.json                  the resolved run config
      log.jsonl                    one row a logged step
      tokenizer/                   the files of the run's tokenizer
      curves/*.png                 figures of ``ds-engine plot``
      wandb/                       wandb's own files
      checkpoints/step_00000100/   one folder a checkpoint

Only rank 0 creates anything here.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_engine.errors import LaunchError


def write_json(path: Path, value: object) -> None:
    """Write ``value`` to ``path`` so that a reader sees the old file or the new one, never a part.

    The temporary file is flushed to the disk before the rename, and the folder after it.

    Raises:
        OSError: the folder is missing, full or not writable.
        ValueError: ``value`` holds a number that JSON cannot express (NaN, infinity).
    """
    _write_atomically(path, value, replace=True)


def _write_atomically(path: Path, value: object, *, replace: bool) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # unlike a rename, this fails when the name is taken
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class RunFolder:
    """The names inside the run folder ``path``; nothing is created before ``create``."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def config_path(self) -> Path:
        """The resolved run config."""
        return self.path / "config.json"

    @property
    def log_path(self) -> Path:
        """The metrics, one JSON row a line."""
        return self.path / "log.jsonl"

    @property
    def run_path(self) -> Path:
        """What identifies the run: ``{"run_id": ...}``."""
        return self.path / "run.json"

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer's files, so that the run can generate by itself."""
        return self.path / "tokenizer"

    @property
    def curves(self) -> Path:
        """The folder of the figures."""
        return self.path / "curves"

    @property
    def wandb(self) -> Path:
        """The folder that wandb makes for itself."""
        return self.path / "wandb"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` optimizer steps."""
        return self.checkpoints / f"step_{step:08d}"

    def create(self) -> "RunFolder":
        """Make the folder and the ones for checkpoints and curves; return self.

        Raises:
            LaunchError: a part of the path is a file, or cannot be written.
        """
        try:
            for folder in (self.path, self.checkpoints, self.curves):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f'checkpoint.directory = "{self.path}" cannot be created: {error.strerror} '
                f"({error.filename}); choose a folder that this user may write"
            ) from error
        return self

    def run_id(self) -> str:
        """Return the run's id, made on the first call and the same ever after.

        It is also wandb's run id, so that a restarted job continues the same wandb run. Two
        processes that ask at once agree on one id.

        Raises:
            LaunchError: ``run.json`` cannot be read or written.
        """
        if not self.run_path.exists():
            self.create()
            record = {"run_id": secrets.token_hex(6), "created": int(time.time())}
            # FileExistsError: another process was faster, its id is the run's id.
            try:
                with contextlib.suppress(FileExistsError):
                    _write_atomically(self.run_path, record, replace=False)
            except OSError as error:
                raise LaunchError(
                    f"{self.run_path} cannot be written: {error.strerror}; free the disk or choose "
                    "another checkpoint.directory"
                ) from error
        run_id = self._read(self.run_path).get("run_id")
        if not isinstance(run_id, str) or not run_id:
            raise LaunchError(
                f'{self.run_path} has no "run_id"; restore it, or delete it to start a new run id'
            )
        return run_id

    def keep_tokenizer(self, sources: Sequence[Path]) -> None:
        """Copy the files of the tokenizer, in place of those of an earlier start.

        Args:
            sources: all files that it takes to load the tokenizer; they are kept side by side.

        Raises:
            LaunchError: a file cannot be read or written; what was kept before is left as it was.
        """
        temporary = self.path / f".tokenizer.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            temporary.mkdir()
            for source in sources:
                shutil.copyfile(source, temporary / source.name)
            # A file of another kind of tokenizer, left over, might be taken for this one.
            if self.tokenizer.exists():
                shutil.rmtree(self.tokenizer)
            temporary.rename(self.tokenizer)
        except OSError as error:
            raise LaunchError(
                f"the tokenizer ({', '.join(map(str, sources))}) cannot be copied to "
                f"{self.tokenizer}: {error.strerror} ({error.filename}); make the files of "
                "data.tokenizer readable, and checkpoint.directory writable and not full"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def write_config(self, resolved: dict[str, Any]) -> None:
        """Store the resolved run config."""
        write_json(self.config_path, resolved)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise LaunchError(f"{path} does not exist; is {self.path} a run folder?") from error
        except (OSError, ValueError) as error:
            raise LaunchError(f"{path} cannot be read: {error}; restore it from a copy") from error
        if not isinstance(value, dict):
            raise LaunchError(f"{path} holds no JSON object; restore it from a copy")
        return value
