"""Tokenizers of the sentencepiece library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_engine.errors import DataError
from preprocessing.vocabulary import WordStyle, check_ids, end_of_document

_SENTINEL = "<extra_id_{}>"
_SENTINELS = 100  # how many T5 appends to a model that has none


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """A sentencepiece ``.model``; see ``preprocessing.tokenize.Tokenizer``.

    T5's models do not hold its sentinels: they are the 100 ids after the last piece, counted
    downwards, ``<extra_id_0>`` being the highest. A model is taken for one of T5's if it has a
    padding piece, no piece that begins a text, and no sentinel of its own (mT5's has them).

    Attributes:
        model: the processor.
        vocab_size: pieces, and appended sentinels.
        vocabulary: id of each piece and appended sentinel.
    """

    model: Any
    vocab_size: int
    eod_id: int
    eod_token: str
    unknown_id: int | None
    special: frozenset[int]
    vocabulary: Mapping[str, int]
    word_style: WordStyle | None = "metaspace"

    def token_id(self, token: str) -> int | None:
        """See ``Tokenizer``."""
        return self.vocabulary.get(token)

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(self.model.encode(text, out_type=int))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``; an appended sentinel appears by its name."""
        check_ids(ids, self.vocab_size)
        size = self.model.get_piece_size()
        parts: list[str] = []
        pieces: list[int] = []
        for token in ids:
            if token < size:
                pieces.append(int(token))
                continue
            parts += [str(self.model.decode(pieces)), _SENTINEL.format(self.vocab_size - 1 - token)]
            pieces = []
        return " ".join(part for part in (*parts, str(self.model.decode(pieces))) if part)


def load_sentencepiece(file: Path, eod: str | None) -> SentencePieceTokenizer:
    """Open a ``.model``.

    Raises:
        DataError: the library is missing, the file is no model, or no token ends a document.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            f"{file} needs sentencepiece: pip install 'ds-engine[sentencepiece]'"
        ) from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError) as error:
        raise DataError(f"{file} is not a sentencepiece model: {error}") from error
    size = model.get_piece_size()
    vocabulary = {model.id_to_piece(number): number for number in range(size)}
    special = {
        number for number in range(size) if model.is_control(number) or model.is_unknown(number)
    }
    own = any(vocabulary.keys() & {_SENTINEL.format(0), "\u2581" + _SENTINEL.format(0)})
    if model.pad_id() >= 0 and model.bos_id() < 0 and not own:
        for number in range(_SENTINELS):
            vocabulary[_SENTINEL.format(number)] = size + _SENTINELS - 1 - number
            special.add(size + number)
    token = end_of_document(file, eod, vocabulary)
    unknown = model.unk_id()
    return SentencePieceTokenizer(
        model=model,
        vocab_size=len(vocabulary),
        eod_id=vocabulary[token],
        eod_token=token,
        unknown_id=unknown if unknown >= 0 else None,
        special=frozenset(special),
        vocabulary=vocabulary,
    )
