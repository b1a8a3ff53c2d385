"""Examples packed in one row compute what each computes alone: nothing leaks between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.bert_config import BertConfig
from models.common.definition import PlanOptions
from models.sections import AttentionConfig, MLPConfig, PositionConfig
from models.t5_config import T5Config
from tests.models.tiny import difference, our_model, random_tokens, randomise

WORDS = 59
LENGTHS = ((9, 5), (6, 8), (1, 1))  # of the encoder and the decoder
PADDING = 4
T5 = T5Config(
    vocab_size=WORDS,
    num_layers=2,
    num_decoder_layers=3,
    hidden_size=32,
    max_sequence_length=24,
    attention=AttentionConfig(num_heads=4, bias=False),
    mlp=MLPConfig(intermediate_size=48, activation="geglu_tanh", bias=False),
    position=PositionConfig(type="relative", relative_buckets=8, relative_max_distance=6),
    init_std=0.3,
    vocab_multiple=8,
)
BERT = BertConfig(
    vocab_size=WORDS,
    num_layers=2,
    hidden_size=32,
    max_sequence_length=24,
    attention=AttentionConfig(num_heads=4),
    mlp=MLPConfig(intermediate_size=48),
    vocab_multiple=8,
)
CONFIGS = {
    "t5": T5,
    "t5-learned": replace(T5, position=PositionConfig(type="learned")),
    "bert": BERT,
    "bert-pre-norm": replace(BERT, norm_first=True, sentence_head=False),
}


def packed(examples: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and segments (1, S) of examples one after the other, then padding."""
    parts = [*examples, torch.zeros(PADDING, dtype=torch.long)]
    numbers = [*range(len(examples)), -1]
    segments = [torch.full_like(part, k) for part, k in zip(parts, numbers, strict=True)]
    positions = [torch.arange(len(part)) for part in parts]
    return tuple(torch.cat(part)[None] for part in (parts, positions, segments))  # type: ignore[return-value]


def inputs_of(config: Any, examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    first = packed([source for source, _ in examples])
    if config.family == "t5":
        return (*first, *packed([target for _, target in examples]), torch.zeros(1).long())
    return (*first, first[0] % 2, torch.zeros(1).long())


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_examples_are_apart(name, backend) -> None:
    config = CONFIGS[name]
    config = replace(config, attention=replace(config.attention, backend=backend))
    model = randomise(our_model(config, PlanOptions(seed=2)), 3)
    examples = [
        (random_tokens(WORDS, 1, source, k)[0], random_tokens(WORDS, 1, target, 10 + k)[0])
        for k, (source, target) in enumerate(LENGTHS)
    ]
    place = 1 if config.family == "t5" else 0
    with torch.no_grad():
        together = model(inputs_of(config, examples))[0]
        start = 0
        for example in examples:
            length = len(example[place])
            alone = model(inputs_of(config, [example]))[0, :length]
            assert difference(together[start : start + length], alone) < 1e-5
            start += length
        # They would not be equal if segments did nothing.
        inputs = list(inputs_of(config, examples))
        for index in (2, 5) if config.family == "t5" else (2,):
            inputs[index] = torch.zeros_like(inputs[index])
        assert difference(model(tuple(inputs))[0, :start], together[:start]) > 1e-3
