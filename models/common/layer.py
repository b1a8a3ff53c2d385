"""One transformer layer with slots; every family fills them with its own parts.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden; ``_T`` this rank's sequence part under SP.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.state import HiddenState, LayerContext

# (norm, block, dropout) of one residual branch
Slot = tuple[Any, Any, Any]


class TransformerLayer(nn.Module):
    """Residual layer: attention, in a decoder with an encoder cross-attention, and an MLP.

    Pre-norm (``x + block(norm(x))``) or, as in BERT, post-norm (``norm(x + block(x))``).

    Args:
        attention_norm, attention, mlp_norm, mlp: the slots; blocks are called as
            ``block(x, state, context)``.
        cross_norm, cross_attention: slots between the two, or None.
        attention_dropout, cross_dropout, mlp_dropout: on the output of each block.
        parallel_residual: both blocks read the layer's input (GPT-J, GPT-NeoX); pre-norm only.
        norm_first: pre-norm.
    """

    def __init__(
        self,
        tp: TensorParallel,
        *,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        attention_dropout: Dropout,
        mlp_dropout: Dropout,
        cross_norm: nn.Module | None = None,
        cross_attention: nn.Module | None = None,
        cross_dropout: Dropout | None = None,
        parallel_residual: bool = False,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.attention_norm, self.attention = attention_norm, attention
        self.cross_norm, self.cross_attention = cross_norm, cross_attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout, self.mlp_dropout = attention_dropout, mlp_dropout
        self.cross_dropout = cross_dropout
        self.parallel_residual, self.norm_first = parallel_residual, norm_first

    def forward(self, state: HiddenState, context: LayerContext) -> HiddenState:
        """Map hidden (B, S_T, H) to the next layer's."""
        x = state.hidden
        first = self.tp.rank * x.shape[1] if self.tp.scatters_sequence else 0

        def add(y: Tensor, source: Tensor, block: Slot) -> Tensor:
            norm, run, dropout = block
            out = run(norm(source) if self.norm_first else source, state, context)
            y = y + dropout(out, state.sample_ids, first)
            return y if self.norm_first else norm(y)

        y = add(x, x, (self.attention_norm, self.attention, self.attention_dropout))
        if self.cross_attention is not None:
            y = add(y, y, (self.cross_norm, self.cross_attention, self.cross_dropout))
        source = x if self.parallel_residual else y
        y = add(y, source, (self.mlp_norm, self.mlp, self.mlp_dropout))
        return state._replace(hidden=y)
