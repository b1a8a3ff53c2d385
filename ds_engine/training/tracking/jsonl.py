"""The log file of a run: one JSON object a line, appended and flushed, readable while the run
lives.

Each session begins with a header ``{"run_id": ..., "first_step": k, "time": ...}``. A run that
crashed at step 130 and resumes from a checkpoint at step 100 writes a header with ``first_step``
100 and then the rows from 101 on again. Nothing is ever removed from the file; ``read_log`` leaves
out what was overwritten. JSON knows no NaN and no infinity: such a value is written as null and
named in the row's "nonfinite" list.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ds_engine.errors import DataError

_RESERVED: Final = frozenset({"step", "time", "nonfinite", "run_id", "first_step", "summary"})


class JsonlTracker:
    """Appends rows to a log file.

    Args:
        path: the file; its folder must exist.
        run_id: the id of the run, kept over restarts.
        first_step: completed optimizer steps when this session begins.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        first_step: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        torn = _lacks_newline(path)
        self._stream = path.open("a", encoding="utf-8")
        if torn:  # a crash cut the last line; do not glue the header to what is left of it
            self._stream.write("\n")
        self._write({"run_id": run_id, "first_step": first_step, "time": self._clock()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row.

        Raises:
            ValueError: a metric has the name of one of the row's own fields.
            OSError: the disk is full or gone.
        """
        taken = sorted(_RESERVED.intersection(metrics))
        if taken:
            raise ValueError(f'"{taken[0]}" names a field of the row; call the metric otherwise')
        self._write({"step": int(step), "time": self._clock(), **_as_json(metrics)})

    def summary(self, values: Mapping[str, float]) -> None:
        """Append a row ``{"summary": {...}}``."""
        self._write({"summary": _as_json(values), "time": self._clock()})

    def close(self, exit_code: int) -> None:
        """Close the file."""
        del exit_code
        self._stream.close()

    def _write(self, row: dict[str, Any]) -> None:
        if self._stream.closed:
            return
        self._stream.write(json.dumps(row, allow_nan=False) + "\n")
        self._stream.flush()


def _lacks_newline(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            if stream.seek(0, 2) == 0:
                return False
            stream.seek(-1, 2)
            return stream.read(1) != b"\n"
    except FileNotFoundError:
        return False


def _as_json(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return plain numbers, with null for what JSON cannot express and its name in "nonfinite"."""
    row: dict[str, Any] = {}
    nonfinite = []
    for name, value in metrics.items():
        number = value if type(value) is int else float(value)
        if math.isfinite(number):
            row[name] = number
        else:
            row[name] = None
            nonfinite.append(name)
    if nonfinite:
        row["nonfinite"] = nonfinite
    return row


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log file as the run stands now: one row a step, in order.

    Rows of one step are merged (training and validation metrics are logged apart), the later value
    of a name wins. Rows that a later session overwrote, because it resumed from an earlier step,
    are left out. A torn line, at the end of the file or before a restart, is skipped.

    Raises:
        DataError: the file is missing, or a line elsewhere is not JSON; the message names the line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; name a run's log.jsonl"
        ) from error
    rows: dict[int, dict[str, Any]] = {}
    torn = 0  # number of the first line since the last header that could not be read
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            torn = torn or number
        elif "run_id" in row:
            first_step = int(row["first_step"])
            rows = {step: kept for step, kept in rows.items() if step <= first_step}
            torn = 0
        elif torn:
            raise DataError(
                f"{path}, line {torn}: not a JSON object, and neither the last line nor one "
                "before a restart; the file was changed after it was written: restore it, or "
                "delete that line"
            )
        elif "step" in row:
            _merge(rows.setdefault(int(row["step"]), {}), row)
    return [rows[step] for step in sorted(rows)]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # also a cut UTF-8 character
        return None
    return row if isinstance(row, dict) else None


def _merge(row: dict[str, Any], later: dict[str, Any]) -> None:
    """Update ``row``; a name stays in "nonfinite" only while its value is null."""
    names = [*row.get("nonfinite", ()), *later.get("nonfinite", ())]
    row.update(later)
    kept = [name for name in dict.fromkeys(names) if row.get(name) is None]
    row.pop("nonfinite", None)
    if kept:
        row["nonfinite"] = kept
