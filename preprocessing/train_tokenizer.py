"""Trains a byte-level BPE tokenizer: it can express any text, so there is no unknown token."""

from collections.abc import Sequence
from pathlib import Path

from ds_engine.errors import DataError
from preprocessing.report import Report, write_text
from preprocessing.run import Options, read_documents

END_OF_DOCUMENT = "<|endoftext|>"
_SMALLEST = 257  # 256 bytes and the end-of-document token


def train_tokenizer(
    inputs: Sequence[str],
    output: str,
    options: Options,
    *,
    vocab_size: int,
) -> tuple[int, Report]:
    """Train on the text of ``inputs`` and write a ``tokenizer.json``.

    The end-of-document token ``<|endoftext|>`` gets id 0.

    Args:
        inputs: files and folders, read as ``preprocess`` does.
        output: the file to write.
        options: how to read; ``tokenizer``, ``eod`` and ``workers`` are not used.
        vocab_size: entries wanted, at least 257.

    Returns:
        The number of entries, which is smaller if the text has too few pairs to merge, and the
        report.

    Raises:
        DataError: a vocabulary too small, an existing output, unusable inputs, no document.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST:
        raise DataError(
            f"--vocab-size {vocab_size} must be at least {_SMALLEST}: 256 bytes and "
            f"{END_OF_DOCUMENT}"
        )
    path = Path(output)
    if path.exists() and not options.overwrite:
        raise DataError(f"{path} exists; choose another --output or pass --overwrite")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    report = Report()
    documents = read_documents(inputs, options, report)
    model.train_from_iterator((document.text for document in documents), trainer)
    if not report.documents:
        raise DataError(f"no document in {', '.join(inputs)}: there is no text to train on")
    write_text(path, model.to_str(pretty=True))
    return model.get_vocab_size(), report
