"""BERT (Devlin et al. 2019), post-norm or pre-norm, with any of its heads, by config.

The heads are layers at the end of the plan and so on its last stage: sentence classes from the
row's first token, then masked words, whose layer adds up the loss terms.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``V`` words, ``C`` classes; ``_T`` this rank's
part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_engine.parallel.cross_entropy import LossOptions
from ds_engine.parallel.norm import make_norm
from ds_engine.parallel.parameter import Init, normal
from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan, LayerSpec, LossTerm, Shared
from models.bert_config import BertConfig
from models.common.attention import AttentionInit, AttentionShape, SelfAttention
from models.common.classify import Classifier, WordTransform
from models.common.definition import ModelDefinition, PlanOptions
from models.common.heads import FinalNorm, OutputHead, WordEmbedding
from models.common.layer import TransformerLayer
from models.common.masks import segment_mask
from models.common.mlp import MLP
from models.common.position import PositionEmbedding, RotaryPositions
from models.common.state import HiddenState, LayerContext

WORDS, SENTENCES, CLASSES = "masked_lm_loss", "sentence_loss", "classification_loss"


class BertInput(NamedTuple):
    """Input of the first layer. All int64.

    Attributes:
        tokens, positions, segments: (B, S); rows of several documents have a segment each.
        token_types: (B, S) which part of its document a token belongs to.
        sample_ids: (B,) number of the sample in the run; seeds dropout.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    token_types: Tensor
    sample_ids: Tensor


class BertState(NamedTuple):
    """What crosses a stage boundary: activations (B, S_T, H) and the integers that go along."""

    hidden: Tensor
    positions: Tensor
    segments: Tensor
    token_types: Tensor
    sample_ids: Tensor


class _Outputs(NamedTuple):
    """Between the heads, inside the last stage.

    Attributes:
        hidden: (B, S_T, H).
        sentence: what ``Classifier.loss`` returns, or None without a sentence head or labels.
        bias: (V_T,) of the head for words, from the layer before it.
    """

    hidden: Tensor
    sentence: Tensor | None = None
    bias: Tensor | None = None


class _Prepare:
    """Derives a stage's context from the integers that travel with the activations."""

    def __init__(self, config: BertConfig, options: PlanOptions) -> None:
        self.rotary = RotaryPositions(
            config.rotary_dim, config.position, config.max_sequence_length, options.dtype
        )

    def __call__(
        self,
        state: BertInput | BertState,
        labels: tuple[Tensor, ...] | None,
        cache: Any,
        shared: Shared,
    ) -> LayerContext:
        mask = segment_mask(state.segments, state.segments)
        return LayerContext(mask, self.rotary(state.positions), labels)


def _embed(module: nn.Module, state: BertInput, context: LayerContext) -> BertState:
    return BertState(module(state.tokens), *state[1:])


def _run(module: nn.Module, state: BertState, context: LayerContext) -> BertState:
    own = HiddenState(state.hidden, state.positions, state.segments, state.sample_ids)
    return state._replace(hidden=module(own, context).hidden)


def _position(module: nn.Module, state: BertState, context: LayerContext) -> BertState:
    own = HiddenState(state.hidden, state.positions, state.segments, state.sample_ids)
    return state._replace(hidden=module(own, context, state.token_types).hidden)


def _sentence(module: nn.Module, state: BertState, context: LayerContext) -> _Outputs:
    """Logits of sentences, and with labels their loss."""
    logits = module(state.hidden, state.sample_ids)
    labels = context.labels
    return _Outputs(state.hidden, None if labels is None else module.loss(logits, *labels[2:]))


def _transform(module: nn.Module, state: BertState | _Outputs, context: LayerContext) -> _Outputs:
    hidden, bias = module(state.hidden)
    sentence = state.sentence if isinstance(state, _Outputs) else None
    return _Outputs(hidden, sentence, bias)


def _words(module: nn.Module, outputs: _Outputs, context: LayerContext, *, tied: bool) -> Tensor:
    """Logits of words (B, S, V); with labels the terms of the loss."""
    labels = context.labels
    words = None if labels is None else labels[:2]
    if tied:
        result = module(outputs.hidden, words, outputs.bias, as_head=True)
    else:
        result = module(outputs.hidden, words, outputs.bias)
    if outputs.sentence is None:
        return result
    return torch.cat([result.reshape(1), outputs.sentence])


def _classify(module: nn.Module, state: BertState, context: LayerContext) -> Tensor:
    """Logits of classes (B, C); with labels the loss."""
    logits = module(state.hidden, state.sample_ids)
    return logits if context.labels is None else module.loss(logits, *context.labels)


@dataclass(frozen=True)
class _Builder:
    """Makes the modules of one plan."""

    config: BertConfig
    tp: TensorParallel
    options: PlanOptions

    @property
    def init(self) -> Init:
        return normal(self.config.init_std)

    @property
    def loss(self) -> LossOptions:
        options = self.options
        return LossOptions(
            self.config.vocab_size, options.label_smoothing, options.z_loss, sparse=True
        )

    def norm(self) -> nn.Module:
        config = self.config
        return make_norm(config.norm.type, config.hidden_size, config.norm.epsilon, self.tp)

    def dropout(self, probability: float, site: str) -> Dropout:
        return Dropout(probability, self.options.seed, site)

    def embedding(self) -> nn.Module:
        config = self.config
        padded = config.padded_vocab_size(self.tp.size)
        return WordEmbedding(self.loss, padded, config.hidden_size, self.tp, self.init)

    def position(self) -> nn.Module:
        config = self.config
        return PositionEmbedding(
            config.position_limit,
            config.hidden_size,
            self.tp,
            self.init,
            self.dropout(config.embedding_dropout, "embedding"),
            num_token_types=config.num_token_types,
            norm=None if config.norm_first else self.norm(),
        )

    def layer(self, name: str) -> nn.Module:
        config, attention, mlp = self.config, self.config.attention, self.config.mlp
        std = config.init_std
        output_std = std * (2 * config.num_layers) ** -0.5 if config.scaled_output_init else std
        shape = AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.kv_heads,
            head_dim=config.head_dim,
            bias=attention.bias,
            output_bias=attention.has_output_bias,
            backend=attention.backend,
            rotary_interleaved=config.position.rotary_interleaved,
            dropout=attention.dropout,
        )
        return TransformerLayer(
            self.tp,
            attention_norm=self.norm(),
            attention=SelfAttention(
                shape,
                self.tp,
                AttentionInit.gaussian(std, output_std),
                seed=self.options.seed,
                name=f"{name}.attention",
            ),
            mlp_norm=self.norm(),
            mlp=MLP(
                config.hidden_size,
                mlp.intermediate_size,
                mlp.activation,
                self.tp,
                bias=mlp.bias,
                init=normal(std),
                output_init=normal(output_std),
            ),
            attention_dropout=self.dropout(config.hidden_dropout, f"{name}.attention"),
            mlp_dropout=self.dropout(config.hidden_dropout, f"{name}.mlp"),
            norm_first=config.norm_first,
        )

    def classifier(self, name: str, classes: int, *, smoothing: float = 0.0) -> nn.Module:
        """A pooler and its classes; BERT drops before the classes in fine-tuning only."""
        config = self.config
        fine_tuning = config.num_labels is not None
        dropout = self.dropout(config.hidden_dropout if fine_tuning else 0.0, name)
        return Classifier(
            config.hidden_size, classes, self.tp, self.init, dropout, smoothing=smoothing
        )

    def transform(self) -> nn.Module:
        config = self.config
        padded = config.padded_vocab_size(self.tp.size)
        # A gate has no place in the head's square matrix; its plain activation has.
        return WordTransform(
            config.hidden_size,
            config.mlp.activation,
            self.norm(),
            (padded, config.vocab_size),
            self.tp,
            self.init,
        )

    def head(self) -> nn.Module:
        config = self.config
        padded = config.padded_vocab_size(self.tp.size)
        return OutputHead(self.loss, padded, config.hidden_size, self.tp, self.init, bias=False)

    def ends(self, words_cost: float) -> list[LayerSpec]:
        """The heads, all on the last stage."""
        config = self.config
        if config.num_labels is not None:
            classes, smoothing = config.num_labels, self.options.label_smoothing
            return [
                LayerSpec(
                    "classifier",
                    lambda: self.classifier("classifier", classes, smoothing=smoothing),
                    call=_classify,
                )
            ]
        specs = []
        if config.sentence_head:
            specs.append(
                LayerSpec("sentence", lambda: self.classifier("sentence", 2), call=_sentence)
            )
        specs.append(LayerSpec("mlm", self.transform, call=_transform))
        if config.tie_embeddings:
            last = LayerSpec(
                "embedding",
                self.embedding,
                words_cost,
                tied="embedding",
                call=_words_call(tied=True),
            )
        else:
            last = LayerSpec("head", self.head, words_cost, call=_words_call(tied=False))
        return [*specs, last]


def _words_call(*, tied: bool) -> Callable[[nn.Module, Any, Any], Tensor]:
    return lambda module, outputs, context: _words(module, outputs, context, tied=tied)


def build_plan(config: BertConfig, tp: TensorParallel, options: PlanOptions) -> LayerPlan:
    """A BERT as a layer plan.

    Args:
        config: the architecture.
        tp: this rank's tensor-parallel handle; ``TensorParallel.single()`` for one process.
        options: what the run adds. Label smoothing applies to words and to fine-tuned classes, not
            to sentence classes; the segments of a row say what a document is.
    """
    make = _Builder(config, tp, options)
    length = config.max_sequence_length if options.lengths is None else options.lengths[0]
    pretraining = config.num_labels is None
    words_cost = 6.0 * config.hidden_size * (config.hidden_size + config.vocab_size) * pretraining
    layer_cost = (config.flops_per_token(length) - words_cost) / config.num_layers
    tied = config.tie_embeddings and pretraining

    def layer(name: str) -> Callable[[], nn.Module]:
        return lambda: make.layer(name)

    specs = [
        LayerSpec("embedding", make.embedding, tied="embedding" if tied else None, call=_embed),
        LayerSpec("position", make.position, call=_position),
    ]
    for index in range(config.num_layers):
        name = f"layers.{index}"
        specs.append(LayerSpec(name, layer(name), cost=layer_cost, call=_run, recomputable=True))
    if config.norm_first:
        specs.append(LayerSpec("final_norm", lambda: FinalNorm(make.norm(), tp), call=_run))
    losses: tuple[LossTerm, ...] = (LossTerm(WORDS),)
    if config.num_labels is not None:
        losses = (LossTerm(CLASSES, config.num_labels),)
    elif config.sentence_head:
        losses += (LossTerm(SENTENCES, 2),)
    return LayerPlan(
        (*specs, *make.ends(words_cost)),
        _Prepare(config, options),
        BertInput,
        BertState,
        options.seed,
        losses=losses,
    )


BERT_DEFINITION = ModelDefinition(
    plan=build_plan,
    heads=("sentence.", "mlm.", "head.", "classifier."),
    aliases={"classifier.pooler.": "sentence.pooler."},
)
