"""Tiny T5 models, and the same weights in transformers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from models.common.definition import PlanOptions
from models.sections import AttentionConfig, MLPConfig, PositionConfig
from models.t5 import build_plan
from models.t5_config import T5Config

SOURCES = [[7, 3, 50, 3, 12, 60, 1], [5, 1], [44, 9, 9, 1], [5, 21, 0, 33, 8, 1]]
WORDS = 61
STD = 0.5
TABLE = 16
T5 = T5Config(
    vocab_size=WORDS,
    num_layers=3,
    num_decoder_layers=2,
    hidden_size=32,
    max_sequence_length=TABLE,
    attention=AttentionConfig(num_heads=4, bias=False),
    mlp=MLPConfig(intermediate_size=64, activation="relu", bias=False),
    position=PositionConfig(type="relative", relative_buckets=8, relative_max_distance=10),
    # Weights large enough that texts are not one word for ever.
    init="normal",
    init_std=STD,
)
CONFIGS = {
    "t5": T5,
    "t5_v1_1": replace(
        T5, mlp=replace(T5.mlp, activation="geglu_tanh"), tie_embeddings=False, vocab_size=WORDS
    ),
    "learned": replace(T5, position=PositionConfig(type="learned")),
    "dropout": replace(T5, hidden_dropout=0.3, activation_dropout=0.3),
}


def build(name: str, tp: TensorParallel | None = None, **options: Any) -> SequentialModel:
    """A model of ``CONFIGS``, in evaluation mode."""
    plan = build_plan(CONFIGS[name], tp or TensorParallel.single(), PlanOptions(seed=3, **options))
    return SequentialModel(plan).eval()


@torch.no_grad()
def full_logits(model: SequentialModel, source: list[int], target: list[int]) -> torch.Tensor:
    """(T, V): one row, no padding, no cache; ``target`` begins with the start id."""
    parts = []
    for tokens in (source, target):
        positions = torch.arange(len(tokens))[None]
        parts += [torch.tensor([tokens]), positions, torch.zeros_like(positions)]
    return model((*parts, torch.zeros(1).long()))[0]


def greedy_by_recomputation(model: SequentialModel, source: list[int], count: int) -> list[int]:
    """Read everything again for each word."""
    target = [0]
    for _ in range(count):
        target.append(int(full_logits(model, source, target)[-1].argmax()))
    return target[1:]


@functools.cache
def theirs(name: str) -> Any:
    """The model in transformers, with the weights of ours."""
    import transformers

    config = CONFIGS[name]
    gated = config.mlp.activation != "relu"
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            d_kv=config.head_dim,
            d_ff=config.mlp.intermediate_size,
            num_layers=config.num_layers,
            num_decoder_layers=config.decoder_layers,
            num_heads=config.attention.num_heads,
            relative_attention_num_buckets=config.position.relative_buckets,
            relative_attention_max_distance=config.position.relative_max_distance,
            feed_forward_proj="gated-gelu" if gated else "relu",
            tie_word_embeddings=config.tie_embeddings,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )
    own = {n: p.detach() for n, p in build(name).canonical_parameters().items()}
    state = {"shared.weight": own["embedding.weight"][:WORDS]}
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        state[first] = own[f"{stack}.relative_bias.weight"]
        state[f"{stack}.final_layer_norm.weight"] = own[f"{stack}.final_norm.norm.weight"]
        blocks = [("attention", "attention_norm", "SelfAttention")]
        if stack == "decoder":
            blocks.append(("cross_attention", "cross_norm", "EncDecAttention"))
        for index in range(layers):
            ours = f"{stack}.layers.{index}"
            for place, (attention, norm, hf) in enumerate(blocks):
                at = f"{stack}.block.{index}.layer.{place}"
                key, value = own[f"{ours}.{attention}.key_value.weight"].chunk(2)
                state[f"{at}.{hf}.q.weight"] = own[f"{ours}.{attention}.query.weight"]
                state[f"{at}.{hf}.k.weight"], state[f"{at}.{hf}.v.weight"] = key, value
                state[f"{at}.{hf}.o.weight"] = own[f"{ours}.{attention}.output.weight"]
                state[f"{at}.layer_norm.weight"] = own[f"{ours}.{norm}.weight"]
            at = f"{stack}.block.{index}.layer.{len(blocks)}"
            up = own[f"{ours}.mlp.up.weight"]
            names = ("wi_0", "wi_1") if gated else ("wi",)
            for part, weight in zip(names, up.chunk(len(names)), strict=True):
                state[f"{at}.DenseReluDense.{part}.weight"] = weight
            state[f"{at}.DenseReluDense.wo.weight"] = own[f"{ours}.mlp.down.weight"]
            state[f"{at}.layer_norm.weight"] = own[f"{ours}.mlp_norm.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == []
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert set(missing) <= tied
    model.tie_weights()
    if not config.tie_embeddings:  # transformers 5 ties them whatever the configuration says
        model.lm_head.weight = torch.nn.Parameter(own["head.weight"][:WORDS])
    return model.eval()
