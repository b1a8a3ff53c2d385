"""Beam search: of each prompt the likeliest continuations that a search of fixed width can find.

At each step the ``W`` running beams of a prompt offer all their continuations, and the best ``W``
that do not end go on. One that ends (a stop word, or the last step) and is among the best ``W`` is
a hypothesis with the score

    (sum of the log-probabilities of its new words, stop word included) / (their number) ** penalty

and the best ``W`` hypotheses are kept. These are the rules of the beam search in transformers, so
that equal weights find equal texts.

Legend: ``B`` prompts, ``W`` beams of each, ``V`` words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ds_engine.errors import ConfigError
from ds_engine.inference.decoding import Reader, agree, seen_words
from ds_engine.inference.sampling import GenerationSettings, log_probabilities
from ds_engine.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class BeamSettings:
    """How wide to search, and what is best.

    Attributes:
        num_beams: Beams of each prompt that go on at each step.
        length_penalty: Power of the length by which a sum of log-probabilities is divided: above 0
            longer texts are preferred, below 0 shorter ones; 0: the likeliest text as a whole.
        early_stopping: Stop at a prompt as soon as it has num_beams hypotheses; false: only when
            its best running beam, were it to end now, is no better than the worst of them.

    Raises:
        ConfigError: a value is out of its range.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.num_beams < 1:
            problems.append(
                f"generation.num_beams = {self.num_beams} must be at least 1; use 1 for no search"
            )
        if not math.isfinite(self.length_penalty):
            problems.append(
                f"generation.length_penalty = {self.length_penalty} must be a finite number; use 1 "
                "to compare mean log-probabilities"
            )
        if problems:
            raise ConfigError("\n".join(problems))


class Beam(NamedTuple):
    """The best hypothesis of a prompt.

    Attributes:
        tokens: the new words, without the stop word.
        score: see the top of this file; comparable between texts of one prompt.
    """

    tokens: list[int]
    score: float


def check_beams(settings: GenerationSettings, beams: BeamSettings, words: int | None) -> None:
    """Refuse settings that a beam search cannot honour.

    Args:
        settings: of the generation.
        beams: of the search.
        words: of the model; None: unknown.

    Raises:
        ConfigError: sampling is asked for, or there are too few words for so many beams.
    """
    if settings.temperature > 0:
        raise ConfigError(
            f"generation.temperature = {settings.temperature} draws at random and "
            f"generation.num_beams = {beams.num_beams} searches for the likeliest text; use "
            "temperature 0 with beams, or num_beams 1"
        )
    limits = [limit for limit in (settings.vocab_limit, words) if limit is not None]
    needed = _candidates(settings, beams)
    if limits and needed > min(limits):
        raise ConfigError(
            f"generation.num_beams = {beams.num_beams} with {len(settings.stop_ids)} stop words "
            f"compares {needed} words a step, and there are {min(limits)}; use fewer beams"
        )


@torch.no_grad()
def beam_search(
    reader: Reader, settings: GenerationSettings, beams: BeamSettings, tp: TensorParallel
) -> list[Beam]:
    """Search with a reader of one row a prompt; the model must be in evaluation mode.

    Returns:
        The best hypothesis of each prompt; the same on all ranks.

    Raises:
        NumericsError: the model predicts NaN or inf.
    """
    batch, width = len(reader.written), beams.num_beams
    searches = [_Search(settings, beams) for _ in range(batch)]
    scores: Tensor | None = None
    tokens: Tensor | None = None
    seen: Tensor | None = None
    for step in range(1, settings.max_new_tokens + 1):
        logits = reader.read(tokens)
        if settings.repetition_penalty != 1 and seen is None:
            seen = seen_words(reader.written, logits)
        totals = log_probabilities(logits, settings, seen)
        if scores is not None:
            totals = totals + scores[:, None]
        words = totals.shape[-1]
        values, places = totals.view(batch, -1).topk(_candidates(settings, beams))
        candidates = zip(agree(values, tp).tolist(), agree(places, tp).tolist(), strict=True)
        running: list[_Running] = []
        for prompt, (search, (value, place)) in enumerate(zip(searches, candidates, strict=True)):
            # In the first step a prompt has one row; all its beams come out of it.
            first = prompt * (1 if step == 1 else width)
            found = [(v, *divmod(p, words)) for v, p in zip(value, place, strict=True)]
            running += search.step(found, step, first)
        if step == settings.max_new_tokens or all(search.done for search in searches):
            break
        device = logits.device
        rows = torch.tensor([beam.row for beam in running], device=device)
        tokens = torch.tensor([beam.token for beam in running], device=device)
        scores = torch.tensor([beam.total for beam in running], dtype=totals.dtype, device=device)
        if [beam.row for beam in running] != list(range(logits.shape[0])):
            reader.reorder(rows)
        if seen is not None:
            seen = seen.index_select(0, rows).scatter_(1, tokens[:, None], value=True)
    return [search.hypotheses[0] for search in searches]


class _Running(NamedTuple):
    """A beam that goes on: the row that it continues, its new word and its sum."""

    row: int
    token: int
    total: float


@dataclass
class _Search:
    """What is known of one prompt; plain numbers that are the same on all ranks."""

    settings: GenerationSettings
    beams: BeamSettings
    texts: list[list[int]] = field(default_factory=lambda: [[]])
    hypotheses: list[Beam] = field(default_factory=list)
    done: bool = False

    def step(
        self, candidates: list[tuple[float, int, int]], length: int, first_row: int
    ) -> list[_Running]:
        """Take the best continuations; return the beams that go on.

        Args:
            candidates: (sum, beam, word), best first.
            length: words of each continuation.
            first_row: row of this prompt's first beam in the batch.
        """
        width, norm = self.beams.num_beams, length**self.beams.length_penalty
        last = length == self.settings.max_new_tokens
        running: list[_Running] = []
        texts: list[list[int]] = []
        ended: list[Beam] = []
        for place, (total, beam, token) in enumerate(candidates):
            stops = token in self.settings.stop_ids
            if stops or last:
                if place < width:
                    text = self.texts[beam] if stops else [*self.texts[beam], token]
                    ended.append(Beam(text, total / norm))
            elif len(running) < width:
                running.append(_Running(first_row + beam, token, total))
                texts.append([*self.texts[beam], token])
        self.texts = texts
        if not self.done:
            merged = sorted(self.hypotheses + ended, key=lambda beam: -beam.score)
            self.hypotheses = merged[:width]
            self.done = self._settled(running[0].total / norm if running else -math.inf)
        return running

    def _settled(self, best_running: float) -> bool:
        if len(self.hypotheses) < self.beams.num_beams:
            return False
        return self.beams.early_stopping or best_running <= self.hypotheses[-1].score


def _candidates(settings: GenerationSettings, beams: BeamSettings) -> int:
    """Continuations to compare: so many that ``num_beams`` are left if all stop words come."""
    return max(2, 1 + len(set(settings.stop_ids))) * beams.num_beams
