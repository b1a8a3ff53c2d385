"""Rules between the objective, the model and the lengths of a run, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_engine.config.objective import (
    LENGTH_MULTIPLE,
    ObjectiveConfig,
    ObjectiveType,
    default_decoder_length,
)
from ds_engine.config.reader import raise_problems
from ds_engine.config.schema import RunConfig
from models.bert_config import BertConfig
from models.registry import ModelConfig

# The first is what "auto" means.
FAMILY_OBJECTIVES: Mapping[str, tuple[ObjectiveType, ...]] = {
    "gpt": ("causal_lm",),
    "t5": ("span_corruption", "prefix_lm", "ul2", "text_to_text"),
    "bert": ("masked_lm", "classification"),
}
KEY = "data.objective"


@dataclass(frozen=True)
class ResolvedData:
    """What ``resolve_data`` finds.

    Attributes:
        run: The run, with the objective's type and the decoder's length filled in where they
            are known.
        problems: Why the model cannot be trained for this objective; empty: it can.
    """

    run: RunConfig
    problems: tuple[str, ...]


def resolve_objective(run: RunConfig, model: ModelConfig) -> ObjectiveConfig:
    """The objective of a run; its type is never "auto".

    Raises:
        ConfigError: It does not fit the model.
    """
    resolved = resolve_data(run, model)
    raise_problems(resolved.problems)
    return resolved.run.data.objective


def resolve_data(run: RunConfig, model: ModelConfig) -> ResolvedData:
    """Fills in what the model's family says about the data section, and checks the two."""
    data = run.data
    objective = data.objective
    problems = []
    if objective.type == "auto":
        objective = replace(objective, type=_automatic(model))
        problems += objective.unread_keys(KEY)
    decoder = data.decoder_sequence_length
    if model.is_encoder_decoder and decoder is None:
        decoder = default_decoder_length(objective, data.sequence_length)
    resolved = replace(
        run, data=replace(data, objective=objective, decoder_sequence_length=decoder)
    )
    known = FAMILY_OBJECTIVES[model.family]
    if objective.type not in known:
        choice = " or ".join(f'"{name}"' for name in known)
        problems.append(
            f"{KEY}.type = {objective.type} is not for model.family = {model.family}; use {choice}"
        )
        return ResolvedData(resolved, tuple(problems))
    problems += _check_decoder(resolved, model)
    problems += _check_heads(objective, model)
    if objective.type == "classification" and run.training.z_loss > 0:
        problems.append(
            f"training.z_loss = {run.training.z_loss:g} has no effect on classes "
            f"({KEY}.type = classification); set it to 0"
        )
    problems += _check_data(resolved)
    return ResolvedData(resolved, tuple(problems))


def _automatic(model: ModelConfig) -> ObjectiveType:
    if isinstance(model, BertConfig) and model.num_labels is not None:
        return "classification"
    return FAMILY_OBJECTIVES[model.family][0]


def _check_decoder(run: RunConfig, model: ModelConfig) -> list[str]:
    length, key = run.data.decoder_sequence_length, "data.decoder_sequence_length"
    if model.is_encoder_decoder and length is None:
        return [
            f"{key} is missing; {KEY}.type = {run.data.objective.type} needs it: the tokens of "
            "the longest target, with its end"
        ]
    if not model.is_encoder_decoder and length is not None:
        return [
            f"{key} = {length} is set but model.family = {model.family} has no decoder of its "
            "own; remove it"
        ]
    return []


def short_decoder(run: RunConfig) -> list[str]:
    """A warning where the decoder holds too little for rows that fill the encoder; else nothing.

    Such rows are legal: each takes less text, and the rest of the encoder is padding.

    Args:
        run: its objective's type and its lengths are filled in.
    """
    data = run.data
    length, encoder = data.decoder_sequence_length, data.sequence_length
    fitting = default_decoder_length(data.objective, encoder)
    if length is None or fitting is None or length > fitting - LENGTH_MULTIPLE:
        return []
    return [
        f"data.decoder_sequence_length = {length} does not hold the targets of "
        f"data.sequence_length = {encoder} tokens: each row takes less text, and the rest of the "
        f"encoder is padding; use {fitting}, or lower data.sequence_length"
    ]


def _check_heads(objective: ObjectiveConfig, model: ModelConfig) -> list[str]:
    if not isinstance(model, BertConfig):
        return []
    if objective.type == "classification":
        if model.num_labels is None:
            return [
                f"{KEY}.type = classification needs model.num_labels, the number of classes; "
                f'set it, or use the type "masked_lm"'
            ]
        return []
    if model.num_labels is not None:
        return [
            f"model.num_labels = {model.num_labels} makes a model that classifies, but "
            f'{KEY}.type = masked_lm; remove num_labels, or use the type "classification"'
        ]
    sentence = objective.sentence
    if model.sentence_head and sentence == "none":
        return [
            f"model.sentence_head = true but {KEY}.sentence = none, so the head would never "
            'learn; set model.sentence_head to false, or the objective to "next_sentence" or '
            '"sentence_order"'
        ]
    if not model.sentence_head and sentence != "none":
        return [
            f"{KEY}.sentence = {sentence} needs model.sentence_head = true, which is false; set "
            'it to true, or the objective to "none"'
        ]
    if sentence != "none" and model.num_token_types == 1:
        return [
            f"{KEY}.sentence = {sentence} gives the parts of a row types 0 and 1, but "
            "model.num_token_types = 1; use 2, or 0 for a model without types"
        ]
    return []


def _check_data(run: RunConfig) -> list[str]:
    objective, problems = run.data.objective, []
    if objective.type != "causal_lm" and run.data.tokenizer is None:
        problems.append(
            f"data.tokenizer is missing; {KEY}.type = {objective.type} takes its special tokens "
            "from it"
        )
    packs_freely = objective.type == "causal_lm" or (
        objective.type == "masked_lm" and objective.sentence == "none"
    )
    if not run.data.isolate_documents and not packs_freely:
        words = str(objective.type)
        if objective.type == "masked_lm":
            words = f"masked_lm with sentence = {objective.sentence}"
        problems.append(
            f"data.isolate_documents = false is not for {KEY}.type = {words}, whose examples "
            "must not see each other; set it to true"
        )
    return problems
