"""Self- and cross-attention with heads cut over the tensor-parallel group: MHA, GQA and MQA.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``N`` query heads, ``M`` key/value heads,
``D`` head dim; ``_T`` this rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from ds_engine.parallel.collectives import sum_gradient
from ds_engine.parallel.init import derive_seed
from ds_engine.parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from ds_engine.parallel.norm import make_norm
from ds_engine.parallel.parameter import ZEROS, Init, make_parameter, normal
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.backends import AttentionDropout, attend
from models.common.masks import AttentionMask
from models.common.position import apply_rotary
from models.common.state import HiddenState, LayerContext


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options of one attention block, for the whole model (not one rank's part)."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    output_bias: bool
    backend: str = "auto"
    scale: float | None = None
    qk_norm: tuple[str, float] | None = None
    rotary_interleaved: bool = False
    dropout: float = 0.0
    fused: bool = True


@dataclass(frozen=True)
class AttentionInit:
    """Starting values of the projections of one attention block."""

    query: Init
    key_value: Init
    output: Init

    @classmethod
    def gaussian(cls, std: float, output_std: float) -> AttentionInit:
        """One standard deviation for what reads the residual stream, one for what writes it."""
        return cls(normal(std), normal(std), normal(output_std))


class ReplicatedKeyValue(nn.Module):
    """Key and value projections for fewer heads than ranks: whole on each rank, one head used.

    Ranks that share a head see different queries, so the gradients are summed over the group; each
    head's gradient is then complete on every rank and the copies cannot drift apart.
    """

    def __init__(self, shape: AttentionShape, tp: TensorParallel, init: Init) -> None:
        super().__init__()
        self.tp, self.head_dim = tp, shape.head_dim
        self.head = tp.rank * shape.num_kv_heads // tp.size
        self.heads = shape.num_kv_heads
        rows = 2 * shape.num_kv_heads * shape.head_dim
        self.weight = make_parameter((rows, shape.hidden_size), tp, init)
        self.bias = make_parameter((rows,), tp, ZEROS) if shape.bias else None

    def _own(self, parameter: Tensor) -> Tensor:
        per_head = sum_gradient(parameter, self.tp).view(2, self.heads, self.head_dim, -1)
        return per_head[:, self.head].reshape(2 * self.head_dim, *parameter.shape[1:])

    def local(self) -> tuple[Tensor, Tensor | None]:
        """(2 D, H) weight and (2 D,) bias of this rank's head."""
        return self._own(self.weight), None if self.bias is None else self._own(self.bias)


class _Attention(nn.Module):
    """Queries of one sequence on keys and values of another or the same; the output projection."""

    def __init__(
        self,
        shape: AttentionShape,
        tp: TensorParallel,
        init: AttentionInit,
        *,
        seed: int,
        name: str,
    ) -> None:
        super().__init__()
        self.shape, self.tp, self.name = shape, tp, name
        self.local_heads = shape.num_heads // tp.size
        self.local_kv_heads = max(shape.num_kv_heads // tp.size, 1)
        width = shape.num_heads * shape.head_dim
        self.output = RowParallelLinear(
            width, shape.hidden_size, tp, bias=shape.output_bias, init=init.output
        )
        self.scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self.site = derive_seed(seed, "dropout", f"{name}.probabilities")

    def _make_query(self, init: Init) -> ColumnParallelLinear:
        shape = self.shape
        width = shape.num_heads * shape.head_dim
        return ColumnParallelLinear(shape.hidden_size, width, self.tp, bias=shape.bias, init=init)

    def _make_key_value(self, init: Init) -> ColumnParallelLinear | ReplicatedKeyValue:
        """Keys and values in one matrix, cut by heads, or whole where heads are too few."""
        shape = self.shape
        if shape.num_kv_heads < self.tp.size:
            return ReplicatedKeyValue(shape, self.tp, init)
        width = shape.num_kv_heads * shape.head_dim
        return ColumnParallelLinear(
            shape.hidden_size,
            2 * width,
            self.tp,
            bias=shape.bias,
            init=init,
            blocks=(width, width),
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, sample_ids: Tensor
    ) -> Tensor:
        """(B, Q, N_T, D) on (B, K, M_T, D) -> (B, Q_T, H)."""
        dropout = None
        if self.training and self.shape.dropout > 0:
            first_head = self.tp.rank * self.local_heads
            dropout = AttentionDropout(self.shape.dropout, self.site, first_head, sample_ids)
        out = attend(
            query,
            key,
            value,
            mask,
            scale=self.scale,
            backend=self.shape.backend,
            dropout=dropout,
        )
        return self.output(out.flatten(-2))


class SelfAttention(_Attention):
    """Projections, optional per-head norms and rotary positions, attention, output projection.

    With as many key/value heads as query heads the projections are one fused matrix (unless
    ``shape.fused`` is off); otherwise queries have their own, and keys and values share one (cut by
    heads, or whole on each rank when there are fewer heads than ranks). The parameter names depend
    on the model, never on the layout.
    """

    def __init__(
        self,
        shape: AttentionShape,
        tp: TensorParallel,
        init: AttentionInit,
        *,
        seed: int,
        name: str,
    ) -> None:
        super().__init__(shape, tp, init, seed=seed, name=name)
        width = shape.num_heads * shape.head_dim
        self.fused = shape.fused and shape.num_heads == shape.num_kv_heads
        if self.fused:
            self.qkv = ColumnParallelLinear(
                shape.hidden_size,
                3 * width,
                tp,
                bias=shape.bias,
                init=init.query,
                blocks=(width, width, width),
            )
        else:
            self.query = self._make_query(init.query)
            self.key_value = self._make_key_value(init.key_value)
        # Each rank norms other heads, so these weights' gradients are always summed, as under SP.
        heads_tp = replace(tp, sequence_parallel=True)
        if shape.qk_norm is not None:
            kind, epsilon = shape.qk_norm
            self.query_norm = make_norm(kind, shape.head_dim, epsilon, heads_tp)
            self.key_norm = make_norm(kind, shape.head_dim, epsilon, heads_tp)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S_T, H) -> queries (B, S, N_T, D), keys and values (B, S, M_T, D)."""
        head = self.shape.head_dim
        if self.fused:
            return self.qkv(x).unflatten(-1, (3, self.local_heads, head)).unbind(-3)
        pair = _weights(self.key_value)
        query, both = column_parallel(x, self.tp, (self.query.weight, self.query.bias), pair)
        query = query.unflatten(-1, (self.local_heads, head))
        key, value = both.unflatten(-1, (2, self.local_kv_heads, head)).unbind(-3)
        return query, key, value

    def forward(self, x: Tensor, state: HiddenState, context: LayerContext) -> Tensor:
        """(B, S_T, H) -> (B, S_T, H)."""
        query, key, value = self._project(x)
        if self.shape.qk_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotary is not None:
            interleaved = self.shape.rotary_interleaved
            query = apply_rotary(query, context.rotary, interleaved=interleaved)
            key = apply_rotary(key, context.rotary, interleaved=interleaved)
        if context.cache is not None:
            key, value = context.cache.extend(self.name, key, value)
        return self._attend(query, key, value, context.mask, state.sample_ids)


class CrossAttention(_Attention):
    """Attention of a decoder to the encoder states in ``context.source``."""

    def __init__(
        self,
        shape: AttentionShape,
        tp: TensorParallel,
        init: AttentionInit,
        *,
        seed: int,
        name: str,
    ) -> None:
        super().__init__(shape, tp, init, seed=seed, name=name)
        self.query = self._make_query(init.query)
        self.key_value = self._make_key_value(init.key_value)

    def _keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder states (B, S_T, H) -> keys and values (B, S, M_T, D)."""
        (both,) = column_parallel(source, self.tp, _weights(self.key_value))
        key, value = both.unflatten(-1, (2, self.local_kv_heads, self.shape.head_dim)).unbind(-3)
        return key, value

    def forward(self, x: Tensor, state: HiddenState, context: LayerContext) -> Tensor:
        """(B, S_T, H) -> (B, S_T, H)."""
        source, store = context.source, context.cache
        assert source is not None
        query = self.query(x).unflatten(-1, (self.local_heads, self.shape.head_dim))
        if store is None:
            key, value = self._keys_values(source.hidden)
        else:
            key, value = store.source(self.name, lambda: self._keys_values(source.hidden))
        return self._attend(query, key, value, source.mask, state.sample_ids)


def _weights(projection: ColumnParallelLinear | ReplicatedKeyValue) -> tuple[Tensor, Tensor | None]:
    """This rank's weight and bias of a key and value projection."""
    if isinstance(projection, ReplicatedKeyValue):
        return projection.local()
    return projection.weight, projection.bias
