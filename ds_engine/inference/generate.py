"""Continuing prompts with a model, in one process or on the ranks of a tensor-parallel group.

Prompts of unequal length are padded on the left, so that the last position of every row is the one
that predicts. Padding is a document of its own (segment -1; the text is segment 0): padding sees
padding only, the text never sees it, and positions count from the text's first token.

Legend: ``B`` batch, ``S`` sequence, ``V`` words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_engine.errors import ConfigError
from ds_engine.inference.beam import Beam, BeamSettings, beam_search, check_beams
from ds_engine.inference.decoding import (
    OnToken,
    check_model,
    check_together,
    check_words,
    decode,
    device_of,
    evaluation,
    vocab_size,
)
from ds_engine.inference.kv_cache import KVCache
from ds_engine.inference.padding import left_padded
from ds_engine.inference.sampling import GenerationSettings
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel

__all__ = [
    "GenerationSettings",
    "OnToken",
    "evaluation",
    "generate",
    "generate_beams",
    "left_padded",
    "vocab_size",
]


def generate(
    model: SequentialModel,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    tp: TensorParallel,
    *,
    max_sequence_length: int | None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Continue each prompt; all ranks of the group must call, with the same arguments.

    The first pass reads the whole prompts, each later one a single token per row. A row that has
    met a stop word is frozen: its neighbours go on and its result does not change. The model is in
    evaluation mode meanwhile, and gets its modes back.

    Args:
        model: predicts (B, S, V) logits from tokens, positions, segments and sample numbers.
        prompts: word numbers, at least one a prompt.
        settings: see ``GenerationSettings``.
        tp: the handle that the model was built with.
        max_sequence_length: size of the model's learned position table; None for a model without
            one (rotary, ALiBi), which has no hard limit.
        on_token: called with (row, word) for each new word as soon as it is known, on every rank,
            in order of rows; not for stop words. It must not raise on some ranks only.

    Returns:
        The new words of each prompt, without the stop word; the same on all ranks.

    Raises:
        ConfigError: a prompt with its continuation is longer than the position table, a stop word
            is not in the vocabulary, or the model was built with sequence parallelism.
        DataError: an empty prompt, or a number that is not a word of the model.
        LaunchError: the ranks were given different arguments.
        NumericsError: the model predicts NaN or inf.
    """
    rows = check_together(
        lambda: _checked(prompts, settings, tp, vocab_size(model), max_sequence_length),
        settings,
        tp,
        device_of(model),
    )
    if not rows:
        return []
    with evaluation(model):
        return decode(PromptReader(model, rows, settings.max_new_tokens), settings, tp, on_token)


def generate_beams(
    model: SequentialModel,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    beams: BeamSettings,
    tp: TensorParallel,
    *,
    max_sequence_length: int | None,
) -> list[Beam]:
    """Find each prompt's likeliest continuation by beam search; see ``generate`` and ``beam``.

    Raises:
        ConfigError: as ``generate``; also for settings that do not go with beams.
        DataError, LaunchError, NumericsError: as ``generate``.
    """

    def check() -> list[list[int]]:
        check_beams(settings, beams, vocab_size(model))
        return _checked(prompts, settings, tp, vocab_size(model), max_sequence_length)

    rows = check_together(check, (settings, beams), tp, device_of(model))
    if not rows:
        return []
    with evaluation(model):
        reader = PromptReader(model, rows, settings.max_new_tokens)
        return beam_search(reader, settings, beams, tp)


class PromptReader:
    """Reads prompts, then a word a row; see ``ds_engine.inference.decoding.Reader``.

    Args:
        model: decoder-only.
        prompts: checked word numbers.
        max_new_tokens: most words that will be added.
    """

    def __init__(
        self, model: SequentialModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> None:
        self.written = prompts
        self._model = model
        # The last new word is never read again, so this is one position more than can be needed.
        self._cache = KVCache(len(prompts), max(map(len, prompts)) + max_new_tokens)
        self._inputs: tuple[Tensor, ...] = left_padded(prompts, device_of(model))

    def read(self, tokens: Tensor | None) -> Tensor:
        """See ``Reader``."""
        if tokens is not None:
            _, positions, segments, sample_ids = self._inputs
            text = torch.zeros_like(segments[:, -1:])
            self._inputs = (tokens[:, None], positions[:, -1:] + 1, text, sample_ids)
        return self._model(self._inputs, None, self._cache)[:, -1].float()

    def reorder(self, rows: Tensor) -> None:
        """See ``Reader``."""
        self._cache.reorder(rows)
        self._inputs = tuple(part.index_select(0, rows) for part in self._inputs)


def _checked(
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    tp: TensorParallel,
    words: int | None,
    max_sequence_length: int | None,
) -> list[list[int]]:
    """The prompts as plain lists, or the reason why they cannot be continued."""
    check_model(settings, tp, words)
    rows = [check_words(number, prompt, words) for number, prompt in enumerate(prompts)]
    for number, row in enumerate(rows):
        needed = len(row) + settings.max_new_tokens
        if max_sequence_length is not None and needed > max_sequence_length:
            left = max_sequence_length - len(row)
            lower = f"lower generation.max_new_tokens to at most {left}, or " if left > 0 else ""
            raise ConfigError(
                f"prompt {number} has {len(row)} tokens; with generation.max_new_tokens = "
                f"{settings.max_new_tokens} that is {needed}, more than model.max_sequence_length "
                f"= {max_sequence_length}, the size of the learned position table; {lower}"
                "shorten the prompt"
            )
    return rows
