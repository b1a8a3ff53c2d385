"""One transformer layer with slots; every family fills them with its own parts.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden; ``_T`` this rank's sequence part under SP.
"""

from __future__ import annotations

from torch import Tensor, nn

from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.state import HiddenState, LayerContext


class TransformerLayer(nn.Module):
    """Pre-norm residual layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        attention_norm, attention, mlp_norm, mlp: the slots.
        attention_dropout, mlp_dropout: on the output of each block.
        parallel_residual: both blocks read the layer's input (GPT-J, GPT-NeoX).
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
        parallel_residual: bool,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout, self.mlp_dropout = attention_dropout, mlp_dropout
        self.parallel_residual = parallel_residual

    def forward(self, state: HiddenState, context: LayerContext) -> HiddenState:
        """Map hidden (B, S_T, H) to the next layer's."""
        x = state.hidden
        first = self.tp.rank * x.shape[1] if self.tp.scatters_sequence else 0

        def drop(dropout: Dropout, y: Tensor) -> Tensor:
            return dropout(y, state.sample_ids, first)

        y = x + drop(self.attention_dropout, self.attention(self.attention_norm(x), state, context))
        source = x if self.parallel_residual else y
        y = y + drop(self.mlp_dropout, self.mlp(self.mlp_norm(source)))
        return state._replace(hidden=y)
