"""Our BERT computes what Hugging Face's do: logits, loss and every gradient, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ds_engine.pipeline.sequential import SequentialModel
from models.common.classify import Classifier
from models.convert.families import find_hf_family
from models.convert.table import load_full
from tests.models.tiny import (
    assert_parity,
    converted,
    difference,
    gradient_differences,
    hf_model,
    our_model,
    random_tokens,
)

VOCABULARY, LENGTHS = 59, (20, 7, 13)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pretraining": ("ForPreTraining", {}),
    "pretraining-untied": ("ForPreTraining", {**UNTIED, "type_vocab_size": 4}),
    "masked-lm": ("ForMaskedLM", {"hidden_act": "gelu_new"}),
    "masked-lm-untied": ("ForMaskedLM", UNTIED),
    "classification": ("ForSequenceClassification", {"num_labels": 3, "hidden_act": "relu"}),
}


def pair(kind: str, name: str, seed: int) -> tuple[Any, Any, Any]:
    """The family, our config, and a random model of theirs."""
    end, options = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    config.architectures = [kind + end]
    theirs = hf_model(config, getattr(transformers, kind + end), seed)
    family = find_hf_family(config.model_type)
    return family, family.config_from_hf(config.to_dict()), theirs


def batch(seed: int) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Their arguments and our inputs, with padding and two parts in each row."""
    shape = (len(LENGTHS), max(LENGTHS))
    index, lengths = torch.arange(shape[1]).expand(shape), torch.tensor(LENGTHS)[:, None]
    real = index < lengths
    # Their table has a row for padding that lookups give no gradient.
    tokens = torch.where(real, random_tokens(VOCABULARY - 1, *shape, seed) + 1, 0)
    types = (index > lengths // 2).long() * real
    theirs = {"input_ids": tokens, "attention_mask": real.long(), "token_type_ids": types}
    return theirs, (tokens, index, torch.where(real, 0, -1), types, torch.arange(shape[0]))


def class_logits(ours: SequentialModel, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What the head for sentences says; without labels the model returns words only."""
    found: list[Tensor] = []
    heads = [module for module in ours.modules() if isinstance(module, Classifier)]
    hooks = [h.register_forward_hook(lambda *call: found.append(call[-1])) for h in heads]
    with torch.no_grad():
        ours(inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["Bert", "MegatronBert"])
def test_bert(kind, name) -> None:
    family, config, theirs = pair(kind, name, 3)
    arguments, inputs = batch(5)
    ours = our_model(config)
    load_full(ours.canonical_parameters(), converted(theirs, family, config))
    real = inputs[2] == 0
    words = random_tokens(VOCABULARY, *real.shape, 7)
    chosen = real & (random_tokens(3, *real.shape, 8) == 0)
    classes = torch.tensor([1, 0, 1])
    word_targets = (words, chosen / chosen.sum())
    class_targets = (classes, torch.full((3,), 1 / 3))
    labels = {"labels": torch.where(chosen, words, -100)}
    targets: tuple[Tensor, ...] = word_targets
    if config.num_labels is not None:
        labels, targets = {"labels": classes}, class_targets
    elif config.sentence_head:
        labels["next_sentence_label"], targets = classes, (*word_targets, *class_targets)

    expected = theirs(**arguments, **labels)
    expected.loss.backward()
    result = {}
    logits = getattr(expected, "prediction_logits", expected.get("logits")).detach()
    with torch.no_grad():
        found = ours(inputs)
    if config.num_labels is None:
        result["logits"] = difference(found[real], logits[real])
    else:
        result["logits"] = difference(found, logits)
    if config.num_labels is None and config.sentence_head:
        (sentences,) = class_logits(ours, inputs)
        result["sentences"] = difference(sentences, expected.seq_relationship_logits.detach())
    loss = ours(inputs, targets)
    loss.backward()
    result["loss"] = difference(loss.detach(), expected.loss.detach())
    result |= gradient_differences(ours, theirs, family, config)
    assert_parity(result)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["Bert", "MegatronBert"])
def test_exported_files_are_the_same_model_in_transformers(kind, name, tmp_path) -> None:
    family, config, theirs = pair(kind, name, 4)
    state = family.to_hf(converted(theirs, family, config), config)
    written = family.config_to_hf(config)
    (architecture,) = written["architectures"]
    assert architecture == type(theirs).__name__
    getattr(transformers, f"{kind}Config")(**written).save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = getattr(transformers, architecture).from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    arguments, _ = batch(6)
    with torch.no_grad():
        found, expected = (model(**arguments).to_tuple() for model in (loaded, theirs))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
