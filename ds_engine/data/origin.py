"""What the report beside a data set says of its sequences: texts, fields of records, or classes.

``ds-engine preprocess`` writes ``PREFIX.report.json`` beside the pair. The pair alone does not tell
a class, a sequence of one id, from a text, and a model would be trained on its number as a word.
Data without a report, made by others, is taken for what it is used as.
"""

import json
from pathlib import Path

from ds_engine.data.indexed import IndexedDataset
from ds_engine.errors import DataError


def refuse_classes(data: IndexedDataset) -> None:
    """Refuse data for an objective that reads every sequence as text.

    Raises:
        DataError: the last sequence of each document is the number of a class.
    """
    label = _report(data).get("label")
    if label is not None:
        raise DataError(
            f"{data.prefix} was written with --label {label}: the last sequence of each document "
            'is the number of a class and no text; set data.objective.type to "classification" '
            "(family bert), or write the data again without --label"
        )


def refuse_records(data: IndexedDataset) -> None:
    """Refuse data for an objective that reads documents as running text.

    Raises:
        DataError: the documents are records of several fields.
    """
    refuse_classes(data)
    fields = _fields(data)
    if fields:
        raise DataError(
            f"{data.prefix} was written with --fields {fields}: its documents are records and no "
            'running text; set data.objective.type to "text_to_text" (family t5), or write the '
            "data again without --fields"
        )


def refuse_fields(data: IndexedDataset) -> None:
    """Refuse data for an objective that reads the sequences of a document as its sentences.

    Raises:
        DataError: they are fields of a record.
    """
    refuse_classes(data)
    fields = _fields(data)
    if fields:
        raise DataError(
            f"{data.prefix} was written with --fields {fields}, and fields are "
            "no sentences; write the data with ds-engine preprocess --split-sentences, or set "
            'data.objective.sentence to "none"'
        )


def _fields(data: IndexedDataset) -> str:
    """The names of the fields, separated by commas; empty for text."""
    fields = _report(data).get("fields")
    return ",".join(map(str, fields)) if isinstance(fields, list) else ""


def _report(data: IndexedDataset) -> dict[str, object]:
    """The report; empty where there is none of ours."""
    try:
        found = json.loads(Path(f"{data.prefix}.report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
