"""From a checked run to its objective: what a sample is, and what is predicted from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ds_engine.config.objective import ObjectiveConfig
from ds_engine.config.schema import RunConfig
from ds_engine.data.causal_lm import CausalLM
from ds_engine.data.classification import Classification
from ds_engine.data.denoisers import Denoiser, MixtureOfDenoisers, PrefixLM
from ds_engine.data.masked_lm import MaskedLM
from ds_engine.data.masking import MaskingOptions
from ds_engine.data.objective import Objective, SpecialIds
from ds_engine.data.sentence_pairs import SentencePairs
from ds_engine.data.span_corruption import SpanCorruption
from ds_engine.data.text_to_text import TextToText
from ds_engine.errors import ConfigError
from launch.check_objective import resolve_data
from models.bert_config import BertConfig
from models.registry import ModelConfig
from preprocessing.special_tokens import special_ids
from preprocessing.tokenize import Tokenizer, load_tokenizer


def make_objective(run: RunConfig, model: ModelConfig, tokenizer: Path | None = None) -> Objective:
    """The objective of a run.

    Args:
        run: a checked run.
        model: its model.
        tokenizer: where the run's tokenizer lies; None: where ``data.tokenizer`` says.

    Raises:
        DsEngineError: the tokenizer cannot be opened, lacks a token that the objective needs, or
            has ids that the model does not know.
    """
    run = resolve_data(run, model).run
    data, config = run.data, run.data.objective
    if config.type == "causal_lm":
        return CausalLM(data.sequence_length, data.isolate_documents)
    place = tokenizer or data.tokenizer
    assert place is not None  # check_run says so
    words = load_tokenizer(place)
    ids = special_ids(words, names=asdict(config.special_tokens))
    _check_ids(ids, model)
    if isinstance(model, BertConfig):
        return _bert(run, model, words, ids)
    return _t5(run, words, ids)


def _check_ids(ids: SpecialIds, model: ModelConfig) -> None:
    largest = max(ids.special, default=-1)
    if largest >= model.vocab_size:
        raise ConfigError(
            f"the tokenizer has a special token with id {largest}, but model.vocab_size = "
            f"{model.vocab_size}; raise model.vocab_size to at least {largest + 1}, or use the "
            "model's own tokenizer"
        )


def _bert(run: RunConfig, model: BertConfig, words: Tokenizer, ids: SpecialIds) -> Objective:
    data, config = run.data, run.data.objective
    if config.type == "classification":
        assert model.num_labels is not None
        return Classification(
            data.sequence_length, ids, model.num_labels, run.seed, config.truncate
        )
    masking = MaskingOptions(
        mask_probability=config.mask_probability,
        mask_token_share=config.mask_token_share,
        random_token_share=config.random_token_share,
        whole_word=config.whole_word,
        max_ngram=config.max_ngram,
    )
    # Random words are drawn from the tokenizer's: the model's table may be larger.
    vocab_size = min(words.vocab_size, model.vocab_size)
    if config.sentence == "none":
        return MaskedLM(
            data.sequence_length, ids, vocab_size, run.seed, masking, data.isolate_documents
        )
    return SentencePairs(config.sentence, data.sequence_length, ids, vocab_size, run.seed, masking)


def _t5(run: RunConfig, words: Tokenizer, ids: SpecialIds) -> Objective:
    data, config = run.data, run.data.objective
    assert data.decoder_sequence_length is not None
    encoder, decoder, drop = data.sequence_length, data.decoder_sequence_length, words.eod_id
    if config.type == "text_to_text":
        return TextToText(
            encoder_length=encoder,
            decoder_length=decoder,
            ids=ids,
            seed=run.seed,
            truncate=config.truncate,
            drop_final=drop,
        )
    if config.type == "prefix_lm":
        return PrefixLM(
            encoder_length=encoder,
            decoder_length=decoder,
            ids=ids,
            seed=run.seed,
            drop_final=drop,
        )
    if config.type == "ul2":
        return MixtureOfDenoisers(
            encoder_length=encoder,
            decoder_length=decoder,
            ids=ids,
            seed=run.seed,
            drop_final=drop,
            denoisers=_denoisers(config, words),
        )
    return SpanCorruption(
        encoder_length=encoder,
        decoder_length=decoder,
        ids=ids,
        seed=run.seed,
        drop_final=drop,
        noise_density=config.noise_density,
        mean_span_length=config.mean_span_length,
    )


def _denoisers(config: ObjectiveConfig, words: Tokenizer) -> tuple[Denoiser, ...]:
    found = []
    for number, part in enumerate(config.mixture):
        mode = None
        if part.mode_token is not None:
            mode = words.token_id(part.mode_token)
            if mode is None:
                raise ConfigError(
                    f"data.objective.denoisers.{number}.mode_token = {part.mode_token!r} is not a "
                    "token of the tokenizer; use one of its tokens, or null"
                )
        found.append(
            Denoiser(
                type=part.type,
                noise_density=part.noise_density,
                mean_span_length=part.mean_span_length,
                weight=part.weight,
                mode_id=mode,
            )
        )
    return tuple(found)
