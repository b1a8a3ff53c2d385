"""The model families that every parity suite runs on: a new family is one entry here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from models.bert_config import BertConfig
from models.config import AttentionConfig, GPTConfig, MLPConfig, NormConfig, PositionConfig
from models.t5_config import T5Config

SEQUENCE = 16
DECODER_SEQUENCE = 8


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


def t5_config(dropout: float = 0.0) -> T5Config:
    """T5 1.0: relative positions, ReLU, tied and scaled; deeper encoder, so pp4 cuts inside it."""
    return T5Config(
        vocab_size=61,
        num_layers=4,
        num_decoder_layers=2,
        hidden_size=32,
        max_sequence_length=SEQUENCE,
        attention=AttentionConfig(num_heads=4, head_dim=12, bias=False, dropout=dropout),
        position=PositionConfig(type="relative", relative_buckets=8, relative_max_distance=12),
        mlp=MLPConfig(intermediate_size=64, activation="relu", bias=False),
        embedding_dropout=dropout,
        hidden_dropout=dropout,
        activation_dropout=dropout,
        init_std=0.3,
        vocab_multiple=8,
    )


def t5_11_config(dropout: float = 0.0) -> T5Config:
    """T5 1.1 and mT5: gated GELU, untied; here a deeper decoder and grouped heads."""
    config = t5_config(dropout)
    return replace(
        config,
        num_layers=2,
        num_decoder_layers=3,
        attention=replace(config.attention, num_kv_heads=2),
        mlp=MLPConfig(intermediate_size=64, activation="geglu_tanh", bias=False),
        tie_embeddings=False,
    )


def t5_learned_config(dropout: float = 0.0) -> T5Config:
    """NeMo's variant: learned positions, layer norm, biases, scaled scores."""
    return replace(
        t5_config(dropout),
        num_layers=2,
        attention=AttentionConfig(num_heads=4, dropout=dropout),
        position=PositionConfig(type="learned"),
        norm=NormConfig(type="layernorm"),
        mlp=MLPConfig(intermediate_size=64),
        scale_attention=True,
        scale_logits=False,
        init="normal",
        init_std=0.05,
    )


def bert_config(dropout: float = 0.0) -> BertConfig:
    """The paper's: post-norm, token types, both heads."""
    return BertConfig(
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


def roberta_config(dropout: float = 0.0) -> BertConfig:
    """Pre-norm, no token types, no sentence head, own output matrix."""
    return replace(
        bert_config(dropout),
        norm_first=True,
        num_token_types=0,
        sentence_head=False,
        tie_embeddings=False,
    )


FAMILIES = {
    "gpt": Family("gpt", "models.gpt", gpt_config()),
    "gpt_dropout": Family("gpt_dropout", "models.gpt", gpt_config(0.1)),
    "llama": Family("llama", "models.gpt", llama_config()),
    "llama_dropout": Family("llama_dropout", "models.gpt", llama_config(0.1)),
    "t5": Family("t5", "models.t5", t5_config()),
    "t5_dropout": Family("t5_dropout", "models.t5", t5_config(0.1)),
    "t5_11": Family("t5_11", "models.t5", t5_11_config()),
    "t5_11_dropout": Family("t5_11_dropout", "models.t5", t5_11_config(0.1)),
    "t5_learned_dropout": Family("t5_learned_dropout", "models.t5", t5_learned_config(0.1)),
    "bert": Family("bert", "models.bert", bert_config()),
    "bert_dropout": Family("bert_dropout", "models.bert", bert_config(0.1)),
    "roberta_dropout": Family("roberta_dropout", "models.bert", roberta_config(0.1)),
    "classify_dropout": Family(
        "classify_dropout", "models.bert", replace(bert_config(0.1), num_labels=3)
    ),
    "bert_rotary_dropout": Family(
        "bert_rotary_dropout",
        "models.bert",
        replace(bert_config(0.1), position=PositionConfig(type="rotary", rotary_fraction=0.5)),
    ),
}
