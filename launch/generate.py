"""Writing texts with a trained model, as a plain process or one rank of a tensor group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_engine.errors import ConfigError
from ds_engine.inference.beam import BeamSettings
from ds_engine.inference.encoder_decoder import generate_beams_from, generate_from
from ds_engine.inference.generate import generate, generate_beams
from ds_engine.inference.sampling import GenerationSettings
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from launch.inference import (
    SavedRun,
    connect,
    encode_with_gaps,
    load_model,
    open_run,
    run_special_ids,
    run_tokenizer,
)
from preprocessing.tokenize import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; see ``GenerationSettings`` and ``BeamSettings``."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0

    @property
    def beams(self) -> BeamSettings | None:
        """The search, or None without one."""
        beams = BeamSettings(self.num_beams, self.length_penalty)
        return beams if self.num_beams > 1 else None

    def settings(self, stop_id: int, vocab_limit: int) -> GenerationSettings:
        """What the engine's generation takes."""
        return GenerationSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_ids=(stop_id,),
            vocab_limit=vocab_limit,
            seed=self.seed,
        )


def generate_texts(
    run: Path,
    prompts: tuple[str, ...],
    sampling: Sampling,
    *,
    tensor: int = 1,
    tokenizer: Path | None = None,
    eod: str | None = None,
) -> list[str] | None:
    """Continue the prompts; None on ranks other than 0, which should print nothing.

    An empty prompt starts a document. For an encoder-decoder, prompts are what the encoder reads,
    in which names of sentinels stand for sentinels, and the texts are what the decoder writes.

    Args:
        run: run folder or checkpoint folder.
        tensor: tensor-parallel degree, the number of processes.
        tokenizer: instead of the run's own.
        eod: token that ended the documents of the training data, see ``load_tokenizer``.

    Raises:
        DsEngineError: no checkpoint, no tokenizer, a model that writes no text, or a prompt that
            does not fit the model.
    """
    saved = open_run(run, tokenizer)
    if saved.model.family == "bert":
        raise ConfigError(
            f"{saved.checkpoint} is a BERT, which fills masked words and writes no text; use "
            f'ds-engine fill-mask --checkpoint {run} --text "... [MASK] ..."'
        )
    if eod is not None and saved.model.is_encoder_decoder:
        raise ConfigError(
            f"--eod {eod} has no effect: the texts of {saved.checkpoint} end with the token that "
            "its run's data.objective.special_tokens.eos names (by convention </s>); leave it out"
        )
    words = run_tokenizer(saved, eod=eod)
    context = connect(tensor)
    tp = context.tensor_parallel(sequence_parallel=False)
    model = load_model(saved, tp)
    write = _answers if saved.model.is_encoder_decoder else _continuations
    texts = write(model, saved, words, prompts, sampling, tp)
    return texts if context.rank == 0 else None


def _continuations(
    model: SequentialModel,
    saved: SavedRun,
    words: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    tp: TensorParallel,
) -> list[str]:
    """Each prompt with what a decoder writes behind it."""
    settings, beams = sampling.settings(words.eod_id, words.vocab_size), sampling.beams
    encoded = [words.encode(text) for text in prompts]
    read = [ids or [words.eod_id] for ids in encoded]
    limit = saved.model.position_limit
    if beams is None:
        new = generate(model, read, settings, tp, max_sequence_length=limit)
    else:
        found = generate_beams(model, read, settings, beams, tp, max_sequence_length=limit)
        new = [beam.tokens for beam in found]
    rows = zip(prompts, encoded, new, strict=True)
    return [continued(words, text, old, added) for text, old, added in rows]


def _answers(
    model: SequentialModel,
    saved: SavedRun,
    words: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    tp: TensorParallel,
) -> list[str]:
    """What an encoder-decoder writes for each prompt; sentinels appear by their names."""
    ids = run_special_ids(saved, words)
    if ids.eos is None or ids.start is None:
        raise ConfigError(
            f"{saved.tokenizer} has no token that {'ends' if ids.eos is None else 'starts'} a "
            "text; name it in the run's data.objective.special_tokens"
        )
    settings, beams = sampling.settings(ids.eos, words.vocab_size), sampling.beams
    sentinels = set(ids.sentinels)
    names = {name: number for name, number in words.vocabulary.items() if number in sentinels}
    # mT5's sentinels begin with the sign of a space, which nobody types.
    typed = {name.removeprefix("\u2581"): number for name, number in names.items()}
    sources = [[*encode_with_gaps(words, text, typed), ids.eos] for text in prompts]
    limit = saved.model.position_limit
    if beams is None:
        new = generate_from(
            model,
            sources,
            settings,
            tp,
            start_id=ids.start,
            max_source_length=limit,
            max_target_length=limit,
        )
    else:
        found = generate_beams_from(
            model,
            sources,
            settings,
            beams,
            tp,
            start_id=ids.start,
            max_source_length=limit,
            max_target_length=limit,
        )
        new = [beam.tokens for beam in found]
    return [words.decode(row) for row in new]


def continued(tokenizer: Tokenizer, text: str, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The prompt, as it was given, with its continuation.

    Many tokenizers (sentencepiece, Metaspace, WordPiece) write the space before a word only where
    something stands before it, so the new ids are decoded behind those of the prompt.

    Args:
        tokenizer: of the ids.
        text: the prompt.
        prompt: its ids; none for an empty text.
        new: ids of the continuation.
    """
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    if not whole.startswith(before):
        # The decoder rewrites the prompt's end in the light of what follows ("do n't" to "don't").
        return text + tokenizer.decode(new)
    added = whole[len(before) :]
    if text.endswith(" ") and not before.endswith(" "):
        # The tokenizer dropped the prompt's last space: the next word's own would be a second one.
        added = added.removeprefix(" ")
    return text + added
