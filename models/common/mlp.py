"""The feed-forward block, plain or gated (Shazeer 2020, "GLU Variants Improve Transformer").

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``I`` intermediate; ``_T`` this rank's part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.parallel.linear import ColumnParallelLinear, RowParallelLinear
from ds_engine.parallel.parameter import normal
from ds_engine.parallel.tensor_parallel import TensorParallel

GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation by name: ``gelu`` (exact), ``gelu_tanh``, ``relu`` or ``silu``."""
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}[name](x)


class MLP(nn.Module):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        tp: TensorParallel,
        *,
        bias: bool,
        std: float,
        output_std: float,
    ) -> None:
        super().__init__()
        self.gated = activation in GATES
        self.activation = GATES.get(activation, activation)
        blocks = (intermediate_size,) * (2 if self.gated else 1)
        self.up = ColumnParallelLinear(
            hidden_size, sum(blocks), tp, bias=bias, init=normal(std), blocks=blocks
        )
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, tp, bias=bias, init=normal(output_std)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, S_T, H) -> (B, S_T, H)."""
        y = self.up(x)
        if self.gated:
            gate, y = y.chunk(2, -1)
            return self.down(activate(self.activation, gate) * y)
        return self.down(activate(self.activation, y))
