"""The two ends of a decoder on the vocabulary: word embedding and language-model head.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``V`` words; ``_T`` this rank's part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.collectives import enter, gather_last
from ds_engine.parallel.cross_entropy import LossOptions, linear_cross_entropy
from ds_engine.parallel.embedding import VocabParallelEmbedding
from ds_engine.parallel.parameter import ZEROS, Init, make_parameter
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.state import HiddenState, LayerContext, TokenInput


def project_to_vocabulary(
    state: HiddenState,
    context: LayerContext,
    weight: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    tp: TensorParallel,
) -> Tensor:
    """Loss with labels (a float32 scalar), else logits (B, S, V) without padded words."""
    hidden = enter(state.hidden, tp)
    if context.labels is None:
        return gather_last(F.linear(hidden, weight, bias), tp)[..., : options.vocab_size]
    labels, weights = context.labels
    return linear_cross_entropy(hidden, weight, bias, labels, weights, options, tp)


class WordEmbedding(VocabParallelEmbedding):
    """First layer of a plan, and with ``as_head`` its last one when the weights are tied."""

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
        self, state: TokenInput | HiddenState, context: LayerContext, *, as_head: bool = False
    ) -> HiddenState | Tensor:
        """Embed tokens, or project hidden states on the same weights."""
        if as_head:
            assert isinstance(state, HiddenState)
            return project_to_vocabulary(
                state,
                context,
                self.weight,
                None,
                self.options.for_mode(training=self.training),
                self.tp,
            )
        assert isinstance(state, TokenInput)
        hidden = super().forward(state.tokens)
        return HiddenState(hidden, state.positions, state.segments, state.sample_ids)


def call_as_head(module: nn.Module, state: HiddenState, context: LayerContext) -> Tensor:
    """Use a tied ``WordEmbedding`` as the plan's last layer."""
    return module(state, context, as_head=True)


class OutputHead(nn.Module):
    """Last layer of a plan with its own matrix (V_T, H) and optional bias."""

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

    def forward(self, state: HiddenState, context: LayerContext) -> Tensor:
        """Loss with labels, else logits."""
        return project_to_vocabulary(
            state,
            context,
            self.weight,
            self.bias,
            self.options.for_mode(training=self.training),
            self.tp,
        )


class FinalNorm(nn.Module):
    """The norm between the last transformer layer and the head, as a layer of the plan."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: HiddenState, context: LayerContext) -> HiddenState:
        """Norm hidden (B, S_T, H)."""
        return state._replace(hidden=self.norm(state.hidden))
