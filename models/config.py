"""Configuration of the model families, without torch: shapes, counts and layout rules.

Everything that can be said about a model before its first tensor exists is said here: which values
fit together, how many parameters and FLOPs they mean, and which parallel layouts can hold them.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from ds_engine.config.reader import AboveZero, Positive, Probability, join_path
from ds_engine.parallel.dims import ParallelDims
from models.sections import (
    AttentionConfig,
    MLPConfig,
    NormConfig,
    PositionConfig,
    RotaryScalingConfig,
    divisors,
    listed,
)

# Users of a family's configuration need not know where its sections are written down.
__all__ = [
    "AttentionConfig",
    "GPTConfig",
    "MLPConfig",
    "NormConfig",
    "PositionConfig",
    "RotaryScalingConfig",
]

# Sizes of a model for proofs.
SHRUNK_HEAD = 16
SHRUNK_LENGTH = 32


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer with norms before each block.

    Attributes:
        vocab_size: Tokens of the tokenizer, before padding.
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        max_sequence_length: Longest sequence, tokens; the size of a learned position table.
        attention: Self-attention.
        mlp: The feed-forward block.
        family: Which model this is.
        position: How tokens know where they stand.
        norm: Normalisation.
        parallel_residual: Whether attention and MLP read the same residual, each with its own norm
            (GPT-NeoX), rather than one after the other.
        tie_embeddings: Whether the head uses the embedding's weight.
        embedding_dropout: Dropout after the embedding.
        hidden_dropout: Dropout of each block's output.
        init_std: Standard deviation of initial weights.
        scaled_output_init: Whether projections into the residual stream start smaller, by
            1 / sqrt(2 num_layers) (GPT-2).
        vocab_multiple: The padded vocabulary is a multiple of this x parallel.tensor.
        head_bias: Whether an untied head has a bias.
    """

    vocab_size: Positive
    num_layers: Positive
    hidden_size: Positive
    max_sequence_length: Positive
    attention: AttentionConfig
    mlp: MLPConfig
    family: Literal["gpt"] = "gpt"
    position: PositionConfig = field(default_factory=PositionConfig)
    norm: NormConfig = field(default_factory=NormConfig)
    parallel_residual: bool = False
    tie_embeddings: bool = True
    embedding_dropout: Probability = 0.0
    hidden_dropout: Probability = 0.0
    init_std: AboveZero = 0.02
    scaled_output_init: bool = True
    vocab_multiple: Positive = 128
    head_bias: bool = False

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.attention.head_dim or self.hidden_size // self.attention.num_heads

    @property
    def rotary_dim(self) -> int:
        """Features of each head that rotary positions turn; 0 without rotary positions."""
        if self.position.type != "rotary":
            return 0
        return int(self.head_dim * self.position.rotary_fraction)

    @property
    def position_limit(self) -> int | None:
        """Positions that the model can tell apart; None: no limit (anything but a table)."""
        return self.max_sequence_length if self.position.type == "learned" else None

    def check_fields(self, where: str) -> list[str]:
        """Rules between the sections of the model."""
        problems = []
        if self.head_bias and self.tie_embeddings:
            problems.append(
                f"{join_path(where, 'head_bias')} = true needs tie_embeddings = false, because a "
                "tied head is the embedding itself; set one of them to false"
            )
        heads = self.attention.num_heads
        least, why = 2, "turn pairs"
        if self.position.rotary_scaling.type == "dynamic_ntk":
            # Its exponent is R / (R - 2).
            least, why = 4, "with dynamic_ntk turn at least two pairs"
        if self.attention.head_dim is None and self.hidden_size % heads:
            problems.append(
                f"{join_path(where, 'attention.num_heads')} = {heads} does not divide "
                f"{join_path(where, 'hidden_size')} = {self.hidden_size}; use one of "
                f"{divisors(self.hidden_size)}, or set attention.head_dim"
            )
        elif self.position.type == "rotary" and (self.rotary_dim % 2 or self.rotary_dim < least):
            problems.append(
                f"{join_path(where, 'position.rotary_fraction')} = "
                f"{self.position.rotary_fraction:g} of head_dim = {self.head_dim} turns "
                f"{self.rotary_dim} features, but rotary positions {why}; choose a fraction "
                f"that gives an even number of at least {least}"
            )
        if self.attention.backend == "flash" and self.position.type == "alibi":
            problems.append(
                f"{join_path(where, 'attention.backend')} = flash cannot add ALiBi to the scores "
                '(position.type = alibi); use "auto", or other positions'
            )
        return problems

    def check(self, dims: ParallelDims) -> list[str]:
        """All reasons why this model cannot be laid out like ``dims``; empty: it can."""
        problems = []
        attention, tensor = self.attention, dims.tensor
        if attention.num_heads % tensor:
            problems.append(
                f"parallel.tensor = {tensor} does not divide model.attention.num_heads = "
                f"{attention.num_heads}; use {divisors(attention.num_heads)}"
            )
        elif attention.kv_heads % tensor and tensor % attention.kv_heads:
            problems.append(
                f"parallel.tensor = {tensor} neither divides model.attention.num_kv_heads = "
                f"{attention.kv_heads} nor is a multiple of it; "
                f"use {listed(self._tensor_degrees())}"
            )
        if self.mlp.intermediate_size % tensor:
            problems.append(
                f"parallel.tensor = {tensor} does not divide model.mlp.intermediate_size = "
                f"{self.mlp.intermediate_size}; use {listed(self._tensor_degrees())}"
            )
        chunks = dims.pipeline * dims.virtual_pipeline
        if self.num_layers < chunks:
            problems.append(
                f"parallel.pipeline = {dims.pipeline} x virtual_pipeline = {dims.virtual_pipeline} "
                f"= {chunks} is more than model.num_layers = {self.num_layers}, but each stage "
                f"needs a layer; use at most {self.num_layers} in all"
            )
        return problems

    def check_sequence(self, sequence_length: int) -> list[str]:
        """Whether the model can read sequences of this length; empty: it can."""
        if self.position_limit is None or sequence_length <= self.position_limit:
            return []
        return [
            f"data.sequence_length = {sequence_length} is longer than model.max_sequence_length = "
            f"{self.max_sequence_length}, the size of the learned position table; use at most "
            f"{self.max_sequence_length}, or a longer table"
        ]

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to ``vocab_multiple * tensor``."""
        unit = self.vocab_multiple * tensor
        return -(-self.vocab_size // unit) * unit

    def num_parameters(self) -> int:
        """Exact number of parameters, with the vocabulary not padded and tied weights once."""
        hidden, width, layers = self.hidden_size, self.mlp.intermediate_size, self.num_layers
        qkv = (self.attention.num_heads + 2 * self.attention.kv_heads) * self.head_dim
        layer = self._layer_matmul_weights() + 2 * self.norm.num_parameters(hidden)
        layer += qkv * self.attention.bias + hidden * self.attention.has_output_bias
        layer += 2 * self.norm.num_parameters(self.head_dim) * self.attention.qk_norm
        layer += ((1 + self.mlp.is_gated) * width + hidden) * self.mlp.bias
        embedding = self.vocab_size * hidden
        if self.position.type == "learned":
            embedding += self.max_sequence_length * hidden
        head = self.vocab_size * (hidden * (not self.tie_embeddings) + self.head_bias)
        return embedding + layers * layer + self.norm.num_parameters(hidden) + head

    def flops_per_token(self, sequence_length: int) -> int:
        """Matrix-multiply FLOPs of one token's forward and backward pass.

        6 N + 12 L A S, as in PaLM (arXiv:2204.02311, appendix B): N weights that are multiplied
        (head included, tied or not; embedding look-up, norms and biases not), L layers, A = heads x
        head size, S the positions attended to: ``sequence_length``, or the sliding window if that
        is shorter. The causal mask's halving and recomputed activations are not counted.
        """
        span = min(sequence_length, self.attention.sliding_window or sequence_length)
        weights = self.num_layers * self._layer_matmul_weights()
        weights += self.vocab_size * self.hidden_size
        attention = self.num_layers * self.attention.num_heads * self.head_dim * span
        return 6 * weights + 12 * attention

    def portable(self) -> "GPTConfig":
        """The same model for any device: the kernel "flash" becomes "auto"."""
        if self.attention.backend != "flash":
            return self
        return replace(self, attention=replace(self.attention, backend="auto"))

    def shrunk(self, dims: ParallelDims) -> "GPTConfig":
        """The same architecture at sizes that train in seconds on a CPU, for proofs.

        Every option is kept but the kernel (see ``portable``); what is cut is the number of layers,
        the widths, the vocabulary (to an odd number of words), the window and the sequence (to a
        multiple of ``dims.tensor``, for sequence parallelism). Heads keep their grouping and still
        fit ``dims``; rotary positions turn two pairs or more, the least that every scaling takes.
        """
        attention, heads, kv_heads = self.attention, self.attention.num_heads, 0
        if attention.kv_heads == heads:
            heads = kv_heads = 2 * dims.tensor
        else:
            kv_heads = min(attention.kv_heads, 2 * dims.tensor)
            if kv_heads % dims.tensor and dims.tensor % kv_heads:
                kv_heads = dims.tensor
            heads = kv_heads * max(2, dims.tensor // kv_heads)
        position = self.position
        if position.type == "rotary":
            turned = max(2 * int(SHRUNK_HEAD * position.rotary_fraction / 2), 4)
            position = replace(position, rotary_fraction=turned / SHRUNK_HEAD)
        small = replace(
            self.portable().attention,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=SHRUNK_HEAD if attention.head_dim else None,
            sliding_window=attention.sliding_window and min(attention.sliding_window, 5),
        )
        return replace(
            self,
            vocab_size=61,
            num_layers=max(2, dims.pipeline * dims.virtual_pipeline),
            hidden_size=SHRUNK_HEAD * heads,
            max_sequence_length=-(-SHRUNK_LENGTH // dims.tensor) * dims.tensor,
            attention=small,
            position=position,
            mlp=replace(self.mlp, intermediate_size=32 * heads),
            vocab_multiple=8,
        )

    def _layer_matmul_weights(self) -> int:
        heads, kv_heads = self.attention.num_heads, self.attention.kv_heads
        attention = self.hidden_size * self.head_dim * (2 * heads + 2 * kv_heads)
        projections = 3 if self.mlp.is_gated else 2
        return attention + projections * self.hidden_size * self.mlp.intermediate_size

    def _tensor_degrees(self) -> list[int]:
        heads, kv_heads = self.attention.num_heads, self.attention.kv_heads
        return [
            degree
            for degree in range(1, heads + 1)
            if heads % degree == 0
            and (kv_heads % degree == 0 or degree % kv_heads == 0)
            and self.mlp.intermediate_size % degree == 0
        ]
