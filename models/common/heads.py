"""The two ends of a model on the vocabulary: word embedding and language-model head.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``V`` words; ``_T`` this rank's part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.collectives import enter, gather_last
from ds_engine.parallel.cross_entropy import LossOptions, linear_cross_entropy
from ds_engine.parallel.embedding import VocabParallelEmbedding
from ds_engine.parallel.parameter import ZEROS, Init, make_parameter
from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.state import HiddenState, LayerContext, TokenInput


def project_to_vocabulary(
    hidden: Tensor,
    labels: tuple[Tensor, ...] | None,
    weight: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    tp: TensorParallel,
) -> Tensor:
    """Loss with labels (a float32 scalar), else logits (B, S, V) without padded words.

    Args:
        hidden: (B, S_T, H).
        labels: words (B, S) int64 and their weights (B, S) float32, or None.
        weight: (V_T, H); bias: (V_T,) or None.
    """
    hidden = enter(hidden, tp)
    if labels is None:
        return gather_last(F.linear(hidden, weight, bias), tp)[..., : options.vocab_size]
    words, weights = labels
    return linear_cross_entropy(hidden, weight, bias, words, weights, options, tp)


class WordEmbedding(VocabParallelEmbedding):
    """The word table: looked up at one end of a plan, and multiplied with at the other when tied.

    How it is used is up to each plan, by ``LayerSpec.call``.
    """

    def __init__(
        self,
        options: LossOptions,
        padded_size: int,
        hidden_size: int,
        tp: TensorParallel,
        init: Init,
    ) -> None:
        super().__init__(options.vocab_size, padded_size, hidden_size, tp, init)
        self.options = options

    def forward(
        self,
        x: Tensor,
        labels: tuple[Tensor, ...] | None = None,
        bias: Tensor | None = None,
        *,
        as_head: bool = False,
    ) -> Tensor:
        """Embed tokens (B, S) -> (B, S_T, H); or project hidden states (B, S_T, H) on the words.

        Args:
            x: tokens or hidden states.
            labels, bias: see ``project_to_vocabulary``.
            as_head: which of the two.
        """
        if not as_head:
            return super().forward(x)
        options = self.options.for_mode(training=self.training)
        return project_to_vocabulary(x, labels, self.weight, bias, options, self.tp)


def embed_tokens(module: nn.Module, state: TokenInput, context: LayerContext) -> HiddenState:
    """Use a ``WordEmbedding`` as a decoder's first layer."""
    return HiddenState(module(state.tokens), state.positions, state.segments, state.sample_ids)


def call_as_head(module: nn.Module, state: HiddenState, context: LayerContext) -> Tensor:
    """Use a tied ``WordEmbedding`` as a decoder's last layer."""
    return module(state.hidden, context.labels, as_head=True)


def call_head(module: nn.Module, state: HiddenState, context: LayerContext) -> Tensor:
    """Use an ``OutputHead`` as a decoder's last layer."""
    return module(state.hidden, context.labels)


class OutputHead(nn.Module):
    """A head with its own matrix (V_T, H) and optional bias."""

    def __init__(
        self,
        options: LossOptions,
        padded_size: int,
        hidden_size: int,
        tp: TensorParallel,
        init: Init,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.tp, self.options = tp, options
        valid = options.vocab_size
        self.weight = make_parameter((padded_size, hidden_size), tp, init, dim=0, valid=valid)
        self.bias = make_parameter((padded_size,), tp, ZEROS, dim=0, valid=valid) if bias else None

    def forward(
        self, hidden: Tensor, labels: tuple[Tensor, ...] | None, bias: Tensor | None = None
    ) -> Tensor:
        """Loss with labels, else logits; ``bias`` (V_T,) where the head has none of its own."""
        bias = bias if self.bias is None else self.bias
        options = self.options.for_mode(training=self.training)
        return project_to_vocabulary(hidden, labels, self.weight, bias, options, self.tp)


class FinalNorm(nn.Module):
    """The norm after the last transformer layer, as a layer of the plan.

    Args:
        dropout: after the norm (T5), or None.
        scale: factor on the result (T5's logits).
    """

    def __init__(
        self,
        norm: nn.Module,
        tp: TensorParallel,
        *,
        dropout: Dropout | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.norm, self.tp, self.dropout, self.scale = norm, tp, dropout, scale

    def forward(self, state: HiddenState, context: LayerContext) -> HiddenState:
        """Norm hidden (B, S_T, H)."""
        x = self.norm(state.hidden)
        if self.dropout is not None:
            first = self.tp.rank * x.shape[1] if self.tp.scatters_sequence else 0
            x = self.dropout(x, state.sample_ids, first)
        return state._replace(hidden=x if self.scale == 1 else x * self.scale)
