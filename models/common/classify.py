"""Heads of an encoder: classes of a whole row, and the layer before the head for words.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``V`` words, ``C`` classes; ``_T`` this rank's
part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.collectives import first_position
from ds_engine.parallel.linear import ReplicatedLinear
from ds_engine.parallel.parameter import ZEROS, Init, make_parameter
from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.mlp import GATES, activate


class Classifier(nn.Module):
    """BERT's pooler (dense layer and tanh on the row's first token) and a linear layer to classes.

    The first token is the same on every rank, and so is everything computed from it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_classes: int,
        tp: TensorParallel,
        init: Init,
        dropout: Dropout,
        *,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.tp, self.dropout, self.smoothing = tp, dropout, smoothing
        # Every rank computes the whole: there is no sequence to sum gradients over.
        alone = TensorParallel(tp.group, tp.rank, tp.size, sequence_parallel=False)
        self.pooler = ReplicatedLinear(hidden_size, hidden_size, alone, init)
        self.output = ReplicatedLinear(hidden_size, num_classes, alone, init)

    def forward(self, hidden: Tensor, sample_ids: Tensor) -> Tensor:
        """(B, S_T, H) -> logits (B, C) float32."""
        first = first_position(hidden, self.tp)
        pooled = self.dropout(torch.tanh(self.pooler(first)), sample_ids)
        # Few rows and classes: their gradients nearly cancel, more than low precision can hold.
        return self.output(pooled.float()).squeeze(1)

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum over rows of the cross-entropy, (1,) float32.

        In evaluation mode, which measures without smoothing, also that of the correct rows: (2,).

        Args:
            logits: (B, C); labels: (B,) int64; weights: (B,) float32.
        """
        smoothing = self.smoothing if self.training else 0.0
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        numbers = [losses] if self.training else [losses, (logits.argmax(-1) == labels).float()]
        return torch.stack(numbers) @ weights.float()


class WordTransform(nn.Module):
    """Dense layer, activation and norm before the head for words, and that head's bias.

    Args:
        activation: the model's; of a gated one the activation alone.
        norm: over H.
        words: rows of the vocabulary with padding, and without.
    """

    def __init__(
        self,
        hidden_size: int,
        activation: str,
        norm: nn.Module,
        words: tuple[int, int],
        tp: TensorParallel,
        init: Init,
    ) -> None:
        super().__init__()
        padded, valid = words
        self.activation = GATES.get(activation, activation)
        self.dense = ReplicatedLinear(hidden_size, hidden_size, tp, init)
        self.norm = norm
        self.bias = make_parameter((padded,), tp, ZEROS, dim=0, valid=valid)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S_T, H) -> (B, S_T, H) and the bias (V_T,).

        The bias leaves as a copy: ZeRO-3 takes a module's own parameters away behind it.
        """
        return self.norm(activate(self.activation, self.dense(hidden))), self.bias.clone()
