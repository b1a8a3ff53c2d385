"""Small tables that many tokens share: token types and relative positions."""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_engine.parallel.parameter import normal
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.bert_config import BertConfig
from models.common.position import RelativeBias
from models.sections import AttentionConfig, MLPConfig
from tests.models.tiny import our_model, random_tokens, randomise

ROBERTA = BertConfig(
    vocab_size=31,
    num_layers=1,
    hidden_size=16,
    max_sequence_length=8,
    attention=AttentionConfig(num_heads=2),
    mlp=MLPConfig(intermediate_size=16),
    num_token_types=1,
    num_labels=3,
    vocab_multiple=8,
)


def test_a_model_of_one_token_type_reads_pairs() -> None:
    """RoBERTa gives both texts of a pair its only type; data counts them 0 and 1."""
    model = randomise(our_model(ROBERTA), 1)
    tokens, positions = random_tokens(31, 2, 8, 2), torch.arange(8).expand(2, 8)
    same = torch.zeros_like(tokens)
    with torch.no_grad():
        single, pair = (
            model((tokens, positions, same, types, torch.arange(2)))
            for types in (same, (positions >= 4).long())
        )
    assert torch.equal(single, pair)
    typed = randomise(our_model(replace(ROBERTA, num_token_types=2)), 1)
    with torch.no_grad():
        assert not torch.equal(
            typed((tokens, positions, same, same, torch.arange(2))),
            typed((tokens, positions, same, (positions >= 4).long(), torch.arange(2))),
        )


def test_relative_positions_learn_in_bf16_from_long_rows() -> None:
    """Added up in bf16, the 65,536 distances of a row of 256 would give half of the gradient."""
    bias = RelativeBias(32, 128, 4, TensorParallel.single(), normal(0.1), causal=False)
    torch.nn.init.zeros_(bias.weight)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(1, 4, 256, 256, generator=generator) * 1e-3 + 2e-4
    gradient = gradient.bfloat16().float()
    bias(256, 256).backward(gradient)
    expected, bias.weight.grad = bias.weight.grad, None
    bias.bfloat16()(256, 256).backward(gradient.bfloat16())
    assert expected is not None and bias.weight.grad is not None
    error = (bias.weight.grad.float() - expected).norm() / expected.norm()
    assert error < 1e-2
