"""What tokenizers of every kind share: the end of a document, checked ids, where words begin."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ds_engine.errors import DataError

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

# How the pieces of a tokenizer show where words begin: WordPiece marks what goes on with "##", byte
# level BPE and sentencepiece (Metaspace) mark the white space before a word.
WordStyle = Literal["wordpiece", "byte_level", "metaspace"]


def end_of_document(file: Path, eod: str | None, vocabulary: Mapping[str, int]) -> str:
    """Return the token that ends a document: ``eod``, or the first usual one.

    Raises:
        DataError: the vocabulary does not have it.
    """
    if eod is not None:
        if eod not in vocabulary:
            raise DataError(f"{file} has no token {eod!r}; give one of its tokens as --eod")
        return eod
    for token in END_OF_DOCUMENT:
        if token in vocabulary:
            return token
    raise DataError(
        f"{file} has none of the usual end-of-document tokens {', '.join(END_OF_DOCUMENT)}; name "
        "its own with --eod"
    )


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that no token has.

    Raises:
        DataError: an id is outside 0..vocab_size-1.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} is not in the tokenizer, whose ids are 0 to {vocab_size - 1}; use "
                "the tokenizer that made the data"
            )
