"""A document, and what may be wrong with the bytes that should hold one.

The rules, which every source shares:

==================  ========  =====================================================================
kind                what      rule
==================  ========  =====================================================================
invalid_json        dropped   the line is not JSON
not_an_object       dropped   the line is JSON but not an object
missing_text        dropped   the object has no text key
text_not_string     dropped   the text is not a string
invalid_utf8        repaired  each ill-formed sequence of bytes becomes one U+FFFD
lone_surrogate      repaired  each half of a surrogate pair (``\\ud83d`` without its partner)
                              becomes U+FFFD
empty               dropped   no text, a blank line, or text of which the tokenizer leaves nothing
==================  ========  =====================================================================

All are counted and listed with file and line. All but ``empty`` are *bad*: they lose something, so
``--max-bad-fraction`` limits them. A byte order mark at the start of a file is not text and is
removed.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal

Format = Literal["jsonl", "text"]

RULES = {
    "invalid_json": "dropped",
    "not_an_object": "dropped",
    "missing_text": "dropped",
    "text_not_string": "dropped",
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


def read_document(record: Record, text_key: str) -> tuple[Document | None, list[Problem]]:
    """Return the document of ``record``, or None if it is dropped, and what was wrong with it."""
    data = record.data
    if record.line <= 1:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    problems: list[Problem] = []
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", errors="replace")
        detail = f"byte {error.start} is 0x{data[error.start]:02x}: {error.reason}"
        problems.append(Problem("invalid_utf8", record.where, detail))
    if record.format == "jsonl" and text.strip():
        found = _text_of(text, text_key, record.where)
        if isinstance(found, Problem):
            return None, [*problems, found]
        text = found
    text, count = _SURROGATE.subn("\ufffd", text)
    if count:
        problems.append(Problem("lone_surrogate", record.where, f"{count} of them"))
    if not text:
        return None, [*problems, Problem("empty", record.where, "no text")]
    if record.format == "jsonl" and not data.strip():
        return None, [*problems, Problem("empty", record.where, "blank line")]
    return Document(text, record.where), problems


def _text_of(line: str, text_key: str, where: str) -> str | Problem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of over 4300 digits
        return Problem("invalid_json", where, str(error) or type(error).__name__)
    if not isinstance(value, dict):
        return Problem("not_an_object", where, f"it is a {type(value).__name__}")
    if text_key not in value:
        keys = ", ".join(map(repr, list(value)[:8])) or "no key at all"
        return Problem("missing_text", where, f"no key {text_key!r}; it has {keys}")
    text = value[text_key]
    if not isinstance(text, str):
        return Problem("text_not_string", where, f"{text_key!r} is a {type(text).__name__}")
    return text
