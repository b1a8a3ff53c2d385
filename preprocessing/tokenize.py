"""Tokenizers behind one interface: Hugging Face ``tokenizer.json``, GPT-2 files, sentencepiece.

Text is only ever text: a document that contains the characters ``<|endoftext|>`` is encoded as
those characters, never as the end-of-document id. Truncation, padding and added special tokens that
a tokenizer file may ask for are off: a document is encoded whole and as it is.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ds_engine.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What preprocessing and generation need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eod_id(self) -> int:
        """Id that ends a document."""
        ...

    @property
    def eod_token(self) -> str:
        """Token of ``eod_id``."""
        ...

    @property
    def unknown_id(self) -> int | None:
        """Id that stands for text the tokenizer cannot express, if it has one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without an end-of-document id."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``.

        A special token appears by its name with Hugging Face tokenizers; sentencepiece leaves its
        control tokens out.

        Raises:
            DataError: an id that is not below ``vocab_size``, or a negative one.
        """
        ...


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    model: "tokenizers.Tokenizer"
    vocab_size: int
    eod_id: int
    eod_token: str
    unknown_id: int | None

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(self.model.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``; the library uses its own threads unless they are switched off."""
        encoded = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [item.ids for item in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        _check_ids(ids, self.vocab_size)
        return str(self.model.decode(list(ids), skip_special_tokens=False))


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """A sentencepiece ``.model``."""

    model: Any
    vocab_size: int
    eod_id: int
    eod_token: str
    unknown_id: int | None

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(self.model.encode(text, out_type=int))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        _check_ids(ids, self.vocab_size)
        return str(self.model.decode(list(ids)))


def load_tokenizer(path: str | os.PathLike[str], *, eod: str | None = None) -> Tokenizer:
    """Open a tokenizer.

    Args:
        path: a ``tokenizer.json``, a GPT-2 ``vocab.json`` (``merges.txt`` beside it), a
            sentencepiece ``.model``, or a folder that holds one of them (looked for in this order).
        eod: token that ends a document; by default the first of ``END_OF_DOCUMENT`` it has.

    Raises:
        DataError: no usable file, no end-of-document token, or one that plain text can produce.
    """
    file = _find(Path(path))
    if file.suffix == ".model":
        tokenizer: Tokenizer = _load_sentencepiece(file, eod)
    else:
        tokenizer = _load_hugging_face(file, eod)
    if tokenizer.eod_id in tokenizer.encode(tokenizer.eod_token):
        raise DataError(
            f"{file}: text that contains {tokenizer.eod_token!r} would end the document there; "
            "choose another token with --eod"
        )
    return tokenizer


def tokenizer_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that ``load_tokenizer(path)`` reads, out of a folder that may hold much more.

    Copied side by side into a folder of their own, they load as they do here.

    Raises:
        DataError: no tokenizer, or a part of one is missing.
    """
    file = _find(Path(path))
    return [file, _merges(file)] if _is_gpt2(file) else [file]


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} is not in the tokenizer, whose ids are 0 to {vocab_size - 1}; use "
                "the tokenizer that made the data"
            )


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"tokenizer {path} does not exist")
    for name in ("tokenizer.json", "vocab.json"):
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    raise DataError(
        f"folder {path} holds no tokenizer.json, no vocab.json with merges.txt, and {len(models)} "
        ".model files where one is needed; name the file"
    )


def _load_hugging_face(file: Path, eod: str | None) -> HuggingFaceTokenizer:
    import tokenizers

    try:
        if _is_gpt2(file):
            model = _gpt2(file)
        else:
            model = tokenizers.Tokenizer.from_file(str(file))
    except DataError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file} is not a tokenizer.json: {error}") from error
    vocabulary = model.get_vocab(with_added_tokens=True)
    token = _end_of_document(file, eod, vocabulary)
    model.add_special_tokens([token])  # a no-op if it is one: special tokens are not found in text
    model.encode_special_tokens = True
    model.no_truncation()
    model.no_padding()
    unknown = getattr(model.model, "unk_token", None)
    return HuggingFaceTokenizer(
        model=model,
        vocab_size=max(vocabulary.values()) + 1,  # ids may have holes
        eod_id=vocabulary[token],
        eod_token=token,
        unknown_id=vocabulary.get(unknown) if unknown else None,
    )


def _is_gpt2(file: Path) -> bool:
    return file.name.endswith("vocab.json")


def _merges(vocabulary: Path) -> Path:
    """The other file of a GPT-2 tokenizer."""
    merges = vocabulary.with_name(vocabulary.name.replace("vocab.json", "merges.txt"))
    if not merges.is_file():
        raise DataError(f"{merges} is missing: GPT-2 files are {vocabulary.name} and {merges.name}")
    return merges


def _gpt2(file: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    model = Model(models.BPE.from_file(str(file), str(_merges(file))))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return model


def _load_sentencepiece(file: Path, eod: str | None) -> SentencePieceTokenizer:
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
    token = _end_of_document(file, eod, vocabulary)
    unknown = model.unk_id()
    return SentencePieceTokenizer(
        model=model,
        vocab_size=size,
        eod_id=vocabulary[token],
        eod_token=token,
        unknown_id=unknown if unknown >= 0 else None,
    )


def _end_of_document(file: Path, eod: str | None, vocabulary: dict[str, int]) -> str:
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
