"""What a masked language model puts in the place of masked words.

Legend: ``B`` rows, ``S`` sequence, ``V`` words, ``N`` masked places of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds_engine.errors import ConfigError, DataError
from ds_engine.inference.decoding import (
    agree,
    check_together,
    check_words,
    evaluation,
    vocab_size,
)
from ds_engine.inference.padding import right_padded
from ds_engine.inference.sampling import check_finite, keep_below
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel


class Guess(NamedTuple):
    """A word for a masked place, and its probability among all words."""

    token: int
    probability: float


def fill_mask(
    model: SequentialModel,
    rows: Sequence[Sequence[int]],
    tp: TensorParallel,
    *,
    mask_id: int,
    top_k: int = 5,
    max_sequence_length: int | None = None,
    vocab_limit: int | None = None,
) -> list[list[list[Guess]]]:
    """Guess the masked words of each row; all ranks must call, with the same arguments.

    Every masked word of a row is guessed by itself, the others staying masked. All tokens are of
    type 0. The model is in evaluation mode meanwhile, and gets its modes back.

    Args:
        model: predicts (B, S, V) logits from tokens, positions, segments, token types and sample
            numbers.
        rows: word numbers, each row as in training (with what begins and ends it).
        tp: the handle that the model was built with.
        mask_id: the word that stands for a masked one.
        top_k: guesses for each place (fewer if there are fewer words).
        max_sequence_length: size of the model's learned position table.
        vocab_limit: only words below this number are guessed; None: all of the model's.

    Returns:
        For each row, for each masked place in order, the likeliest words, likeliest first; the
        same on all ranks.

    Raises:
        ConfigError: a row is too long, or a number is out of its range.
        DataError: an empty row, one without a masked place, or a number that is no word.
        LaunchError: the ranks were given different arguments.
        NumericsError: the model predicts NaN or inf.
    """
    words = vocab_size(model)

    def check() -> list[list[int]]:
        if tp.scatters_sequence:
            raise ConfigError(
                "parallel.sequence = true cannot fill masks: rows of any length cannot be cut into "
                f"{tp.size} parts; build the model with tensor_parallel(sequence_parallel=False), "
                "whose weights are the same"
            )
        if top_k < 1:
            raise ConfigError(f"top_k = {top_k} must be at least 1")
        return [
            _checked(number, row, words, mask_id, max_sequence_length)
            for number, row in enumerate(rows)
        ]

    device = next(model.parameters()).device
    checked = check_together(check, (mask_id, top_k, vocab_limit), tp, device)
    if not checked:
        return []
    tokens, positions, segments = right_padded(checked, device)
    samples = torch.arange(len(checked), device=device)
    inputs = (tokens, positions, segments, torch.zeros_like(tokens), samples)
    places = (tokens == mask_id) & (segments == 0)
    with evaluation(model), torch.no_grad():
        logits = model(inputs)[places].float()
    if vocab_limit is not None:
        logits = keep_below(logits, vocab_limit)
    check_finite(logits)
    possible = min(limit for limit in (top_k, words, vocab_limit) if limit is not None)
    found, ids = logits.double().softmax(-1).topk(possible)
    pairs = zip(agree(ids, tp).tolist(), agree(found, tp).tolist(), strict=True)
    guesses = iter([[Guess(*pair) for pair in zip(*both, strict=True)] for both in pairs])
    return [[next(guesses) for token in row if token == mask_id] for row in checked]


def _checked(
    number: int, row: Sequence[int], words: int | None, mask_id: int, limit: int | None
) -> list[int]:
    ids = check_words(number, row, words)
    if mask_id not in ids:
        raise DataError(
            f"prompt {number} holds no masked word (id {mask_id}); put the mask token where a word "
            "is to be guessed"
        )
    if limit is not None and len(ids) > limit:
        raise ConfigError(
            f"prompt {number} has {len(ids)} tokens, more than model.max_sequence_length = "
            f"{limit}; shorten it"
        )
    return ids
