"""T5, T5 v1.1 and mT5 (Raffel et al. 2020; Xue et al. 2021): an encoder and a decoder, by config.

The plan is one list: both embeddings, the encoder's layers, the decoder's, the head. Both streams
travel together, so a stage may end anywhere: before the decoder begins, its embedded tokens only
pass through; afterwards the encoder's states do, for cross-attention. The tables of relative
positions are shared modules: each stage with layers of a stack has a copy.

Legend: ``B`` batch, ``S`` tokens of the encoder, ``T`` of the decoder, ``H`` hidden, ``N`` heads,
``V`` words; ``_T`` this rank's sequence part under SP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from ds_engine.parallel.cross_entropy import LossOptions
from ds_engine.parallel.norm import make_norm
from ds_engine.parallel.parameter import Init, normal
from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan, LayerSpec, Shared, SharedSpec
from models.common.attention import AttentionInit, AttentionShape, CrossAttention, SelfAttention
from models.common.definition import ModelDefinition, PlanOptions
from models.common.heads import FinalNorm, OutputHead, WordEmbedding
from models.common.layer import TransformerLayer
from models.common.masks import AttentionMask, document_mask, segment_mask
from models.common.mlp import MLP
from models.common.position import PositionEmbedding, RelativeBias
from models.common.state import AttentionSource, HiddenState, LayerContext, SourceStore
from models.t5_config import T5Config

ENCODER_BIAS, DECODER_BIAS = "encoder.relative_bias", "decoder.relative_bias"


class T5Input(NamedTuple):
    """Input of the first layer. All int64; examples packed in a row share a segment number.

    Attributes:
        tokens, positions, segments: (B, S) of the encoder.
        decoder_tokens, decoder_positions, decoder_segments: (B, T).
        sample_ids: (B,) number of the sample in the run; seeds dropout.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    decoder_tokens: Tensor
    decoder_positions: Tensor
    decoder_segments: Tensor
    sample_ids: Tensor


class T5State(NamedTuple):
    """What crosses a stage boundary: encoder (B, S_T, H), decoder (B, T_T, H), and integers."""

    encoder: Tensor
    decoder: Tensor
    positions: Tensor
    segments: Tensor
    decoder_positions: Tensor
    decoder_segments: Tensor
    sample_ids: Tensor


@dataclass(frozen=True)
class T5Context:
    """What a stage derives once per micro-batch.

    Attributes:
        encoder, decoder: of the two stacks' own layers.
        cross: which encoder states a position of the decoder may see.
        labels: (labels (B, T) int64, weights (B, T) float32), or None to get logits.
        cache: what a generation keeps, or None.
    """

    encoder: LayerContext
    decoder: LayerContext
    cross: AttentionMask
    labels: tuple[Tensor, ...] | None
    cache: SourceStore | None


def _prepare(
    state: T5Input | T5State,
    labels: tuple[Tensor, ...] | None,
    cache: SourceStore | None,
    shared: Shared,
) -> T5Context:
    """Masks from the integers, and biases from the stage's own tables."""
    source = own = state.segments
    target = keys = state.decoder_segments
    if cache is not None:
        # After the first call the encoder's part is empty, and only its kept segments matter.
        source, keys = cache.source_segments(own), cache.key_segments(target)
    encoder_bias = decoder_bias = None
    if ENCODER_BIAS in shared:
        encoder_bias = shared[ENCODER_BIAS](own.shape[1], own.shape[1])
    if DECODER_BIAS in shared:
        decoder_bias = shared[DECODER_BIAS](target.shape[1], keys.shape[1])
    return T5Context(
        encoder=LayerContext(segment_mask(own, own, bias=encoder_bias)),
        decoder=LayerContext(
            document_mask(target, keys, isolate=True, bias=decoder_bias), cache=cache
        ),
        cross=segment_mask(target, source),
        labels=labels,
        cache=cache,
    )


def _embed(module: nn.Module, state: T5Input, context: T5Context) -> T5State:
    return T5State(
        module(state.tokens),
        module(state.decoder_tokens),
        state.positions,
        state.segments,
        state.decoder_positions,
        state.decoder_segments,
        state.sample_ids,
    )


def _encode(module: nn.Module, state: T5State, context: T5Context) -> T5State:
    """Run a layer on the encoder's stream; in a generation, in its first call only."""
    if context.cache is not None and context.cache.encoded:
        return state
    own = HiddenState(state.encoder, state.positions, state.segments, state.sample_ids)
    return state._replace(encoder=module(own, context.encoder).hidden)


def _finish_encoder(module: nn.Module, state: T5State, context: T5Context) -> T5State:
    state = _encode(module, state, context)
    if context.cache is not None:
        context.cache.set_encoded()
    return state


def _decode(module: nn.Module, state: T5State, context: T5Context) -> T5State:
    """Run a layer on the decoder's stream, with the encoder's states as its source."""
    own = HiddenState(
        state.decoder, state.decoder_positions, state.decoder_segments, state.sample_ids
    )
    source = AttentionSource(state.encoder, context.cross)
    result = module(own, replace(context.decoder, source=source))
    return state._replace(decoder=result.hidden)


def _predict_tied(module: nn.Module, state: T5State, context: T5Context) -> Tensor:
    return module(state.decoder, context.labels, as_head=True)


def _predict(module: nn.Module, state: T5State, context: T5Context) -> Tensor:
    return module(state.decoder, context.labels)


@dataclass(frozen=True)
class _Builder:
    """Makes the modules of one plan."""

    config: T5Config
    tp: TensorParallel
    options: PlanOptions

    @property
    def loss(self) -> LossOptions:
        options = self.options
        return LossOptions(self.config.vocab_size, options.label_smoothing, options.z_loss)

    def init(self, fan_in: int, *, layers: int | None = None) -> Init:
        """T5: standard deviation factor / sqrt(fan in), as in Mesh TensorFlow; else one for all.

        Args:
            fan_in: inputs of the weight.
            layers: of the stack, for weights that write into the residual stream.
        """
        config = self.config
        if config.init == "t5":
            return normal(config.init_std * fan_in**-0.5)
        scaled = config.scaled_output_init and layers is not None
        return normal(config.init_std * ((2 * layers) ** -0.5 if scaled and layers else 1.0))

    def norm(self) -> nn.Module:
        config = self.config
        return make_norm(config.norm.type, config.hidden_size, config.norm.epsilon, self.tp)

    def dropout(self, probability: float, site: str) -> Dropout:
        return Dropout(probability, self.options.seed, site)

    def embedding(self) -> nn.Module:
        config = self.config
        padded = config.padded_vocab_size(self.tp.size)
        return WordEmbedding(self.loss, padded, config.hidden_size, self.tp, self.init(1))

    def head(self) -> nn.Module:
        config = self.config
        return OutputHead(
            self.loss,
            config.padded_vocab_size(self.tp.size),
            config.hidden_size,
            self.tp,
            self.init(config.hidden_size),
            bias=config.head_bias,
        )

    def positions(self, stack: str) -> nn.Module:
        config = self.config
        dropout = self.dropout(config.embedding_dropout, f"{stack}.embedding")
        return PositionEmbedding(
            config.position_limit, config.hidden_size, self.tp, self.init(1), dropout
        )

    def relative_bias(self, *, causal: bool) -> nn.Module:
        config, position = self.config, self.config.position
        return RelativeBias(
            position.relative_buckets,
            position.relative_max_distance,
            config.attention.num_heads,
            self.tp,
            self.init(config.hidden_size),
            causal=causal,
        )

    def final_norm(self, stack: str, *, scale: float = 1.0) -> nn.Module:
        dropout = self.dropout(self.config.hidden_dropout, f"{stack}.final_norm")
        return FinalNorm(self.norm(), self.tp, dropout=dropout, scale=scale)

    def attention(
        self, kind: type[SelfAttention] | type[CrossAttention], name: str, layers: int
    ) -> nn.Module:
        config, attention = self.config, self.config.attention
        shape = AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.kv_heads,
            head_dim=config.head_dim,
            bias=attention.bias,
            output_bias=attention.has_output_bias,
            backend=attention.backend,
            scale=None if config.scale_attention else 1.0,
            dropout=attention.dropout,
            fused=False,
        )
        # Without a factor on the scores, the queries start smaller by the root of the head's size.
        reduced = 1 if config.scale_attention else config.head_dim
        init = AttentionInit(
            query=self.init(config.hidden_size * reduced),
            key_value=self.init(config.hidden_size),
            output=self.init(attention.num_heads * config.head_dim, layers=layers),
        )
        return kind(shape, self.tp, init, seed=self.options.seed, name=name)

    def layer(self, name: str, layers: int, *, decoder: bool) -> nn.Module:
        config, mlp = self.config, self.config.mlp
        cross = decoder or None
        return TransformerLayer(
            self.tp,
            attention_norm=self.norm(),
            attention=self.attention(SelfAttention, f"{name}.attention", layers),
            cross_norm=cross and self.norm(),
            cross_attention=cross
            and self.attention(CrossAttention, f"{name}.cross_attention", layers),
            cross_dropout=cross and self.dropout(config.hidden_dropout, f"{name}.cross_attention"),
            mlp_norm=self.norm(),
            mlp=MLP(
                config.hidden_size,
                mlp.intermediate_size,
                mlp.activation,
                self.tp,
                bias=mlp.bias,
                init=self.init(config.hidden_size),
                output_init=self.init(mlp.intermediate_size, layers=layers),
                dropout=self.dropout(config.activation_dropout, f"{name}.activation"),
            ),
            attention_dropout=self.dropout(config.hidden_dropout, f"{name}.attention"),
            mlp_dropout=self.dropout(config.hidden_dropout, f"{name}.mlp"),
        )

    def stack(
        self, name: str, layers: int, call: Callable[..., Any], cost: float
    ) -> list[LayerSpec]:
        """The layers of the encoder or the decoder."""
        decoder = name == "decoder"
        relative = self.config.position.type == "relative"
        uses = (DECODER_BIAS if decoder else ENCODER_BIAS,) if relative else ()

        def build(index: int) -> Callable[[], nn.Module]:
            return lambda: self.layer(f"{name}.layers.{index}", layers, decoder=decoder)

        return [
            LayerSpec(
                f"{name}.layers.{index}",
                build(index),
                cost=cost,
                call=call,
                recomputable=True,
                uses=uses,
            )
            for index in range(layers)
        ]


def _costs(config: T5Config, lengths: tuple[int, int | None] | None) -> tuple[float, float, float]:
    """FLOPs of a row in one layer of the encoder, one of the decoder, and the head."""
    source, target = lengths or (config.max_sequence_length, None)
    layers, decoder_layers = config.num_layers, config.decoder_layers

    def flops(more: int, more_decoder: int) -> int:
        changed = replace(
            config,
            num_layers=layers + more,
            num_decoder_layers=decoder_layers + more_decoder,
        )
        return changed.flops_per_sample(source, target)

    whole = flops(0, 0)
    encoder, decoder = flops(1, 0) - whole, flops(0, 1) - whole
    return encoder, decoder, whole - layers * encoder - decoder_layers * decoder


def build_plan(config: T5Config, tp: TensorParallel, options: PlanOptions) -> LayerPlan:
    """A T5 as a layer plan.

    Args:
        config: the architecture.
        tp: this rank's tensor-parallel handle; ``TensorParallel.single()`` for one process.
        options: what the run adds. Documents packed in a row never see each other: the objective
            says by its segments what a document is.
    """
    make, tied = _Builder(config, tp, options), config.tie_embeddings
    scale = config.hidden_size**-0.5 if config.has_scaled_logits else 1.0
    encoder_cost, decoder_cost, head_cost = _costs(config, options.lengths)
    shared = (
        SharedSpec(ENCODER_BIAS, lambda: make.relative_bias(causal=False)),
        SharedSpec(DECODER_BIAS, lambda: make.relative_bias(causal=True)),
    )
    embedding = LayerSpec(
        "embedding", make.embedding, tied="embedding" if tied else None, call=_embed
    )
    head = (
        LayerSpec("embedding", make.embedding, head_cost, tied="embedding", call=_predict_tied)
        if tied
        else LayerSpec("head", make.head, head_cost, call=_predict)
    )
    specs = (
        embedding,
        LayerSpec("encoder.position", lambda: make.positions("encoder"), call=_encode),
        LayerSpec("decoder.position", lambda: make.positions("decoder"), call=_decode),
        *make.stack("encoder", config.num_layers, _encode, encoder_cost),
        LayerSpec("encoder.final_norm", lambda: make.final_norm("encoder"), call=_finish_encoder),
        *make.stack("decoder", config.decoder_layers, _decode, decoder_cost),
        LayerSpec(
            "decoder.final_norm", lambda: make.final_norm("decoder", scale=scale), call=_decode
        ),
        head,
    )
    return LayerPlan(
        specs,
        _prepare,
        T5Input,
        T5State,
        options.seed,
        shared=shared if config.position.type == "relative" else (),
    )


T5_DEFINITION = ModelDefinition(plan=build_plan)
