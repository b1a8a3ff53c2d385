"""The proofs as tables at the end of a test run: what was compared, and the largest difference."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

LAYOUTS, TRANSFORMERS = "layout parity", "transformers parity"
TITLES = {
    LAYOUTS: "layouts against one process: largest difference of all gradients and weights",
    TRANSFORMERS: "models against transformers, fp32: largest difference",
}
# The test that runs now; set by a fixture of tests/conftest.py.
CURRENT: ContextVar[Any] = ContextVar("CURRENT")


def note(table: str, row: str, column: str, value: float) -> None:
    """Put a figure of the running test into a table."""
    CURRENT.get().user_properties.append((table, (row, column, value)))


def render(cells: Iterable[tuple[str, str, float]]) -> list[str]:
    """Rows x columns as lines; of several figures for one cell the largest."""
    found: dict[tuple[str, str], float] = {}
    for row, column, value in cells:
        found[row, column] = max(value, found.get((row, column), 0.0))
    rows = list(dict.fromkeys(row for row, _ in found))
    columns = list(dict.fromkeys(column for _, column in found))
    width = max(map(len, rows), default=0)
    sizes = [max(len(column), 7) for column in columns]
    head = "  ".join(column.rjust(size) for column, size in zip(columns, sizes, strict=True))
    lines = [f"{'':<{width}}  {head}"]
    for row in rows:
        values = [
            (f"{found[row, column]:.1e}" if (row, column) in found else "-").rjust(size)
            for column, size in zip(columns, sizes, strict=True)
        ]
        lines.append(f"{row:<{width}}  {'  '.join(values)}")
    return lines
