"""Real text that every machine already has, or the user's own, split into train and validation."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ds_engine.errors import DataError

VALIDATION_SHARE = 0.05
# Not written to be read: tests, generated tables, and what other people installed.
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "__pycache__"})

# To continue or to fill after training on Python's sources. Byte-level BPE keeps a space with the
# word behind it, so where a word is missing the space is missing too.
PROMPTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt": ("def main(",),
        "t5": (
            "import<extra_id_0>\n\ndef main(<extra_id_1>):\n    return None\n",
            "    def __init__(self,<extra_id_0>):\n        self.name =<extra_id_1>\n",
            "for<extra_id_0> in range(<extra_id_1>):\n    print(i)\n",
        ),
        "bert": ("import [MASK]", "return [MASK]"),
    }
)


@dataclass(frozen=True)
class Split:
    """Where the two halves of the text are, and what is in them.

    Attributes:
        train, validation: JSON-lines files with one document a line.
        documents: in both.
        characters: in both.
        origin: what the text is, for people.
    """

    train: Path
    validation: Path
    documents: int
    characters: int
    origin: str


def _belongs_to_validation(name: str) -> bool:
    """Decide by a hash of the name, so that adding a document moves no other one."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < VALIDATION_SHARE * 2**32


def standard_library() -> Iterator[tuple[str, str]]:
    """(name, text) of the running Python's own ``.py`` sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            try:
                with tokenize.open(path) as file:  # honours the source's own encoding
                    yield str(relative), file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue  # a deliberately broken source of the library


def json_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each line's ``text``.

    Raises:
        DataError: a line that is not an object with a text.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f'{path}:{number} is not {{"text": ...}}: {error}') from None
            if not isinstance(text, str):
                raise DataError(f"{path}:{number}: text is {type(text).__name__}, not a string")
            yield f"{number}", text


def plain_text(path: Path, pieces: int = 200) -> Iterator[tuple[str, str]]:
    """(name, text) of consecutive pieces of one text file, cut at line ends."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    size = max(sum(map(len, lines)) // pieces, 2000)
    piece: list[str] = []
    count = length = 0
    for line in lines:
        piece.append(line)
        length += len(line)
        if length >= size:
            yield f"{count}", "".join(piece)
            piece, length, count = [], 0, count + 1
    if piece:
        yield f"{count}", "".join(piece)


def write_split(data: Path | None, folder: Path) -> Split:
    """Write the text as two JSON-lines files.

    Args:
        data: a ``.txt`` or ``.jsonl`` file, or None for Python's standard library.
        folder: where to write.

    Raises:
        DataError: the file is missing, unreadable, of another kind, or too small.
    """
    if data is None:
        documents, origin = standard_library(), "the sources of Python's standard library"
    elif not data.is_file():
        raise DataError(f"DATA = {data} does not exist; give a .txt or .jsonl file")
    elif data.suffix == ".jsonl":
        documents, origin = json_lines(data), str(data)
    elif data.suffix == ".txt":
        documents, origin = plain_text(data), str(data)
    else:
        raise DataError(f"DATA = {data} ends with {data.suffix or 'nothing'}; use .txt or .jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "validation.jsonl"
    counts, characters = [0, 0], 0
    with (
        paths[0].open("w", encoding="utf-8") as train,
        paths[1].open("w", encoding="utf-8") as held,
    ):
        try:
            for name, text in documents:
                if text.strip():
                    # The second document is always held out, so that small data has a validation.
                    chosen = _belongs_to_validation(name) or sum(counts) == 1
                    line = json.dumps({"text": text, "name": name}) + "\n"
                    (held if chosen else train).write(line)
                    counts[chosen] += 1
                    characters += len(text)
        except UnicodeDecodeError as error:
            raise DataError(f"{data} is not UTF-8: {error}") from None
    if min(counts) < 1 or characters < 20_000:
        raise DataError(
            f"{origin}: {sum(counts)} documents with {characters:,} characters are too few to "
            "train on; give at least 2 documents and 20,000 characters"
        )
    return Split(*paths, documents=sum(counts), characters=characters, origin=origin)


def default_prompts(family: str, held_out: Path | None) -> tuple[str, ...]:
    """What to continue or to fill at the end of a quickstart.

    Args:
        family: of the model.
        held_out: JSON lines of the user's own text, whose beginning is used; None: Python's.
    """
    if held_out is None:
        return PROMPTS[family]
    with held_out.open(encoding="utf-8") as file:
        words = json.loads(file.readline())["text"].split()[:16]
    if family == "gpt":
        return (" ".join(words[:3]),)
    if family == "bert":
        words[len(words) // 2] = "[MASK]"
    else:
        words[2 * len(words) // 3] = "<extra_id_1>"
        words[len(words) // 3] = "<extra_id_0>"
    return (" ".join(words).replace(" <extra_id", "<extra_id"),)


def filled(prompt: str, answer: str) -> str:
    """A prompt with sentinels, each replaced by what a T5 wrote for it, in guillemets.

    Args:
        prompt: what the encoder read.
        answer: what the decoder wrote: each sentinel, then what it stands for.
    """
    sentinel = r"<extra_id_\d+>"
    parts = re.split(f"({sentinel})", answer.removesuffix("</s>"))
    pieces = dict(zip(parts[-2::-2], parts[::-2], strict=False))  # of two, the first one counts
    return re.sub(
        sentinel,
        lambda found: f"\u00ab{pieces[found[0]]}\u00bb" if found[0] in pieces else found[0],
        prompt,
    )
