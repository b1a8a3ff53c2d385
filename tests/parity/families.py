"""The model families that every parity suite runs on: a new family is one entry here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from models.config import AttentionConfig, GPTConfig, MLPConfig, NormConfig, PositionConfig

SEQUENCE = 16


@dataclass(frozen=True)
class Family:
    """A tiny model with every feature that can go wrong between ranks."""

    name: str
    module: str
    config: Any


def gpt_config(dropout: float = 0.0) -> GPTConfig:
    """GPT-3 style: learned positions, biases, layer norm, tied weights, odd vocabulary."""
    return GPTConfig(
        vocab_size=61,
        num_layers=4,
        hidden_size=32,
        max_sequence_length=SEQUENCE,
        attention=AttentionConfig(num_heads=4, dropout=dropout),
        mlp=MLPConfig(intermediate_size=64),
        embedding_dropout=dropout,
        hidden_dropout=dropout,
        init_std=0.05,
        vocab_multiple=8,
    )


def llama_config(dropout: float = 0.0) -> GPTConfig:
    """Modern: rotary, RMS norm, gated, no biases, 2 KV heads (fewer than tp4), QK norm, untied."""
    return replace(
        gpt_config(dropout),
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, bias=False, qk_norm=True, dropout=dropout
        ),
        position=PositionConfig(type="rotary"),
        norm=NormConfig(type="rmsnorm"),
        mlp=MLPConfig(intermediate_size=64, activation="swiglu", bias=False),
        tie_embeddings=False,
    )


FAMILIES = {
    "gpt": Family("gpt", "models.gpt", gpt_config()),
    "gpt_dropout": Family("gpt_dropout", "models.gpt", gpt_config(0.1)),
    "llama": Family("llama", "models.gpt", llama_config()),
    "llama_dropout": Family("llama_dropout", "models.gpt", llama_config(0.1)),
}
