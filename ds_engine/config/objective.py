"""What a model learns to predict, as frozen dataclasses, and the lengths that follow from it.

The keys are documented here; what each objective does with them is in ``ds_engine/data``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ds_engine.config.reader import AboveZero, Positive, Probability, Range, join_path

Share = Annotated[float, Range(minimum=0, maximum=1)]
Density = Annotated[float, Range(above=0, below=1)]
SpanLength = Annotated[float, Range(minimum=1)]

ObjectiveType = Literal[
    "auto",
    "causal_lm",
    "span_corruption",
    "prefix_lm",
    "ul2",
    "masked_lm",
    "text_to_text",
    "classification",
]

# The keys that each type reads, beside special_tokens, which all read but causal_lm.
OBJECTIVE_KEYS: Mapping[str, tuple[str, ...]] = {
    "causal_lm": (),
    "span_corruption": ("noise_density", "mean_span_length"),
    "prefix_lm": (),
    "ul2": ("denoisers",),
    "masked_lm": (
        "mask_probability",
        "mask_token_share",
        "random_token_share",
        "whole_word",
        "max_ngram",
        "sentence",
    ),
    "text_to_text": ("truncate",),
    "classification": ("truncate",),
}

# A default decoder length is a multiple of this, whatever the layout, so that rows stay the same
# when a run goes on in another one: tensor = 1, 2, 4 and 8 divide it.
LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class DenoiserConfig:
    """One of the denoisers that "ul2" mixes.

    Attributes:
        type: "span" removes spans of the text, "prefix" all after a random point.
        noise_density: Share of the tokens that is removed ("prefix": on average).
        mean_span_length: Average length of a removed span, tokens; "span" only.
        weight: Share of the mixture, relative to the other denoisers' weights.
        mode_token: Token before the input that names the denoiser; null: none.
    """

    type: Literal["span", "prefix"] = "span"
    noise_density: Density = 0.15
    mean_span_length: SpanLength = 3.0
    weight: AboveZero = 1.0
    mode_token: str | None = None

    def check_fields(self, where: str) -> list[str]:
        """A key that the type does not read is refused."""
        if self.type == "span" or self.mean_span_length == 3.0:
            return []
        return [
            f"{join_path(where, 'mean_span_length')} has no effect with "
            f"{join_path(where, 'type')} = {self.type}; remove it"
        ]


# UL2, arXiv:2205.05131, table 1: two regular, one sequential and four extreme denoisers.
UL2_DENOISERS = (
    DenoiserConfig(noise_density=0.15, mean_span_length=3.0),
    DenoiserConfig(noise_density=0.15, mean_span_length=8.0),
    DenoiserConfig(type="prefix", noise_density=0.25),
    DenoiserConfig(noise_density=0.5, mean_span_length=3.0),
    DenoiserConfig(noise_density=0.5, mean_span_length=8.0),
    DenoiserConfig(noise_density=0.15, mean_span_length=64.0),
    DenoiserConfig(noise_density=0.5, mean_span_length=64.0),
)


@dataclass(frozen=True)
class SpecialTokensConfig:
    """Special tokens by their text, where the tokenizer does not follow convention.

    Attributes:
        pad: Fills rows up; null: the tokenizer's pad token by convention.
        eos: Ends an example (T5); null: by convention.
        start: First input of a decoder; null: the pad token, as in T5.
        mask: Takes the place of masked tokens (BERT); null: by convention.
        cls: Begins a row (BERT); null: by convention.
        sep: Ends a part of a row (BERT); null: by convention.
        sentinels: Tokens for removed spans, as a pattern with {} for their number from 0; null:
            by convention, such as `<extra_id_{}>`.
    """

    pad: str | None = None
    eos: str | None = None
    start: str | None = None
    mask: str | None = None
    cls: str | None = None
    sep: str | None = None
    sentinels: str | None = None

    def check_fields(self, where: str) -> list[str]:
        """The pattern must have one place for the number."""
        if self.sentinels is None or self.sentinels.count("{}") == 1:
            return []
        return [
            f'{join_path(where, "sentinels")} = "{self.sentinels}" must hold {{}} once, where the '
            'number of the sentinel stands, such as "<extra_id_{}>"'
        ]


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model learns to predict. A key that the type does not read is refused.

    Attributes:
        type: "causal_lm" (gpt) predicts the next token. For t5: "span_corruption"
            (arXiv:1910.10683) predicts removed spans, "prefix_lm" the rest of a text, "ul2" mixes
            denoisers (arXiv:2205.05131), "text_to_text" predicts the second field of a record
            from its first. For bert: "masked_lm" predicts masked tokens, "classification" the
            label of a record. "auto": the first of the family; "classification" with
            model.num_labels.
        noise_density: "span_corruption": share of the tokens that is removed.
        mean_span_length: "span_corruption": average length of a removed span, tokens.
        denoisers: "ul2": what is mixed; empty: the seven of the paper, without mode tokens.
        mask_probability: "masked_lm": share of the tokens to be predicted.
        mask_token_share: "masked_lm": share of those that the mask token takes the place of.
        random_token_share: "masked_lm": share of those that become a random word; the rest stays.
        whole_word: "masked_lm": whether whole words are masked.
        max_ngram: "masked_lm": longest span of words or tokens that is masked together.
        sentence: "masked_lm": a second loss: whether the second part of a row follows the first
            in its document ("next_sentence", arXiv:1810.04805), or the two parts were swapped
            ("sentence_order", arXiv:1909.11942). Needs data with sentences and
            model.sentence_head.
        truncate: "text_to_text" and "classification": whether examples that are too long are
            cut; false: they are an error.
        special_tokens: Special tokens, where the tokenizer does not follow convention.
    """

    type: ObjectiveType = "auto"
    noise_density: Density = 0.15
    mean_span_length: SpanLength = 3.0
    denoisers: tuple[DenoiserConfig, ...] = ()
    mask_probability: Annotated[float, Range(above=0, maximum=1)] = 0.15
    mask_token_share: Share = 0.8
    random_token_share: Share = 0.1
    whole_word: bool = False
    max_ngram: Positive = 1
    sentence: Literal["none", "next_sentence", "sentence_order"] = "none"
    truncate: bool = False
    special_tokens: SpecialTokensConfig = field(default_factory=SpecialTokensConfig)

    @property
    def mixture(self) -> tuple[DenoiserConfig, ...]:
        """The denoisers of "ul2", with the default filled in."""
        return self.denoisers or UL2_DENOISERS

    def check_fields(self, where: str) -> list[str]:
        """Rules between the fields; which keys "auto" reads is known with the model's family."""
        problems = [] if self.type == "auto" else self.unread_keys(where)
        if self.mask_token_share + self.random_token_share > 1 + 1e-9:
            problems.append(
                f"{join_path(where, 'mask_token_share')} = {self.mask_token_share:g} and "
                f"random_token_share = {self.random_token_share:g} are more than 1 together; "
                "lower one of them"
            )
        return problems

    def unread_keys(self, where: str) -> list[str]:
        """A message for each key that is set but not read by the type, which is not "auto"."""
        defaults = ObjectiveConfig()
        read = OBJECTIVE_KEYS[self.type]
        if self.type != "causal_lm":
            read = (*read, "special_tokens")
        names = {name for keys in OBJECTIVE_KEYS.values() for name in keys} | {"special_tokens"}
        return [
            f"{join_path(where, name)} is set but {join_path(where, 'type')} = {self.type} does "
            "not read it; remove it, or change the type"
            for name in self.__dataclass_fields__
            if name in names - set(read) and getattr(self, name) != getattr(defaults, name)
        ]


def span_corruption_lengths(
    raw: int, noise_density: Probability, mean_span_length: float
) -> tuple[int, int]:
    """Tokens of encoder and decoder that ``raw`` tokens of text become, as in T5.

    Of n tokens round(n x density) are removed in round(removed / mean length) spans, one of each
    at least. The encoder reads what is left, a sentinel for each span and EOS; the decoder
    predicts the removed tokens, a sentinel before each span and EOS (arXiv:1910.10683, section
    3.1.4).
    """
    removed = min(max(round(raw * noise_density), 1), max(raw - 1, 1))
    spans = max(round(removed / mean_span_length), 1)
    return raw - removed + spans + 1, removed + spans + 1


def default_decoder_length(objective: ObjectiveConfig, sequence_length: int) -> int | None:
    """The decoder length for an encoder length, where the objective implies one.

    For "span_corruption": what the longest text that fits the encoder needs (114 for 512 tokens
    at the defaults), rounded up to a multiple of 8. None for other types.
    """
    if objective.type != "span_corruption":
        return None
    density, mean = objective.noise_density, objective.mean_span_length
    # No text is longer than if all that is removed took no place in the encoder.
    most = int(sequence_length / (1 - density)) + 2
    fits = (span_corruption_lengths(raw, density, mean) for raw in range(1, most + 1))
    target = max((target for source, target in fits if source <= sequence_length), default=1)
    return -(-target // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
