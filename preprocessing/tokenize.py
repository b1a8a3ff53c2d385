"""Tokenizers behind one interface: Hugging Face's, GPT-2's and BERT's files, sentencepiece.

Text is only ever text: a document that contains the characters ``<|endoftext|>`` is encoded as
those characters, never as the end-of-document id. Truncation, padding and added special tokens that
a tokenizer file may ask for are off: a document is encoded whole and as it is.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ds_engine.errors import DataError
from preprocessing.sentencepiece_model import load_sentencepiece
from preprocessing.vocabulary import WordStyle, check_ids, end_of_document

if TYPE_CHECKING:
    import tokenizers

WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDPIECE_UNKNOWN = "[UNK]"


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

    @property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, such as the end-of-document id."""
        ...

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Id of each token, special and appended ones included."""
        ...

    @property
    def word_style(self) -> WordStyle | None:
        """How tokens show where words begin; None if that is not known."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of one token by its name, or None if there is no such token."""
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
    special: frozenset[int]
    vocabulary: Mapping[str, int]
    word_style: WordStyle | None

    def token_id(self, token: str) -> int | None:
        """See ``Tokenizer``."""
        return self.vocabulary.get(token)

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(self.model.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``; the library uses its own threads unless they are switched off."""
        encoded = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [item.ids for item in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        check_ids(ids, self.vocab_size)
        return str(self.model.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(path: str | os.PathLike[str], *, eod: str | None = None) -> Tokenizer:
    """Open a tokenizer.

    Args:
        path: a ``tokenizer.json``, a GPT-2 ``vocab.json`` (``merges.txt`` beside it), a BERT
            ``vocab.txt`` (lower case, unless a ``tokenizer_config.json`` beside it says otherwise),
            a sentencepiece ``.model``, or a folder that holds one of them (looked for in this
            order).
        eod: token that ends a document; by default the first of ``END_OF_DOCUMENT`` it has.

    Raises:
        DataError: no usable file, no end-of-document token, or one that plain text can produce.
    """
    file = _find(Path(path))
    if file.suffix == ".model":
        tokenizer: Tokenizer = load_sentencepiece(file, eod)
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
    if _is_gpt2(file):
        return [file, _merges(file)]
    settings = file.with_name("tokenizer_config.json")
    return [file, settings] if _is_wordpiece(file) and settings.is_file() else [file]


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"tokenizer {path} does not exist")
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    raise DataError(
        f"folder {path} holds no tokenizer.json, no vocab.json with merges.txt, no vocab.txt, and "
        f"{len(models)} .model files where one is needed; name the file"
    )


def _load_hugging_face(file: Path, eod: str | None) -> HuggingFaceTokenizer:
    import tokenizers

    try:
        if _is_gpt2(file):
            model = _gpt2(file)
        elif _is_wordpiece(file):
            model = _wordpiece(file)
        else:
            model = tokenizers.Tokenizer.from_file(str(file))
    except DataError:
        raise
    except Exception as error:  # the library raises plain Exception
        kind = "a BERT vocabulary" if _is_wordpiece(file) else "a tokenizer.json"
        raise DataError(f"{file} is not {kind}: {error}") from error
    vocabulary = model.get_vocab(with_added_tokens=True)
    token = end_of_document(file, eod, vocabulary)
    model.add_special_tokens([token])  # a no-op if it is one: special tokens are not found in text
    model.encode_special_tokens = True
    model.no_truncation()
    model.no_padding()
    unknown = vocabulary.get(getattr(model.model, "unk_token", None) or "")
    added = model.get_added_tokens_decoder()
    return HuggingFaceTokenizer(
        model=model,
        vocab_size=max(vocabulary.values()) + 1,  # ids may have holes
        eod_id=vocabulary[token],
        eod_token=token,
        unknown_id=unknown,
        special=frozenset(
            {number for number, item in added.items() if item.special}
            | ({unknown} if unknown is not None else set())
        ),
        vocabulary=vocabulary,
        word_style=_word_style(model),
    )


def _word_style(model: "tokenizers.Tokenizer") -> WordStyle | None:
    """Tell the style from the model and the parts around it, which show themselves as JSON."""
    from tokenizers import models

    if isinstance(model.model, models.WordPiece):
        return "wordpiece"
    parts = (model.normalizer, model.pre_tokenizer, model.decoder)
    shown = [part.__getstate__().decode() for part in parts if part is not None]
    if any('"ByteLevel"' in text for text in shown):
        return "byte_level"
    return "metaspace" if any("\u2581" in text for text in shown) else None


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


def _is_wordpiece(file: Path) -> bool:
    return file.name.endswith("vocab.txt")


def _wordpiece(file: Path) -> "tokenizers.Tokenizer":
    from tokenizers import models

    path = file.with_name("tokenizer_config.json")
    settings: dict[str, Any] = {}
    if path.is_file():
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not JSON: {error}") from error
        if not isinstance(settings, dict):
            raise DataError(f"{path} holds a {type(settings).__name__}, not an object")
    vocabulary = models.WordPiece.read_file(str(file))
    if _WORDPIECE_UNKNOWN not in vocabulary:
        raise DataError(
            f"{file} has no line {_WORDPIECE_UNKNOWN}, so it is not a BERT vocabulary of one token "
            "a line"
        )
    return build_wordpiece(
        vocabulary,
        lowercase=bool(settings.get("do_lower_case", True)),
        strip_accents=settings.get("strip_accents"),
        split_chinese=bool(settings.get("tokenize_chinese_chars", True)),
    )


def build_wordpiece(
    vocabulary: dict[str, int],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
) -> "tokenizers.Tokenizer":
    """Return BERT's tokenizer for a vocabulary.

    Args:
        vocabulary: id of each piece; a piece that goes on with a word begins with ``##``.
        lowercase: lower-case text first.
        strip_accents: remove accents; None: as ``lowercase``.
        split_chinese: each Chinese character is a word.
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    model = Model(models.WordPiece(vocabulary, unk_token=_WORDPIECE_UNKNOWN))
    model.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese
    )
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece(prefix="##")
    model.add_special_tokens([token for token in WORDPIECE_TOKENS if token in vocabulary])
    return model
