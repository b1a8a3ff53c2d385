"""A document, and what may be wrong with the bytes that should hold one.

The rules, which every source shares:

==================  ========  =====================================================================
kind                what      rule
==================  ========  =====================================================================
invalid_json        dropped   the line is not JSON
not_an_object       dropped   the line is JSON but not an object
missing_text        dropped   the object has no text key, or lacks one of the fields asked for
text_not_string     dropped   the text is not a string
label_not_class     dropped   the label is not an integer, true, false or a string of some letters
invalid_utf8        repaired  each ill-formed sequence of bytes becomes one U+FFFD
lone_surrogate      repaired  each half of a surrogate pair (``\\ud83d`` without its partner)
                              becomes U+FFFD
empty               dropped   no text, a blank line, or text of which the tokenizer leaves nothing
                              (of a record's fields: any but the second text of a classification)
==================  ========  =====================================================================

All are counted and listed with file and line. All but ``empty`` are *bad*: they lose something, so
``--max-bad-fraction`` limits them. A byte order mark at the start of a file is not text and is
removed.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["jsonl", "text"]

RULES = {
    "invalid_json": "dropped",
    "not_an_object": "dropped",
    "missing_text": "dropped",
    "text_not_string": "dropped",
    "label_not_class": "dropped",
    "invalid_utf8": "repaired",
    "lone_surrogate": "repaired",
    "empty": "dropped",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Record:
    """The bytes of one document as a source found them.

    Attributes:
        data: a JSON line or the text itself.
        path: file.
        line: 1-based line; 0 if the whole file is one document.
        format: how to read ``data``.
        argument: number of the input argument the file belongs to.
    """

    data: bytes
    path: str
    line: int
    format: Format
    argument: int = 0

    @property
    def where(self) -> str:
        """``file:line``, or the file."""
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True, slots=True)
class Document:
    """Text that can be encoded as UTF-8, and where it came from."""

    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one record; ``kind`` is a key of ``RULES``."""

    kind: str
    where: str
    detail: str

    @property
    def is_bad(self) -> bool:
        """Whether text was lost or altered."""
        return self.kind != "empty"

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} {RULES[self.kind]} ({self.detail})"


@dataclass(frozen=True, slots=True)
class Fields:
    """Which keys of a JSON object make an example.

    Attributes:
        names: keys, in the order of the example's parts.
        label: the last of ``names`` if it holds a class, else None.
    """

    names: tuple[str, ...]
    label: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The keys that hold text."""
        return tuple(name for name in self.names if name != self.label)

    def may_be_empty(self, number: int) -> bool:
        """Whether the example still says something without text ``number``."""
        return self.label is not None and number > 0


Label = str | int | bool


@dataclass(frozen=True, slots=True)
class Example:
    """The parts of one record.

    Attributes:
        texts: the text of each key of ``Fields.texts``.
        label: value of the class, None if the fields have no label.
        where: where it came from.
    """

    texts: tuple[str, ...]
    label: Label | None
    where: str


def read_document(record: Record, text_key: str) -> tuple[Document | None, list[Problem]]:
    """Return the document of ``record``, or None if it is dropped, and what was wrong with it."""
    text, problems = _decode(record)
    if record.format == "jsonl" and text.strip():
        value = _object(text, record.where)
        found = _text(value, text_key, record.where) if isinstance(value, dict) else value
        if isinstance(found, Problem):
            return None, [*problems, found]
        text = found
    elif record.format == "jsonl":
        return None, [*problems, _blank(text, record.where)]
    text = _without_surrogates(text, record.where, problems)
    if not text:
        return None, [*problems, Problem("empty", record.where, "no text")]
    return Document(text, record.where), problems


def read_example(record: Record, fields: Fields) -> tuple[Example | None, list[Problem]]:
    """Return the example of a JSON line, or None if it is dropped, and what was wrong with it."""
    where = record.where
    line, problems = _decode(record)
    if not line.strip():
        return None, [*problems, _blank(line, where)]
    value = _object(line, where)
    if isinstance(value, Problem):
        return None, [*problems, value]
    texts: list[str] = []
    for number, name in enumerate(fields.texts):
        found = _text(value, name, where)
        if isinstance(found, Problem):
            return None, [*problems, found]
        text = _without_surrogates(found, where, problems)
        if not text and not fields.may_be_empty(number):
            return None, [*problems, Problem("empty", where, f"{name!r} has no text")]
        texts.append(text)
    label: Label | None = None
    if fields.label is not None:
        if fields.label not in value:
            return None, [*problems, _missing(value, fields.label, where)]
        label = value[fields.label]
        if not isinstance(label, str | int):  # true and false are integers to Python
            detail = f"{fields.label!r} is a {type(label).__name__}"
            return None, [*problems, Problem("label_not_class", where, detail)]
        if isinstance(label, str):
            label = _without_surrogates(label, where, problems)
            if not label:
                detail = f"{fields.label!r} is an empty string"
                return None, [*problems, Problem("label_not_class", where, detail)]
    return Example(tuple(texts), label, where), problems


def _decode(record: Record) -> tuple[str, list[Problem]]:
    data = record.data
    if record.line <= 1:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        return data.decode("utf-8"), []
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is 0x{data[error.start]:02x}: {error.reason}"
        problem = Problem("invalid_utf8", record.where, detail)
        return data.decode("utf-8", errors="replace"), [problem]


def _without_surrogates(text: str, where: str, problems: list[Problem]) -> str:
    text, count = _SURROGATE.subn("\ufffd", text)
    if count:
        problems.append(Problem("lone_surrogate", where, f"{count} of them"))
    return text


def _blank(line: str, where: str) -> Problem:
    return Problem("empty", where, "blank line" if line else "no text")


def _object(line: str, where: str) -> dict[str, Any] | Problem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of over 4300 digits
        return Problem("invalid_json", where, str(error) or type(error).__name__)
    if not isinstance(value, dict):
        return Problem("not_an_object", where, f"it is a {type(value).__name__}")
    return value


def _missing(value: dict[str, Any], key: str, where: str) -> Problem:
    keys = ", ".join(map(repr, list(value)[:8])) or "no key at all"
    return Problem("missing_text", where, f"no key {key!r}; it has {keys}")


def _text(value: dict[str, Any], key: str, where: str) -> str | Problem:
    if key not in value:
        return _missing(value, key, where)
    text = value[key]
    if not isinstance(text, str):
        return Problem("text_not_string", where, f"{key!r} is a {type(text).__name__}")
    return text
