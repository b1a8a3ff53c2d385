"""Continuing prompts with a trained model, as a plain process or one rank of a tensor group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_engine.errors import ConfigError
from ds_engine.inference.generate import generate
from ds_engine.inference.sampling import GenerationSettings
from launch.inference import connect, load_model, open_run
from preprocessing.tokenize import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; see ``GenerationSettings``."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


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

    An empty prompt starts a document.

    Args:
        run: run folder or checkpoint folder.
        tensor: tensor-parallel degree, the number of processes.
        tokenizer: instead of the run's own.
        eod: token that ended the documents of the training data, see ``load_tokenizer``.

    Raises:
        DsEngineError: no checkpoint, no tokenizer, or a prompt that does not fit the model.
    """
    saved = open_run(run, tokenizer)
    if saved.tokenizer is None:
        raise ConfigError(
            f"{saved.checkpoint} names no tokenizer (data.tokenizer is null); give one with "
            "--tokenizer"
        )
    words = load_tokenizer(saved.tokenizer, eod=eod)
    context = connect(tensor)
    tp = context.tensor_parallel(sequence_parallel=False)
    model = load_model(saved, tp)
    settings = GenerationSettings(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_ids=(words.eod_id,),
        vocab_limit=words.vocab_size,
        seed=sampling.seed,
    )
    encoded = [words.encode(text) for text in prompts]
    new = generate(
        model,
        [ids or [words.eod_id] for ids in encoded],
        settings,
        tp,
        max_sequence_length=saved.model.position_limit,
    )
    if context.rank != 0:
        return None
    rows = zip(prompts, encoded, new, strict=True)
    return [continued(words, text, old, added) for text, old, added in rows]


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
