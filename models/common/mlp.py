"""The feed-forward block, plain or gated (Shazeer 2020, "GLU Variants Improve Transformer").

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``I`` intermediate; ``_T`` this rank's part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.linear import ColumnParallelLinear, RowParallelLinear
from ds_engine.parallel.parameter import Init
from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.state import HiddenState, LayerContext

GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation by name: ``gelu`` (exact), ``gelu_tanh``, ``relu`` or ``silu``."""
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}[name](x)


class MLP(nn.Module):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` with gate and up in one matrix.

    Args:
        init, output_init: starting values of the first and the second projection.
        dropout: on the activations between the two (T5), or None.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        tp: TensorParallel,
        *,
        bias: bool,
        init: Init,
        output_init: Init,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.dropout = tp, dropout
        self.gated = activation in GATES
        self.activation = GATES.get(activation, activation)
        blocks = (intermediate_size,) * (2 if self.gated else 1)
        self.up = ColumnParallelLinear(
            hidden_size, sum(blocks), tp, bias=bias, init=init, blocks=blocks
        )
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, tp, bias=bias, init=output_init
        )

    def forward(self, x: Tensor, state: HiddenState, context: LayerContext) -> Tensor:
        """(B, S_T, H) -> (B, S_T, H)."""
        y = self.up(x)
        if self.gated:
            gate, y = y.chunk(2, -1)
            y = activate(self.activation, gate) * y
        else:
            y = activate(self.activation, y)
        if self.dropout is not None:
            first = self.tp.rank * y.shape[-1]
            y = self.dropout(y, state.sample_ids, first_channel=first)
        return self.down(y)
