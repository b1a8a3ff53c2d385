"""Trains tokenizers: byte-level BPE for GPT and for T5, WordPiece for BERT.

Byte-level BPE can express any text, so it has no unknown token. The result is a function of the
text and the options alone.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ds_engine.errors import DataError
from preprocessing.report import Report, write_text
from preprocessing.run import Options, read_documents
from preprocessing.tokenize import WORDPIECE_TOKENS, build_wordpiece

if TYPE_CHECKING:
    import tokenizers

Kind = Literal["bpe", "wordpiece", "t5"]

END_OF_DOCUMENT = "<|endoftext|>"
_T5_TOKENS = ("<pad>", "</s>")
_BYTES = 256
_MOST_CHARACTERS = 1000  # of a WordPiece vocabulary, as in BERT's English one; others are unknown


def train_tokenizer(
    inputs: Sequence[str],
    output: str,
    options: Options,
    *,
    vocab_size: int,
    kind: Kind = "bpe",
    lowercase: bool = False,
    sentinels: int = 100,
) -> tuple[int, Report]:
    """Train on the text of ``inputs`` and write a ``tokenizer.json``.

    ========= ==================================================================================
    kind      tokens besides what is learned
    ========= ==================================================================================
    bpe       ``<|endoftext|>`` 0, then 256 bytes
    t5        ``<pad>`` 0, ``</s>`` 1, then 256 bytes; ``<extra_id_0>`` is the last id,
              ``<extra_id_1>`` the one before it, and so on, as in T5
    wordpiece ``[PAD]`` 0, ``[UNK]`` 1, ``[CLS]`` 2, ``[SEP]`` 3, ``[MASK]`` 4, then characters
    ========= ==================================================================================

    Args:
        inputs: files and folders, read as ``preprocess`` does.
        output: the file to write.
        options: how to read; ``tokenizer``, ``eod`` and ``workers`` are not used.
        vocab_size: entries wanted, sentinels included.
        kind: what to train.
        lowercase: wordpiece only: lower-case text and remove accents.
        sentinels: t5 only: how many.

    Returns:
        The number of entries, which is smaller if the text has too few pairs to merge, and the
        report.

    Raises:
        DataError: a vocabulary too small, an option of another kind, an existing output, unusable
            inputs, no document.
    """
    _check_size(kind, vocab_size, sentinels)
    if lowercase and kind != "wordpiece":
        raise DataError(f"--lowercase is for --kind wordpiece; {kind} keeps text as it is")
    path = Path(output)
    if path.exists() and not options.overwrite:
        raise DataError(f"{path} exists; choose another --output or pass --overwrite")
    report = Report()
    if kind == "wordpiece":
        model = _train_wordpiece(inputs, options, report, vocab_size, lowercase=lowercase)
    else:
        first = (END_OF_DOCUMENT,) if kind == "bpe" else _T5_TOKENS
        last = sentinels if kind == "t5" else 0
        model = _train_bytes(inputs, options, report, vocab_size - last, first)
        model.add_special_tokens([f"<extra_id_{number}>" for number in reversed(range(last))])
    write_text(path, model.to_str(pretty=True))
    return model.get_vocab_size(), report


def _check_size(kind: Kind, vocab_size: int, sentinels: int) -> None:
    if kind == "bpe":
        smallest, parts = _BYTES + 1, f"{_BYTES} bytes and {END_OF_DOCUMENT}"
    elif kind == "t5":
        if sentinels < 1:
            raise DataError(f"--sentinels {sentinels} must be at least 1: T5 needs them")
        smallest = _BYTES + len(_T5_TOKENS) + sentinels
        parts = f"{_BYTES} bytes, {' and '.join(_T5_TOKENS)}, {sentinels} sentinels"
    else:
        # Each character may need two entries, at the start of a word and inside.
        smallest, parts = len(WORDPIECE_TOKENS) + 2, f"{' '.join(WORDPIECE_TOKENS)} and characters"
    if vocab_size < smallest:
        raise DataError(f"--vocab-size {vocab_size} must be at least {smallest}: {parts}")


def _train_bytes(
    inputs: Sequence[str],
    options: Options,
    report: Report,
    vocab_size: int,
    first: Sequence[str],
) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(first),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = read_documents(inputs, options, report)
    model.train_from_iterator((document.text for document in documents), trainer)
    _check_documents(inputs, report)
    return model


def _train_wordpiece(
    inputs: Sequence[str], options: Options, report: Report, vocab_size: int, *, lowercase: bool
) -> "tokenizers.Tokenizer":
    """Train WordPiece; the text is read twice, first for its characters.

    The library numbers characters inside words (``##a``) in the order of a hash table, another one
    in each process, and breaks ties by these numbers. Here they are numbered beforehand, as if they
    were special tokens of a tokenizer of which only the vocabulary is kept.
    """
    from tokenizers import trainers

    first = {token: number for number, token in enumerate(WORDPIECE_TOKENS)}
    draft = build_wordpiece(first, lowercase=lowercase)
    counts: Counter[str] = Counter()
    for document in read_documents(inputs, options, report):
        counts.update(draft.normalizer.normalize_str(document.text))
    _check_documents(inputs, report)
    ranked = sorted((-count, character) for character, count in counts.items())
    most = min(_MOST_CHARACTERS, (vocab_size - len(WORDPIECE_TOKENS)) // 2)
    kept = [character for _, character in ranked if not character.isspace()][:most]
    alphabet = sorted(kept)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*WORDPIECE_TOKENS, *alphabet, *(f"##{item}" for item in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    documents = read_documents(inputs, options, Report())
    draft.train_from_iterator((document.text for document in documents), trainer)
    return build_wordpiece(draft.get_vocab(with_added_tokens=False), lowercase=lowercase)


def _check_documents(inputs: Sequence[str], report: Report) -> None:
    if not report.documents:
        raise DataError(f"no document in {', '.join(inputs)}: there is no text to train on")
