"""Classes of texts by a fine-tuned BERT, alone or as one rank of a tensor group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ds_engine.data.classification import truncated_lengths
from ds_engine.data.masked_lm import BertIds, pair_tokens
from ds_engine.errors import ConfigError
from ds_engine.inference.classify import Example, classify
from launch.inference import (
    SavedRun,
    connect,
    load_model,
    open_run,
    run_special_ids,
    run_tokenizer,
)
from launch.labels import Classes, run_classes
from models.bert_config import BertConfig
from preprocessing.tokenize import Tokenizer


class Text(NamedTuple):
    """What is to be classified: a text, or a pair of texts."""

    text: str
    pair: str | None = None

    def short(self) -> str:
        """Its beginning, for people."""
        words = " | ".join(part for part in self if part is not None).replace("\n", " ")
        return words if len(words) <= 60 else f"{words[:57]}..."


def classify_texts(
    run: Path,
    texts: Sequence[Text],
    *,
    tensor: int = 1,
    batch_size: int = 32,
    truncate: bool = False,
    tokenizer: Path | None = None,
) -> list[dict[str, float]] | None:
    """Judge texts; None on ranks other than 0, which should print nothing.

    Args:
        run: run folder or checkpoint folder.
        texts: what to judge, pairs of texts if the run was trained on pairs.
        tensor: tensor-parallel degree, the number of processes.
        batch_size: texts in a forward pass.
        truncate: cut texts that are longer than the run's were, as it does itself with
            ``data.objective.truncate``.
        tokenizer: instead of the run's own.

    Returns:
        For each text the probability of each class, in the order of their numbers; a class that
        nothing names is called by its number.

    Raises:
        DsEngineError: no checkpoint, no tokenizer, a model of another kind, or a text that is
            empty, too long, or no pair where it should be.
    """
    saved = open_run(run, tokenizer)
    model = _classifier(saved, run)
    assert model.num_labels is not None
    classes = run_classes(saved.home, saved.run)
    if classes is None:
        names = tuple(map(str, range(model.num_labels)))
    else:
        names = classes.names
        _check_pairs(texts, classes)
    words = run_tokenizer(saved)
    ids = BertIds.of(run_special_ids(saved, words))
    limit = min(saved.run.data.sequence_length, model.position_limit or model.max_sequence_length)
    cut = truncate or saved.run.data.objective.truncate
    examples = [
        _example(number, text, words, ids, limit=limit, cut=cut)
        for number, text in enumerate(texts, 1)
    ]
    context = connect(tensor)
    tp = context.tensor_parallel(sequence_parallel=False)
    found = classify(
        load_model(saved, tp),
        examples,
        tp,
        batch_size=batch_size,
        max_sequence_length=model.position_limit,
    )
    if context.rank != 0:
        return None
    return [dict(zip(names, row, strict=True)) for row in found]


def _classifier(saved: SavedRun, run: Path) -> BertConfig:
    """The run's model, which classifies.

    Raises:
        ConfigError: it does not.
    """
    model = saved.model
    if not isinstance(model, BertConfig):
        raise ConfigError(
            f"{saved.checkpoint} is of the family {model.family}, which writes text and has no "
            f'classes; use ds-engine generate --checkpoint {run} --prompt "..."'
        )
    if model.num_labels is None:
        raise ConfigError(
            f"{saved.checkpoint} was pretrained and knows no classes (model.num_labels is not "
            "set); fine-tune it: ds-engine train --config ds_configs/runs/bert_classify_tiny.json "
            f"--set checkpoint.initialize_from={run}, or fill masks with it: ds-engine fill-mask"
        )
    return model


def _check_pairs(texts: Sequence[Text], classes: Classes) -> None:
    for number, text in enumerate(texts, 1):
        if (text.pair is not None) == classes.pairs:
            continue
        rule = "pairs of texts; give each --text its --pair"
        if not classes.pairs:
            rule = "single texts; leave --pair out"
        raise ConfigError(f"text {number} ({text.short()}): the run was trained on {rule}")


def _example(
    number: int, text: Text, words: Tokenizer, ids: BertIds, *, limit: int, cut: bool
) -> Example:
    """A text as in training."""
    first = np.array(words.encode(text.text), dtype=np.int64)
    second = None if text.pair is None else np.array(words.encode(text.pair), dtype=np.int64)
    if not len(first):
        raise ConfigError(f"text {number} is empty; leave it out, or write something")
    room = limit - (2 if second is None else 3)
    kept = truncated_lengths(len(first), 0 if second is None else len(second), room)
    if kept[0] < len(first) or (second is not None and kept[1] < len(second)):
        if not cut:
            size = len(first) + (0 if second is None else len(second)) + limit - room
            raise ConfigError(
                f"text {number} ({text.short()}) has {size} tokens, more than the "
                f"{limit} that the run was trained with (data.sequence_length); shorten it, or "
                "let --truncate cut its end"
            )
        first = first[: kept[0]]
        second = None if second is None else second[: kept[1]]
    tokens, place = pair_tokens(first, second, ids)
    return Example(tokens.tolist(), place)
