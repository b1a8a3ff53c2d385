"""Continuing prompts with a trained model, as a plain process or one rank of a tensor group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_engine.errors import ConfigError
from ds_engine.inference.generate import generate
from ds_engine.inference.sampling import GenerationSettings
from launch.inference import connect, load_model, open_run
from preprocessing.tokenize import load_tokenizer


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
) -> list[str] | None:
    """Continue the prompts; None on ranks other than 0, which should print nothing.

    An empty prompt starts a document.

    Args:
        run: run folder or checkpoint folder.
        tensor: tensor-parallel degree, the number of processes.
        tokenizer: instead of the run's own.

    Raises:
        DsEngineError: no checkpoint, no tokenizer, or a prompt that does not fit the model.
    """
    saved = open_run(run, tokenizer)
    if saved.tokenizer is None:
        raise ConfigError(
            f"{saved.checkpoint} names no tokenizer (data.tokenizer is null); give one with "
            "--tokenizer"
        )
    words = load_tokenizer(saved.tokenizer)
    context = connect(tensor)
    tp = context.tensor_parallel(sequence_parallel=False)
    model = load_model(saved, tp)
    settings = GenerationSettings(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_ids=(words.eod_id,),
        seed=sampling.seed,
    )
    learned = saved.run.model.get("position", {}).get("type", "learned") == "learned"
    new = generate(
        model,
        [words.encode(text) or [words.eod_id] for text in prompts],
        settings,
        tp,
        max_sequence_length=saved.model.max_sequence_length if learned else None,
    )
    texts = [text + words.decode(ids) for text, ids in zip(prompts, new, strict=True)]
    return texts if context.rank == 0 else None
