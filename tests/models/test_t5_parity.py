"""Our T5 computes what Hugging Face's does: logits, loss and every gradient, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Attention

from models.common.position import relative_buckets
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

VOCABULARY = 59
SOURCES, TARGETS = (14, 9, 20), (11, 6, 8)
SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 12,  # not d_model / num_heads
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,  # shorter than the sources
    "decoder_start_token_id": 0,
    "initializer_factor": 0.3,
}
GATED = {"feed_forward_proj": "gated-gelu"}
CASES: dict[str, tuple[type, dict[str, Any], bool]] = {
    "t5": (T5Config, {}, True),
    "t5-deeper-encoder": (T5Config, {"num_layers": 3, "num_decoder_layers": 1}, True),
    "t5-deeper-decoder": (T5Config, {**GATED, "num_decoder_layers": 3}, True),
    "t5-gated-silu": (T5Config, {"feed_forward_proj": "gated-silu"}, True),
    "t5-not-scaled": (T5Config, {"scale_decoder_outputs": False}, True),
    "t5-1.1": (T5Config, {**GATED, "tie_word_embeddings": False}, False),
    "mt5": (MT5Config, {**GATED, "num_decoder_layers": 1}, False),
    "mt5-tied": (MT5Config, {}, True),
}
MODELS = {T5Config: T5ForConditionalGeneration, MT5Config: MT5ForConditionalGeneration}


def pair(name: str, seed: int) -> tuple[Any, Any, Any]:
    """The family, our config, and a random model of theirs."""
    kind, options, tied = CASES[name]
    config = kind(**{**SIZES, **options})
    theirs = hf_model(config, MODELS[kind], seed)
    if not tied:  # transformers 5 makes them tied whatever the config says, but loads untied ones
        head = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(seed))
        theirs.lm_head.weight = torch.nn.Parameter(0.3 * head)
    family = find_hf_family(config.model_type)
    # What a file says that comes with such weights.
    ours = family.config_from_hf({**config.to_dict(), "tie_word_embeddings": tied})
    return family, ours, theirs


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Source (B, S), its mask, labels (B, T) with -100, and the inputs of ours."""
    source = random_tokens(VOCABULARY, len(SOURCES), max(SOURCES), seed)
    labels = random_tokens(VOCABULARY, len(TARGETS), max(TARGETS), seed + 1)
    mask = torch.arange(max(SOURCES)) < torch.tensor(SOURCES)[:, None]
    real = torch.arange(max(TARGETS)) < torch.tensor(TARGETS)[:, None]
    start = labels.new_zeros(len(TARGETS), 1)
    inputs: list[Tensor] = []
    for tokens, valid in ((source, mask), (torch.cat([start, labels[:, :-1]], 1), real)):
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        inputs += [tokens, positions, torch.where(valid, 0, -1)]
    labels = torch.where(real, labels, -100)
    return source, mask, labels, (*inputs, torch.arange(len(SOURCES)))


@pytest.mark.parametrize("name", CASES)
def test_t5(name) -> None:
    family, config, theirs = pair(name, 3)
    source, mask, labels, inputs = batch(5)
    ours = our_model(config)
    load_full(ours.canonical_parameters(), converted(theirs, family, config))
    expected = theirs(input_ids=source, attention_mask=mask.long(), labels=labels)
    expected.loss.backward()
    real = labels >= 0
    with torch.no_grad():
        result = {"logits": difference(ours(inputs)[real], expected.logits[real].detach())}
    loss = ours(inputs, (labels.clamp(min=0), real / real.sum()))
    loss.backward()
    result["loss"] = difference(loss.detach(), expected.loss.detach())
    result |= gradient_differences(ours, theirs, family, config)
    assert_parity(result)


@pytest.mark.parametrize("name", CASES)
def test_exported_files_are_the_same_model_in_transformers(name, tmp_path) -> None:
    family, config, theirs = pair(name, 4)
    state = family.to_hf(converted(theirs, family, config), config)
    kind = CASES[name][0]
    kind(**family.config_to_hf(config)).save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = MODELS[kind].from_pretrained(tmp_path, attn_implementation="eager")
    source, mask, labels, _ = batch(6)
    with torch.no_grad():
        found, expected = (
            model(input_ids=source, attention_mask=mask.long(), labels=labels).logits
            for model in (loaded, theirs)
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 12), (6, 300), (64, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_distances_are_theirs(buckets, distance, causal) -> None:
    distances = torch.arange(-600, 601)
    theirs = T5Attention._relative_position_bucket(
        distances, bidirectional=not causal, num_buckets=buckets, max_distance=distance
    )
    assert torch.equal(relative_buckets(distances, buckets, distance, causal=causal), theirs)
