"""GPT: decoder-only transformers from GPT-3 to Llama, GPT-NeoX and Qwen style, by config.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``N`` heads, ``V`` words.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_engine.parallel.cross_entropy import LossOptions
from ds_engine.parallel.norm import make_norm
from ds_engine.parallel.parameter import normal
from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan, LayerSpec, Shared
from models.common.attention import AttentionInit, AttentionShape, SelfAttention
from models.common.definition import ModelDefinition, PlanOptions
from models.common.heads import (
    FinalNorm,
    OutputHead,
    WordEmbedding,
    call_as_head,
    call_head,
    embed_tokens,
)
from models.common.layer import TransformerLayer
from models.common.masks import document_mask
from models.common.mlp import MLP
from models.common.position import (
    PositionEmbedding,
    RotaryPositions,
    alibi_bias,
    alibi_slopes,
)
from models.common.state import HiddenState, LayerContext, TokenInput
from models.config import GPTConfig


class _Prepare:
    """Derives a stage's context from the integers that travel with the activations."""

    def __init__(self, config: GPTConfig, tp: TensorParallel, options: PlanOptions) -> None:
        self.config, self.options = config, options
        position = config.position
        self.rotary = RotaryPositions(
            config.rotary_dim, position, config.max_sequence_length, options.dtype
        )
        self.slopes: Tensor | None = None
        if position.type == "alibi":
            heads = config.attention.num_heads // tp.size
            slopes = alibi_slopes(config.attention.num_heads)
            self.slopes = slopes[tp.rank * heads : (tp.rank + 1) * heads]

    def __call__(
        self,
        state: TokenInput | HiddenState,
        labels: tuple[Tensor, ...] | None,
        cache: Any,
        shared: Shared,
    ) -> LayerContext:
        segments = state.segments
        keys = segments if cache is None else cache.key_segments(segments)
        bias = None
        if self.slopes is not None:
            slopes = self.slopes.to(segments.device)
            bias = alibi_bias(slopes, segments.shape[1], keys.shape[1])
        mask = document_mask(
            segments,
            keys,
            isolate=self.options.isolate_documents or cache is not None,
            window=self.config.attention.sliding_window,
            bias=bias,
        )
        return LayerContext(mask, self.rotary(state.positions), labels, cache)


def build_plan(config: GPTConfig, tp: TensorParallel, options: PlanOptions) -> LayerPlan:
    """Describe a GPT as a list of layers.

    Args:
        config: the architecture.
        tp: this rank's tensor-parallel handle; ``TensorParallel.single()`` for one process.
        options: what the run adds.
    """
    padded = config.padded_vocab_size(tp.size)
    std = config.init_std
    output_std = std * (2 * config.num_layers) ** -0.5 if config.scaled_output_init else std
    loss = LossOptions(config.vocab_size, options.label_smoothing, options.z_loss)
    attention = config.attention
    shape = AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.kv_heads,
        head_dim=config.head_dim,
        bias=attention.bias,
        output_bias=attention.has_output_bias,
        backend=attention.backend,
        qk_norm=(config.norm.type, config.norm.epsilon) if attention.qk_norm else None,
        rotary_interleaved=config.position.rotary_interleaved,
        dropout=attention.dropout,
    )

    def norm() -> nn.Module:
        return make_norm(config.norm.type, config.hidden_size, config.norm.epsilon, tp)

    def embedding() -> nn.Module:
        return WordEmbedding(loss, padded, config.hidden_size, tp, normal(std))

    def positions() -> nn.Module:
        dropout = Dropout(config.embedding_dropout, options.seed, "embedding")
        return PositionEmbedding(
            config.position_limit, config.hidden_size, tp, normal(std), dropout
        )

    def layer(name: str) -> nn.Module:
        return TransformerLayer(
            tp,
            attention_norm=norm(),
            attention=SelfAttention(
                shape,
                tp,
                AttentionInit.gaussian(std, output_std),
                seed=options.seed,
                name=f"{name}.attention",
            ),
            mlp_norm=norm(),
            mlp=MLP(
                config.hidden_size,
                config.mlp.intermediate_size,
                config.mlp.activation,
                tp,
                bias=config.mlp.bias,
                init=normal(std),
                output_init=normal(output_std),
            ),
            attention_dropout=Dropout(config.hidden_dropout, options.seed, f"{name}.attention"),
            mlp_dropout=Dropout(config.hidden_dropout, options.seed, f"{name}.mlp"),
            parallel_residual=config.parallel_residual,
        )

    def output() -> nn.Module:
        return OutputHead(loss, padded, config.hidden_size, tp, normal(std), bias=config.head_bias)

    tied = config.tie_embeddings
    head_cost = 6.0 * config.vocab_size * config.hidden_size
    total_cost = config.flops_per_token(config.max_sequence_length)
    layer_cost = (total_cost - head_cost) / config.num_layers
    specs = [
        LayerSpec("embedding", embedding, tied="embedding" if tied else None, call=embed_tokens),
        LayerSpec("position", positions),
    ]
    for index in range(config.num_layers):
        name = f"layers.{index}"
        specs.append(
            LayerSpec(name, lambda name=name: layer(name), cost=layer_cost, recomputable=True)
        )
    specs.append(LayerSpec("final_norm", lambda: FinalNorm(norm(), tp)))
    if tied:
        specs.append(
            LayerSpec("embedding", embedding, head_cost, tied="embedding", call=call_as_head)
        )
    else:
        specs.append(LayerSpec("head", output, head_cost, call=call_head))
    prepare = _Prepare(config, tp, options)
    return LayerPlan(tuple(specs), prepare, TokenInput, HiddenState, options.seed)


GPT_DEFINITION = ModelDefinition(plan=build_plan)
