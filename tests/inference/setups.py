"""Tiny models and the slow, obvious way to generate that everything is held against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from models.common.definition import PlanOptions
from models.config import AttentionConfig, GPTConfig, MLPConfig, NormConfig, PositionConfig
from models.gpt import build_plan
from tests.parity.families import SEQUENCE, gpt_config, llama_config

NEW = 9
PROMPTS = [[7, 3, 50, 3, 12, 60], [1], [44, 9, 9], [5, 21, 0, 33]]
# Weights large enough that greedy continuations are not one word for ever.
STD = 0.3


def configs() -> dict[str, GPTConfig]:
    """Every kind of position, mask and head sharing that generation treats in its own way."""
    gpt, llama = (replace(c, init_std=STD) for c in (gpt_config(), llama_config()))
    rotary = PositionConfig(type="rotary", rotary_fraction=0.5, rotary_interleaved=True)
    heads = AttentionConfig(num_heads=4, num_kv_heads=2, bias=False)
    window = replace(llama, attention=replace(heads, sliding_window=3))
    return {
        "gpt": gpt,
        "gpt_dropout": replace(gpt_config(0.2), init_std=STD),
        "llama": llama,
        "alibi": replace(gpt, position=PositionConfig(type="alibi")),
        "no_position": replace(gpt, position=PositionConfig(type="none")),
        "window": window,
        "one_layer_window": replace(window, num_layers=1),
        "alibi_window": replace(
            gpt,
            position=PositionConfig(type="alibi"),
            attention=AttentionConfig(num_heads=4, sliding_window=4, backend="reference"),
        ),
        "multi_query": replace(gpt, attention=AttentionConfig(num_heads=4, num_kv_heads=1)),
        "neox": replace(
            gpt,
            position=rotary,
            parallel_residual=True,
            norm=NormConfig(type="layernorm"),
            mlp=MLPConfig(intermediate_size=64, activation="gelu_tanh"),
            tie_embeddings=False,
            head_bias=True,
        ),
    }


def build(name: str, tp: TensorParallel | None = None, **options: Any) -> SequentialModel:
    """A model of ``configs()``, in evaluation mode."""
    plan = build_plan(
        configs()[name], tp or TensorParallel.single(), PlanOptions(seed=3, **options)
    )
    return SequentialModel(plan).eval()


def limit(name: str) -> int | None:
    """``max_sequence_length`` as a caller passes it to ``generate``."""
    return SEQUENCE if configs()[name].position.type == "learned" else None


@torch.no_grad()
def full_logits(model: SequentialModel, tokens: list[int]) -> torch.Tensor:
    """(S, V): one row, no padding, no cache."""
    positions = torch.arange(len(tokens))[None]
    inputs = (torch.tensor([tokens]), positions, torch.zeros_like(positions), torch.zeros(1).long())
    return model(inputs)[0]


def greedy_by_recomputation(model: SequentialModel, prompt: list[int], count: int) -> list[int]:
    """Read everything again for each word."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
