"""The reference of all keys, taken from the docstrings of the configuration classes."""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_engine.config.reader import describe, field_types, join_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_ENTRY = re.compile(r"^ {4}(\w+): (.*)$")


@dataclass(frozen=True)
class KeyReference:
    """One key of the configuration.

    Attributes:
        path: Dotted path.
        kind: Kind and limits of its value, in words.
        default: Default as JSON, "required", or "" for an object with keys of its own.
        text: What it means.
        owners: Model families that have it, where not all do or it differs; empty: all.
    """

    path: str
    kind: str
    default: str
    text: str
    owners: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path, and its owners where that matters: "`model.norm_first` (bert)"."""
        return f"`{self.path}`" + (f" ({', '.join(self.owners)})" if self.owners else "")


def reference(cls: "type[DataclassInstance]", where: str = "") -> list[KeyReference]:
    """All keys below a configuration class, in the order of its fields."""
    rows = []
    texts, hints = attribute_texts(cls), field_types(cls)
    for field in dataclasses.fields(cls):
        path, hint = join_path(where, field.name), hints[field.name]
        inner = _inner_dataclass(hint)
        row = KeyReference(path, describe(hint), _default(field, inner), texts[field.name])
        rows.append(row)
        if inner is not None:
            index = ".0" if typing.get_origin(hint) is tuple else ""
            rows += reference(inner, path + index)
    return rows


def merge(references: Mapping[str, list[KeyReference]]) -> list[KeyReference]:
    """The keys of several classes that stand in one place, such as the model families.

    What is the same for all is one row; what differs, or not all have, says whose it is. Rows of
    one path stand together.

    Args:
        references: The keys of each class by its name.
    """
    owners: dict[str, dict[KeyReference, list[str]]] = {}
    for owner, rows in references.items():
        for row in rows:
            owners.setdefault(row.path, {}).setdefault(row, []).append(owner)
    return [
        row if len(names) == len(references) else dataclasses.replace(row, owners=tuple(names))
        for variants in owners.values()
        for row, names in variants.items()
    ]


def markdown(rows: list[KeyReference]) -> str:
    """The rows as a Markdown table."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.kind} | {row.default} | {row.text} |" for row in rows]
    return "\n".join(lines)


def attribute_texts(cls: type[Any]) -> dict[str, str]:
    """The text of each field in the ``Attributes`` section of a class's docstring."""
    _, _, section = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if entry := _ENTRY.match(line):
            name, texts[name] = entry[1], entry[2]
        elif name and line.startswith(" " * 8):
            texts[name] += " " + line.strip()
    return texts


def _inner_dataclass(hint: Any) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    found = (_inner_dataclass(argument) for argument in typing.get_args(hint))
    return next((inner for inner in found if inner is not None), None)


def _default(field: "dataclasses.Field[Any]", inner: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return "" if inner is not None else json.dumps(field.default_factory())
    return "required"
