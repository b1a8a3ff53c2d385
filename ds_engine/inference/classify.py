"""Classes of texts by a fine-tuned encoder.

Legend: ``B`` rows, ``S`` sequence, ``C`` classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_engine.errors import ConfigError
from ds_engine.inference.decoding import (
    agree,
    check_together,
    check_words,
    evaluation,
    vocab_size,
)
from ds_engine.inference.padding import right_padded
from ds_engine.inference.sampling import check_finite
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel


class Example(NamedTuple):
    """What is to be classified.

    Attributes:
        tokens: word numbers, as in training (with what begins and ends each text).
        second: place of the first token of the second text; ``len(tokens)`` without one.
    """

    tokens: Sequence[int]
    second: int


def classify(
    model: SequentialModel,
    examples: Sequence[Example],
    tp: TensorParallel,
    *,
    batch_size: int = 32,
    max_sequence_length: int | None = None,
) -> list[list[float]]:
    """Probabilities of the classes of each example; all ranks must call, with the same arguments.

    The model is in evaluation mode meanwhile, and gets its modes back.

    Args:
        model: predicts (B, C) logits from tokens, positions, segments, token types and sample
            numbers.
        examples: the texts or pairs of texts.
        tp: the handle that the model was built with.
        batch_size: examples in a forward pass; the results do not depend on it.
        max_sequence_length: size of the model's learned position table.

    Returns:
        For each example C probabilities; the same on all ranks.

    Raises:
        ConfigError: an example is too long, or a number is out of its range.
        DataError: an empty example, or a number that is no word.
        LaunchError: the ranks were given different arguments.
        NumericsError: the model predicts NaN or inf.
    """
    words = vocab_size(model)

    def check() -> list[Example]:
        if tp.scatters_sequence:
            raise ConfigError(
                "parallel.sequence = true cannot classify: rows of any length cannot be cut into "
                f"{tp.size} parts; build the model with tensor_parallel(sequence_parallel=False), "
                "whose weights are the same"
            )
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size} must be at least 1")
        return [
            _checked(number, example, words, max_sequence_length)
            for number, example in enumerate(examples)
        ]

    device = next(model.parameters()).device
    checked = check_together(check, batch_size, tp, device)
    found: list[list[float]] = []
    with evaluation(model), torch.no_grad():
        for start in range(0, len(checked), batch_size):
            logits = model(_inputs(checked[start : start + batch_size], device)).float()
            check_finite(logits)
            found += agree(logits.double().softmax(-1), tp).tolist()
    return found


def _inputs(batch: Sequence[Example], device: torch.device) -> tuple[Tensor, ...]:
    tokens, positions, segments = right_padded([example.tokens for example in batch], device)
    second = torch.tensor([example.second for example in batch], device=device)[:, None]
    # Padding has type 0, as in training.
    types = ((positions >= second) & (segments == 0)).long()
    return tokens, positions, segments, types, torch.arange(len(batch), device=device)


def _checked(number: int, example: Example, words: int | None, limit: int | None) -> Example:
    ids = check_words(number, example.tokens, words)
    if not 0 <= example.second <= len(ids):
        raise ConfigError(
            f"example {number}: its second text begins at {example.second}, but it has "
            f"{len(ids)} tokens"
        )
    if limit is not None and len(ids) > limit:
        raise ConfigError(
            f"example {number} has {len(ids)} tokens, more than model.max_sequence_length = "
            f"{limit}; shorten it"
        )
    return Example(ids, example.second)
