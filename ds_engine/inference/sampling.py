"""From logits to the next token: pure functions on (B, V) tensors.

Each filter maps log-weights to log-weights, with -inf for words that may not come. A row's result
depends on that row alone, and its random number comes from that row's own generator: neither the
neighbours in a batch nor the layout of the model changes what a seed gives.

Legend: ``B`` batch, ``V`` words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_engine.errors import ConfigError, NumericsError
from ds_engine.parallel.init import derive_seed


@dataclass(frozen=True)
class GenerationSettings:
    """How to continue a prompt.

    Attributes:
        max_new_tokens: Most tokens that are added to each prompt.
        temperature: Divides the logits; below 1 sharper, above 1 flatter; 0: always the likeliest
            word (greedy).
        top_k: Draw among this many likeliest words only; null: all.
        top_p: Draw among the fewest likeliest words that together have at least this probability
            (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751); 1: all.
        repetition_penalty: Above 1, lowers words that the row already holds (Keskar et al. 2019,
            arXiv:1909.05858); 1: none.
        stop_ids: Words that end a row; they are not part of the result.
        vocab_limit: Only words below this number may come: the tokenizer's size, where the model
            has room for more; null: all of the model's.
        seed: Of all random choices; row i of a batch draws from a stream of its own.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    vocab_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "be at least 1"),
            (
                "temperature",
                0 <= self.temperature < math.inf,
                "be a finite number of at least 0; use 0 for greedy choice",
            ),
            (
                "top_k",
                self.top_k is None or self.top_k >= 1,
                "be at least 1; use null (None) to draw among all words",
            ),
            (
                "top_p",
                0 < self.top_p <= 1,
                "be above 0 and at most 1; use 1 to draw among all words",
            ),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "be a finite number above 0; use 1 for no penalty",
            ),
            (
                "stop_ids",
                all(token >= 0 for token in self.stop_ids),
                "hold numbers of words, which are at least 0",
            ),
            (
                "vocab_limit",
                self.vocab_limit is None or self.vocab_limit > max((0, *self.stop_ids)),
                "be at least 1 and above all stop_ids; use the size of the tokenizer, or null "
                "(None) for all words of the model",
            ),
        )
        problems = [
            f"generation.{name} = {getattr(self, name)} must {rule}"
            for name, fits, rule in rules
            if not fits
        ]
        if problems:
            raise ConfigError("\n".join(problems))


def row_generators(seed: int, batch: int) -> list[torch.Generator]:
    """One generator a row, seeded by (seed, row); on the CPU, so that a device changes nothing."""
    return [
        torch.Generator().manual_seed(derive_seed(seed, "generation", row)) for row in range(batch)
    ]


def keep_below(logits: Tensor, limit: int) -> Tensor:
    """Keep the words numbered below ``limit``; -inf elsewhere."""
    words = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(words >= limit, float("-inf"))


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make words less likely that a row already holds (Keskar et al. 2019, section 4.1).

    Args:
        logits: (B, V).
        seen: (B, V) bool, True for words of the prompt and of what was generated.
        penalty: positive logits are divided by it and negative ones multiplied.
    """
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide by a temperature above 0, in float64; the likeliest word of each row becomes 0.

    The maximum is subtracted first: it changes no probability, and no temperature, however small,
    can then overflow to inf - inf.
    """
    logits = logits.double()
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, count: int) -> Tensor:
    """Keep exactly the ``count`` largest of each row (all, if there are fewer); -inf elsewhere."""
    values, words = logits.topk(min(count, logits.shape[-1]))
    return torch.full_like(logits, float("-inf")).scatter(-1, words, values)


def keep_top_p(logits: Tensor, mass: float) -> Tensor:
    """Keep the nucleus (Holtzman et al. 2020): the fewest likeliest words that reach ``mass``.

    A word stays if those that are likelier do not reach the mass, so the likeliest always stays.
    """
    ordered, words = torch.sort(logits, dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill(before >= mass, float("-inf"))
    return torch.empty_like(logits).scatter(-1, words, ordered)


def distribution(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """(B, V) logits -> (B, V) float64 probabilities to draw from; needs a temperature above 0.

    Temperature comes first, then top-k, then top-p on what top-k left.
    """
    logits = apply_temperature(logits, settings.temperature)
    if settings.top_k is not None:
        logits = keep_top_k(logits, settings.top_k)
    if settings.top_p < 1:
        logits = keep_top_p(logits, settings.top_p)
    return logits.softmax(-1)


def draw(probabilities: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw a word from each row, by inverting its cumulative distribution at one random number.

    One number a row, whatever V is, and rounding differences between layouts can change a word
    only where that number falls within them.

    Args:
        probabilities: (B, V) float64; a row need not sum to 1.
        generators: one a row, on the CPU.

    Returns:
        (B,) int64, each with a probability above 0.
    """
    numbers = [torch.rand((), dtype=torch.float64, generator=g) for g in generators]
    cumulative = probabilities.cumsum(-1)
    at = torch.stack(numbers).to(probabilities.device)[:, None] * cumulative[:, -1:]
    words = torch.searchsorted(cumulative, at, right=True)
    words = words.clamp(max=probabilities.shape[-1] - 1)
    # Parallel sums on a GPU are not exactly monotonic, so a word that may not come could be hit.
    possible = probabilities.gather(-1, words) > 0
    return torch.where(possible, words, probabilities.argmax(-1, keepdim=True))[:, 0]


def check_finite(logits: Tensor) -> None:
    """Refuse logits that a model with sound weights does not make.

    Raises:
        NumericsError: a row has NaN or inf, or forbids all words.
    """
    largest = logits.amax(-1)  # NaN if any logit is
    if not bool(largest.isfinite().all()):
        row = int((~largest.isfinite()).nonzero()[0])
        raise NumericsError(
            f"the largest logit of row {row} is {float(largest[row])} but must be finite: the "
            "weights are damaged or overflow in this dtype; load another checkpoint, or generate "
            "in bfloat16 or float32"
        )


def log_probabilities(logits: Tensor, settings: GenerationSettings, seen: Tensor | None) -> Tensor:
    """(R, V) logits -> (R, V) float64 log-probabilities for a search; -inf forbids a word.

    The vocabulary limit comes first; then the repetition penalty acts on the log-probabilities,
    which it leaves without a sum of 1, as in transformers.

    Raises:
        NumericsError: a row has NaN or inf, or forbids all words.
    """
    if settings.vocab_limit is not None:
        logits = keep_below(logits, settings.vocab_limit)
    check_finite(logits)
    logits = logits.double().log_softmax(-1)
    if seen is not None:
        logits = penalise_repetition(logits, seen, settings.repetition_penalty)
    return logits


def choose(
    logits: Tensor,
    settings: GenerationSettings,
    generators: Sequence[torch.Generator],
    seen: Tensor | None = None,
) -> Tensor:
    """Choose each row's next word.

    Args:
        logits: (B, V) float32; -inf forbids a word.
        settings: see ``GenerationSettings``.
        generators: one a row, see ``row_generators``; each advances by one number a call, and by
            none for greedy choice.
        seen: (B, V) bool, see ``penalise_repetition``; needed for a penalty other than 1.

    Returns:
        (B,) int64.

    Raises:
        NumericsError: a row has NaN or inf, or forbids all words.
        ValueError: the number of generators is not B, or ``seen`` is missing.
    """
    if len(generators) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows need as many generators, not {len(generators)}")
    if settings.repetition_penalty != 1:
        if seen is None:
            raise ValueError("a repetition penalty needs the words seen so far")
        logits = penalise_repetition(logits, seen, settings.repetition_penalty)
    if settings.vocab_limit is not None:
        logits = keep_below(logits, settings.vocab_limit)
    check_finite(logits)
    if settings.temperature == 0:
        return logits.argmax(-1)
    return draw(distribution(logits, settings), generators)
