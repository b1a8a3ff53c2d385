"""One tiny config for each way of knowing positions and each shape of attention."""

from __future__ import annotations

from dataclasses import replace

from models.config import AttentionConfig, GPTConfig, MLPConfig, NormConfig, PositionConfig

LENGTH = 20
BASE = GPTConfig(
    vocab_size=61,
    num_layers=2,
    hidden_size=32,
    max_sequence_length=LENGTH,
    attention=AttentionConfig(num_heads=4),
    mlp=MLPConfig(intermediate_size=48),
    vocab_multiple=8,
)
GROUPED = AttentionConfig(num_heads=4, num_kv_heads=2, bias=False)
ROTARY = replace(
    BASE,
    position=PositionConfig(type="rotary", rotary_fraction=0.5),
    attention=GROUPED,
    norm=NormConfig(type="rmsnorm"),
    mlp=MLPConfig(intermediate_size=48, activation="swiglu", bias=False),
    tie_embeddings=False,
)
CONFIGS: dict[str, GPTConfig] = {
    "learned": BASE,
    "rotary-gqa": ROTARY,
    "rotary-interleaved-mqa": replace(
        ROTARY,
        position=PositionConfig(type="rotary", rotary_interleaved=True),
        attention=AttentionConfig(num_heads=4, num_kv_heads=1, qk_norm=True),
        head_bias=True,
    ),
    "alibi": replace(BASE, position=PositionConfig(type="alibi")),
    "alibi-gqa": replace(BASE, position=PositionConfig(type="alibi"), attention=GROUPED),
    "window": replace(BASE, attention=AttentionConfig(num_heads=4, sliding_window=4)),
    "window-rotary-gqa": replace(ROTARY, attention=replace(GROUPED, sliding_window=3)),
    "alibi-window": replace(
        BASE,
        position=PositionConfig(type="alibi"),
        attention=AttentionConfig(num_heads=4, sliding_window=5),
    ),
    "none": replace(BASE, position=PositionConfig(type="none"), parallel_residual=True),
}


def with_backend(config: GPTConfig, backend: str, dropout: float = 0.0) -> GPTConfig:
    """The config with another attention kernel (and attention dropout)."""
    attention = replace(config.attention, backend=backend, dropout=dropout)
    return replace(config, attention=attention)
