"""Writing a text for each source with an encoder-decoder: T5 and its kind.

The source is read once, by the encoder; each new word costs one position of the decoder. Sources of
unequal length are padded on the right: padding is a document of its own (segment -1) that no text
attends to. The decoder begins with one word, ``start_id``, that belongs to no text.

Legend: ``B`` batch, ``E`` source positions, ``V`` words.
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
from ds_engine.inference.kv_cache import EncoderDecoderCache
from ds_engine.inference.padding import right_padded
from ds_engine.inference.sampling import GenerationSettings
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel


def generate_from(
    model: SequentialModel,
    sources: Sequence[Sequence[int]],
    settings: GenerationSettings,
    tp: TensorParallel,
    *,
    start_id: int,
    max_source_length: int | None,
    max_target_length: int | None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Write a text for each source, greedily or by drawing; all ranks of the group must call.

    Args:
        model: predicts (B, T, V) logits from tokens, positions and segments of the source, the same
            of the target, and sample numbers; with an ``EncoderDecoderCache``.
        sources: word numbers, at least one a source; as in training, usually with an EOS at the
            end.
        settings: see ``GenerationSettings``.
        tp: the handle that the model was built with.
        start_id: the decoder's first input.
        max_source_length: size of the encoder's learned position table; None without one.
        max_target_length: size of the decoder's; None without one.
        on_token: see ``ds_engine.inference.generate.generate``.

    Returns:
        The words of each text, without the stop word; the same on all ranks.

    Raises:
        ConfigError: a source or the text is longer than its position table, a stop word or the
            start is not in the vocabulary, or the model was built with sequence parallelism.
        DataError: an empty source, or a number that is not a word of the model.
        LaunchError: the ranks were given different arguments.
        NumericsError: the model predicts NaN or inf.
    """
    words, limits = vocab_size(model), (max_source_length, max_target_length)
    rows = check_together(
        lambda: _checked(sources, settings, tp, words, start_id, limits),
        (settings, start_id),
        tp,
        device_of(model),
    )
    if not rows:
        return []
    with evaluation(model):
        reader = SourceReader(model, rows, start_id, settings.max_new_tokens)
        return decode(reader, settings, tp, on_token)


def generate_beams_from(
    model: SequentialModel,
    sources: Sequence[Sequence[int]],
    settings: GenerationSettings,
    beams: BeamSettings,
    tp: TensorParallel,
    *,
    start_id: int,
    max_source_length: int | None,
    max_target_length: int | None,
) -> list[Beam]:
    """Find the likeliest text for each source by beam search; see ``generate_from``.

    Raises:
        ConfigError: as ``generate_from``; also for settings that do not go with beams.
        DataError, LaunchError, NumericsError: as ``generate_from``.
    """
    words, limits = vocab_size(model), (max_source_length, max_target_length)

    def check() -> list[list[int]]:
        check_beams(settings, beams, words)
        return _checked(sources, settings, tp, words, start_id, limits)

    rows = check_together(check, (settings, beams, start_id), tp, device_of(model))
    if not rows:
        return []
    with evaluation(model):
        reader = SourceReader(model, rows, start_id, settings.max_new_tokens)
        return beam_search(reader, settings, beams, tp)


class SourceReader:
    """Reads sources, then a word a row; see ``ds_engine.inference.decoding.Reader``.

    Args:
        model: encoder-decoder.
        sources: checked word numbers.
        start_id: the decoder's first input.
        max_new_tokens: most words that will be written.
    """

    def __init__(
        self,
        model: SequentialModel,
        sources: Sequence[Sequence[int]],
        start_id: int,
        max_new_tokens: int,
    ) -> None:
        self.written = [[start_id] for _ in sources]
        self._model = model
        # The last word is never read again, so the start takes its place.
        self._cache = EncoderDecoderCache(len(sources), max_new_tokens)
        device = device_of(model)
        first = torch.zeros(len(sources), 1, dtype=torch.long, device=device)
        samples = torch.arange(len(sources), device=device)
        source = right_padded(sources, device)
        start = torch.full_like(first, start_id)
        self._inputs: tuple[Tensor, ...] = (*source, start, first, first, samples)

    def read(self, tokens: Tensor | None) -> Tensor:
        """See ``Reader``."""
        if tokens is not None:
            *_, positions, segments, sample_ids = self._inputs
            nothing = tokens.new_empty(tokens.shape[0], 0)
            target = (tokens[:, None], positions + 1, segments)
            self._inputs = (nothing, nothing, nothing, *target, sample_ids)
        return self._model(self._inputs, None, self._cache)[:, -1].float()

    def reorder(self, rows: Tensor) -> None:
        """See ``Reader``."""
        self._cache.reorder(rows)
        self._inputs = tuple(part.index_select(0, rows) for part in self._inputs)


def _checked(
    sources: Sequence[Sequence[int]],
    settings: GenerationSettings,
    tp: TensorParallel,
    words: int | None,
    start_id: int,
    limits: tuple[int | None, int | None],
) -> list[list[int]]:
    """The sources as plain lists, or the reason why nothing can be written for them."""
    max_source_length, max_target_length = limits
    check_model(settings, tp, words)
    if start_id < 0 or (words is not None and start_id >= words):
        raise ConfigError(
            f"the decoder's start id {start_id} is no word of the model, whose model.vocab_size = "
            f"{words}; use the start id that it was trained with"
        )
    if max_target_length is not None and settings.max_new_tokens > max_target_length:
        raise ConfigError(
            f"generation.max_new_tokens = {settings.max_new_tokens} is more than the "
            f"{max_target_length} positions of the decoder's learned table; lower it to at most "
            f"{max_target_length}"
        )
    rows = [check_words(number, source, words) for number, source in enumerate(sources)]
    for number, row in enumerate(rows):
        if max_source_length is not None and len(row) > max_source_length:
            raise ConfigError(
                f"prompt {number} has {len(row)} tokens, more than the {max_source_length} "
                "positions of the encoder's learned table; shorten the prompt"
            )
    return rows
