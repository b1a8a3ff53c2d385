"""What a run read, dropped and repaired: kept as JSON beside its output."""

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_engine.errors import DataError
from preprocessing.document import RULES, Problem

_LISTED = 10_000  # problems listed one by one; all are counted
_NAMED = 5  # offenders in an error message


@dataclass(slots=True)
class Report:
    """Counts of a run so far.

    Attributes:
        records: records read, good and bad.
        bad: records that lost something: dropped or repaired, but not the empty ones.
        documents: documents kept.
        sequences: their sequences: sentences or fields, or one a document.
        tokens: their tokens, end-of-document ids included.
        unknown_tokens: tokens that stand for text the tokenizer cannot express.
        kinds: problems by kind.
        problems: the first of them.
        by_input: (documents, tokens) of each input argument.
        settings: what else the reader should know (tokenizer, vocabulary, output).
    """

    records: int = 0
    bad: int = 0
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    by_input: dict[str, tuple[int, int]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def add_problems(self, problems: Iterable[Problem]) -> None:
        """Count problems; list them as long as there is room."""
        for problem in problems:
            self.kinds[problem.kind] += 1
            if len(self.problems) < _LISTED:
                self.problems.append(problem)

    def check(self, max_bad_fraction: float) -> None:
        """Refuse more bad records than allowed.

        Raises:
            DataError: names the first offenders.
        """
        if not self.records or self.bad / self.records <= max_bad_fraction:
            return
        bad = [problem for problem in self.problems if problem.is_bad]
        more = f" (the first {_NAMED})" if len(bad) > _NAMED else ""
        listed = "; ".join(map(str, bad[:_NAMED]))
        raise DataError(
            f"{self.bad} of {self.records} records read are bad, {self.bad / self.records:.3%}, "
            f"above --max-bad-fraction {max_bad_fraction:g}; nothing was written{more}: {listed}. "
            "Mend the input, or allow this share"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            **self.settings,
            "records": self.records,
            "documents": self.documents,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "unknown_tokens": self.unknown_tokens,
            "bad_records": self.bad,
            "inputs": [
                {"path": path, "documents": documents, "tokens": tokens}
                for path, (documents, tokens) in self.by_input.items()
            ],
            "problems": {
                kind: {"count": self.kinds[kind], "rule": rule} for kind, rule in RULES.items()
            },
            "listed": [
                {"kind": item.kind, "where": item.where, "detail": item.detail}
                for item in self.problems
            ],
            "not_listed": self.kinds.total() - len(self.problems),
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON; it appears under its name when it is complete."""
        write_text(path, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file that appears under its name only when it is complete.

    Raises:
        DataError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
