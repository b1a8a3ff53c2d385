"""Filling the masked words of texts with a trained BERT, alone or as one rank of a tensor group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_engine.errors import ConfigError
from ds_engine.inference.fill_mask import fill_mask
from launch.inference import (
    connect,
    encode_with_gaps,
    load_model,
    open_run,
    run_special_ids,
    run_tokenizer,
)


@dataclass(frozen=True)
class Filling:
    """A word for a masked place: the piece's name in the tokenizer, and its probability."""

    piece: str
    probability: float


def fill_texts(
    run: Path,
    texts: tuple[str, ...],
    *,
    top_k: int = 5,
    tensor: int = 1,
    tokenizer: Path | None = None,
) -> list[list[list[Filling]]] | None:
    """Guess the masked words of texts; None on ranks other than 0, which should print nothing.

    Args:
        run: run folder or checkpoint folder.
        texts: with the tokenizer's mask token (``[MASK]``) where a word is to be guessed.
        top_k: guesses for each place.
        tensor: tensor-parallel degree, the number of processes.
        tokenizer: instead of the run's own.

    Returns:
        For each text, for each masked place, the likeliest words, likeliest first.

    Raises:
        DsEngineError: no checkpoint, no tokenizer, a model of another kind, or a text without a
            masked place.
    """
    saved = open_run(run, tokenizer)
    if saved.model.family != "bert":
        raise ConfigError(
            f"{saved.checkpoint} is of the family {saved.model.family}, which fills no masks; use "
            f"ds-engine generate --checkpoint {run}"
        )
    if getattr(saved.model, "num_labels", None) is not None:
        raise ConfigError(
            f"{saved.checkpoint} was fine-tuned for classes (model.num_labels) and predicts no "
            "words any more; use the run that it was initialised from"
        )
    words = run_tokenizer(saved)
    ids = run_special_ids(saved, words)
    missing = [name for name in ("mask", "cls", "sep") if getattr(ids, name) is None]
    if missing or ids.mask is None or ids.cls is None or ids.sep is None:
        raise ConfigError(
            f"{saved.tokenizer} has no token for {' and '.join(missing)}, which BERT needs; name "
            "it in the run's data.objective.special_tokens"
        )
    names = {number: piece for piece, number in words.vocabulary.items()}
    marks = {names[ids.mask]: ids.mask}
    rows = [[ids.cls, *encode_with_gaps(words, text, marks), ids.sep] for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if ids.mask not in row:
            raise ConfigError(
                f"the text {text!r} has no {names[ids.mask]}; put it where a word is to be guessed"
            )
    context = connect(tensor)
    tp = context.tensor_parallel(sequence_parallel=False)
    found = fill_mask(
        load_model(saved, tp),
        rows,
        tp,
        mask_id=ids.mask,
        top_k=top_k,
        max_sequence_length=saved.model.position_limit,
        vocab_limit=words.vocab_size,
    )
    if context.rank != 0:
        return None
    return [
        [
            [Filling(names.get(g.token, f"<{g.token}>"), g.probability) for g in place]
            for place in row
        ]
        for row in found
    ]
