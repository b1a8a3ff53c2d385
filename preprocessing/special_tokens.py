"""Ids of a tokenizer that mean something to an objective: padding, masks, sentinels, word parts."""

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ds_engine.data.objective import SpecialIds
from ds_engine.errors import ConfigError
from preprocessing.tokenize import Tokenizer

_NO_NAMES: Mapping[str, str | None] = MappingProxyType({})
# By convention the first of these that the tokenizer has; ``eos`` ends with its end-of-document
# token, and ``start`` is the padding, as in T5.
_USUAL = {
    "pad": ("[PAD]", "<pad>"),
    "eos": ("</s>", "<eos>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
}
_SENTINELS = "<extra_id_{}>"
_KEYS = (*_USUAL, "start", "sentinels")
_WORD_BOUNDARY = "\u2581"  # sentencepiece's sign of a space
# Byte-level BPE writes byte b, if it cannot be printed, as the character 256 + (its number among
# such bytes); for the white space of ASCII that is 256 + b.
_SPACES = tuple(chr(256 + byte) for byte in b"\t\n\x0b\x0c\r ")


def special_ids(tokenizer: Tokenizer, *, names: Mapping[str, str | None] = _NO_NAMES) -> SpecialIds:
    """Return the ids that mean something to an objective.

    Args:
        tokenizer: as opened by ``load_tokenizer``.
        names: token of ``pad``, ``eos``, ``start``, ``mask``, ``cls``, ``sep``, and the pattern of
            ``sentinels`` with ``{}`` in the place of the number. None or absent: by convention
            (``[PAD]`` or ``<pad>``; ``</s>``, ``<eos>`` or the end-of-document token; the padding;
            ``[MASK]`` or ``<mask>``; ``[CLS]`` or ``<s>``; ``[SEP]`` or ``</s>``;
            ``<extra_id_{}>``), and where the tokenizer has no such token the id is None.

    Raises:
        ConfigError: an unknown key, or a name that the tokenizer does not have.
    """
    unknown = sorted(set(names) - set(_KEYS))
    if unknown:
        raise ConfigError(f"special_tokens.{unknown[0]} is not known; use {', '.join(_KEYS)}")
    found: dict[str, int | None] = {}
    for key, usual in _USUAL.items():
        ids = (tokenizer.token_id(token) for token in usual)
        by_convention = next((number for number in ids if number is not None), None)
        found[key] = _named(tokenizer, key, names.get(key), by_convention)
    if found["eos"] is None:
        found["eos"] = tokenizer.eod_id
    found["start"] = _named(tokenizer, "start", names.get("start"), found["pad"])
    sentinels = _sentinels(tokenizer, names.get("sentinels"))
    special = tokenizer.special | set(sentinels) | {tokenizer.eod_id}
    special |= {number for number in found.values() if number is not None}
    return SpecialIds(
        **found,
        sentinels=sentinels,
        special=special,
        continues_word=_continues_word(tokenizer, special),
    )


def encode_marked(tokenizer: Tokenizer, text: str, *, tokens: Mapping[str, int]) -> list[int]:
    """Encode text in which some names stand for special tokens, such as ``a [MASK] sat``.

    ``Tokenizer.encode`` takes every text for text. Here each of ``tokens`` that the text names
    becomes its id, and what is between two of them is encoded by itself.

    Args:
        tokenizer: encodes the rest.
        text: the text.
        tokens: id of each name.
    """
    if not tokens:
        return tokenizer.encode(text)
    # The longest first, so that a name is never cut by another that begins it.
    names = sorted(tokens, key=len, reverse=True)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
        if part in tokens:
            ids.append(tokens[part])
        elif part:
            ids += tokenizer.encode(part)
    return ids


def _named(
    tokenizer: Tokenizer, key: str, name: str | None, by_convention: int | None
) -> int | None:
    if name is None:
        return by_convention
    number = tokenizer.token_id(name)
    if number is None:
        raise ConfigError(
            f"special_tokens.{key} = {name!r} is not a token of the tokenizer "
            f"({tokenizer.vocab_size} ids); name one that it has, or leave the key out for the "
            "usual one"
        )
    return number


def _sentinels(tokenizer: Tokenizer, pattern: str | None) -> tuple[int, ...]:
    """Ids of sentinels 0, 1, ... as far as the tokenizer has them."""
    chosen = _SENTINELS if pattern is None else pattern
    if "{}" not in chosen:
        raise ConfigError(
            f"special_tokens.sentinels = {pattern!r} must hold {{}} in the place of the number, "
            f"such as {_SENTINELS!r}"
        )
    found: list[int] = []
    while True:
        name = chosen.replace("{}", str(len(found)))
        number = tokenizer.token_id(name)
        if number is None:  # mT5's pieces begin with the sign of a space
            number = tokenizer.token_id(_WORD_BOUNDARY + name)
        if number is None:
            break
        found.append(number)
    if pattern is not None and not found:
        raise ConfigError(
            f"special_tokens.sentinels = {pattern!r}: the tokenizer has no token "
            f"{pattern.replace('{}', '0')!r}; name the pattern of its sentinels, or leave the key "
            f"out for {_SENTINELS!r}"
        )
    return tuple(found)


def _continues_word(tokenizer: Tokenizer, special: frozenset[int]) -> npt.NDArray[np.bool_] | None:
    """(V,) whether a piece goes on with the word before it; None if the pieces do not tell.

    With byte-level BPE and sentencepiece a word is what stands between white space, punctuation
    included; with WordPiece punctuation is a word of its own.
    """
    style = tokenizer.word_style
    if style is None:
        return None
    flags = np.zeros(tokenizer.vocab_size, dtype=np.bool_)  # a hole among the ids is no word's part
    for piece, number in tokenizer.vocabulary.items():
        if style == "wordpiece":
            flags[number] = piece.startswith("##")
        elif style == "byte_level":
            flags[number] = not piece.startswith(_SPACES)
        else:
            flags[number] = not piece.startswith(_WORD_BOUNDARY)
    flags[list(special)] = False
    return flags
