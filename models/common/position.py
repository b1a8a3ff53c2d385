"""Positions: learned tables, rotary embeddings with scaling, ALiBi slopes, relative buckets.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden, ``N`` heads, ``D`` head dim, ``R`` rotary dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ds_engine.parallel.collectives import local_weight, own_part
from ds_engine.parallel.embedding import look_up
from ds_engine.parallel.parameter import Init, make_parameter
from ds_engine.parallel.random import Dropout
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.common.state import HiddenState, LayerContext
from models.sections import PositionConfig, RotaryScalingConfig


def rotary_frequencies(
    rotary_dims: int, base: float, scaling: RotaryScalingConfig, max_position: int
) -> tuple[Tensor, float]:
    """Inverse frequencies (R/2,) float32 and the factor on cos and sin.

    Sources: RoFormer (Su et al. 2021); linear: Chen et al. 2023; NTK: bloc97 2023 as adopted by
    transformers; llama3: the Llama 3.1 model card's rule; YaRN: Peng et al. 2023.
    """
    exponents = torch.arange(0, rotary_dims, 2, dtype=torch.float32) / rotary_dims
    inverse = base**-exponents
    original = scaling.original_max_sequence_length or max_position
    if scaling.type == "none":
        return inverse, 1.0
    if scaling.type == "linear":
        return inverse / scaling.factor, 1.0
    if scaling.type == "dynamic_ntk":
        stretch = max(max_position / original, 1.0)
        grown = base * (scaling.factor * stretch - (scaling.factor - 1)) ** (
            rotary_dims / (rotary_dims - 2)
        )
        return grown**-exponents, 1.0
    if scaling.type == "llama3":
        wavelength = 2 * math.pi / inverse
        ratio = original / wavelength
        smooth = (ratio - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = smooth.clamp(0.0, 1.0)
        return inverse * (smooth + (1 - smooth) / scaling.factor), 1.0
    return _yarn(inverse, rotary_dims, base, scaling, original)


def _yarn(
    inverse: Tensor, rotary_dims: int, base: float, scaling: RotaryScalingConfig, original: int
) -> tuple[Tensor, float]:
    def dimension(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return rotary_dims * turns / (2 * math.log(base))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), rotary_dims - 1)
    ramp = (torch.arange(rotary_dims // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0.0, 1.0)
    factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return inverse * (1 - ramp) + inverse / scaling.factor * ramp, factor


def rotary_tables(
    positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin (B, S, 1, R/2) for positions (B, S); angles in float32."""
    angles = positions[:, :, None].float() * inverse.to(positions.device)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return cos.to(dtype)[:, :, None], sin.to(dtype)[:, :, None]


class RotaryPositions:
    """Makes a stage's rotary tables from the positions that travel with the activations.

    Args:
        rotary_dims: R; 0: the model has no rotary positions.
        position: its section.
        max_position: longest sequence of the model.
        dtype: of the tables.
    """

    def __init__(
        self, rotary_dims: int, position: PositionConfig, max_position: int, dtype: torch.dtype
    ) -> None:
        self.dtype, self.factor = dtype, 1.0
        self.inverse: Tensor | None = None
        if rotary_dims:
            self.inverse, self.factor = rotary_frequencies(
                rotary_dims, position.rotary_base, position.rotary_scaling, max_position
            )

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin (B, S, 1, R/2) for positions (B, S), or None."""
        if self.inverse is None:
            return None
        return rotary_tables(positions, self.inverse, self.factor, self.dtype)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Rotate the first R of D dims of ``x`` (B, S, N, D).

    ``interleaved`` pairs neighbours (RoFormer, GPT-J); otherwise dim i pairs with i + R/2 (NeoX,
    Llama).
    """
    cos, sin = tables
    rotary_dims = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dims], x[..., rotary_dims:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def alibi_slopes(num_heads: int) -> Tensor:
    """(N,) slopes of ALiBi (Press et al. 2022): a geometric series, filled up for odd N."""

    def powers(n: int) -> list[float]:
        start = 2 ** (-8 / n)
        return [start ** (i + 1) for i in range(n)]

    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = powers(closest)
    if closest < num_heads:
        slopes += powers(2 * closest)[0::2][: num_heads - closest]
    return torch.tensor(slopes)


def alibi_bias(slopes: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """(1, N, Q, K) float32: slope x (key - query), 0 on the diagonal; the last query is last."""
    keys = torch.arange(num_keys, device=slopes.device)
    distance = keys[None, :] - keys[num_keys - num_queries :, None]
    return (slopes[:, None, None] * distance.clamp(max=0))[None]


def relative_buckets(
    distances: Tensor, num_buckets: int, max_distance: int, *, causal: bool
) -> Tensor:
    """Number of the bucket of each distance key - query (any shape, int64).

    Raffel et al. 2020: the first half of the buckets counts single positions, the others grow
    logarithmically up to ``max_distance``, beyond which all fall into the last one. Without
    ``causal`` half of all buckets look ahead; with it, all look back and later keys count as 0.

    In float32, because pretrained weights know the edges that it gives.
    """
    ahead = torch.zeros_like(distances)
    if not causal:
        num_buckets //= 2
        ahead = num_buckets * (distances > 0)
        distances = -distances.abs()
    far = (-distances).clamp(min=0)
    exact = num_buckets // 2
    steps = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = exact + (steps * (num_buckets - exact)).long()
    return ahead + torch.where(far < exact, far, coarse.clamp(max=num_buckets - 1))


class RelativeBias(nn.Module):
    """T5's learned bias on attention scores by bucket of distance, for this rank's heads.

    One table for all layers of a stack (``SharedSpec``). Distances are those in the row: inside one
    document they are those in the document, and documents do not see each other.
    """

    def __init__(
        self,
        num_buckets: int,
        max_distance: int,
        num_heads: int,
        tp: TensorParallel,
        init: Init,
        *,
        causal: bool,
    ) -> None:
        super().__init__()
        self.max_distance, self.num_buckets, self.causal = max_distance, num_buckets, causal
        self.weight = make_parameter((num_buckets, num_heads), tp, init, dim=1)

    def forward(self, num_queries: int, num_keys: int) -> Tensor:
        """(1, N_T, Q, K); the last query stands at the last key."""
        # On the CPU: a logarithm on another device might put an edge on its other side.
        distances = torch.arange(1 - max(num_keys, 1), max(num_keys, 1))
        buckets = relative_buckets(
            distances, self.num_buckets, self.max_distance, causal=self.causal
        )
        keys = torch.arange(num_keys)
        index = num_keys - 1 + keys[None, :] - keys[num_keys - num_queries :, None]
        buckets = buckets[index].to(self.weight.device)
        return look_up(buckets, self.weight).permute(2, 0, 1)[None]


class PositionEmbedding(nn.Module):
    """Adds learned positions (if any) to the word embeddings and applies embedding dropout.

    A layer of its own, so that the tied word table holds nothing that the last stage does not use.

    Args:
        num_positions: rows of the table of positions; None: no table.
        num_token_types: rows of the table of token types (BERT); 0: no table; 1: one row for every
            token, whatever its type (RoBERTa).
        norm: over the sum (BERT), or None.
    """

    def __init__(
        self,
        num_positions: int | None,
        hidden_size: int,
        tp: TensorParallel,
        init: Init,
        dropout: Dropout,
        *,
        num_token_types: int = 0,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp

        def table(rows: int) -> nn.Parameter | None:
            return make_parameter((rows, hidden_size), tp, init) if rows else None

        self.weight = table(num_positions or 0)
        self.token_types = table(num_token_types)
        self.one_type = num_token_types == 1
        self.norm, self.dropout = norm, dropout

    def forward(
        self, state: HiddenState, context: LayerContext, token_types: Tensor | None = None
    ) -> HiddenState:
        """Hidden (B, S_T, H) plus the tables' rows at this shard's positions."""
        x = state.hidden
        first = self.tp.rank * x.shape[1] if self.tp.scatters_sequence else 0
        if token_types is not None and self.one_type:
            token_types = torch.zeros_like(token_types)
        for index, weight in ((state.positions, self.weight), (token_types, self.token_types)):
            if weight is not None:
                assert index is not None
                own = own_part(index, self.tp, 1) if self.tp.scatters_sequence else index
                x = x + look_up(own, local_weight(weight, self.tp))
        if self.norm is not None:
            x = self.norm(x)
        return state._replace(hidden=self.dropout(x, state.sample_ids, first))
