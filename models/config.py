"""Configuration of the model families, without torch: shapes, counts and layout rules.

Everything that can be said about a model before its first tensor exists is said here: which values
fit together, how many parameters and FLOPs they mean, and which parallel layouts can hold them.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from ds_engine.config.reader import AboveZero, Positive, Probability, Range, join_path
from ds_engine.parallel.dims import ParallelDims

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh")


@dataclass(frozen=True)
class AttentionConfig:
    """Self-attention.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads, each shared by num_heads / num_kv_heads query heads;
            null: num_heads; 1: multi-query attention.
        head_dim: Size of one head; null: hidden_size / num_heads.
        bias: Whether the query, key and value projections have a bias.
        output_bias: Whether the output projection has a bias; null: as bias.
        qk_norm: Whether queries and keys are normalised per head (with norm.type, weights shared
            by the heads) before the position is applied.
        sliding_window: Newest positions that a token sees, itself included; null: all.
        dropout: Dropout of attention probabilities.
        backend: Kernel: "auto" takes the fastest that supports the layer.
    """

    num_heads: Positive
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    bias: bool = True
    output_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: Positive | None = None
    dropout: Probability = 0.0
    backend: Literal["auto", "reference", "sdpa", "flash"] = "auto"

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.num_kv_heads or self.num_heads

    @property
    def has_output_bias(self) -> bool:
        """Whether the output projection has a bias, with the default filled in."""
        return self.bias if self.output_bias is None else self.output_bias

    def check_fields(self, where: str) -> list[str]:
        """Rules between the fields of this section."""
        if self.num_heads % self.kv_heads == 0:
            return []
        return [
            f"{join_path(where, 'num_kv_heads')} = {self.num_kv_heads} does not divide "
            f"{join_path(where, 'num_heads')} = {self.num_heads}; use {divisors(self.num_heads)}"
        ]


@dataclass(frozen=True)
class RotaryScalingConfig:
    """Stretching of rotary frequencies beyond the length that the model was trained with.

    Attributes:
        type: Method: "linear" (position interpolation, arXiv:2306.15595), "dynamic_ntk", "llama3"
            or "yarn" (arXiv:2309.00071).
        factor: How many times longer the context becomes.
        original_max_sequence_length: Length before stretching; needed by "llama3" and "yarn";
            null for "dynamic_ntk": max_sequence_length.
        low_freq_factor: "llama3": wavelengths above original length / this are fully stretched.
        high_freq_factor: "llama3": wavelengths below original length / this stay.
        beta_fast: "yarn": rotations over the original length above which frequencies stay.
        beta_slow: "yarn": rotations below which frequencies are fully stretched.
        attention_factor: "yarn": multiplier of cosines and sines; null: 0.1 ln(factor) + 1.
    """

    type: Literal["none", "linear", "dynamic_ntk", "llama3", "yarn"] = "none"
    factor: Annotated[float, Range(minimum=1)] = 1.0
    original_max_sequence_length: Positive | None = None
    low_freq_factor: AboveZero = 1.0
    high_freq_factor: AboveZero = 4.0
    beta_fast: AboveZero = 32.0
    beta_slow: AboveZero = 1.0
    attention_factor: AboveZero | None = None

    def check_fields(self, where: str) -> list[str]:
        """Rules between the fields of this section."""
        problems = []
        factor, kind = join_path(where, "factor"), f"{join_path(where, 'type')} = {self.type}"
        if self.type == "none" and self.factor != 1.0:
            problems.append(f"{factor} = {self.factor:g} has no effect with {kind}; set the type")
        if self.type in ("llama3", "yarn") and self.original_max_sequence_length is None:
            problems.append(f"{kind} needs {join_path(where, 'original_max_sequence_length')}")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            problems.append(
                f"{join_path(where, 'high_freq_factor')} = {self.high_freq_factor:g} must be above "
                f"low_freq_factor = {self.low_freq_factor:g}"
            )
        if self.type == "yarn" and self.beta_fast <= self.beta_slow:
            problems.append(
                f"{join_path(where, 'beta_fast')} = {self.beta_fast:g} must be above beta_slow = "
                f"{self.beta_slow:g}"
            )
        return problems


@dataclass(frozen=True)
class PositionConfig:
    """How tokens know where they stand.

    Attributes:
        type: "learned" adds a trained vector, "rotary" turns queries and keys (arXiv:2104.09864),
            "alibi" lowers scores by distance (arXiv:2108.12409), "none" leaves the causal mask.
        rotary_base: Base of the rotary wavelengths.
        rotary_fraction: Share of each head that is turned.
        rotary_interleaved: Whether pairs are neighbours (GPT-J) rather than halves (NeoX, Llama).
        rotary_scaling: Stretching to longer contexts.
    """

    type: Literal["learned", "rotary", "alibi", "none"] = "learned"
    rotary_base: AboveZero = 10000.0
    rotary_fraction: Annotated[float, Range(above=0, maximum=1)] = 1.0
    rotary_interleaved: bool = False
    rotary_scaling: RotaryScalingConfig = field(default_factory=RotaryScalingConfig)

    def check_fields(self, where: str) -> list[str]:
        """Rotary keys without rotary positions would be ignored, so they are refused."""
        if self.type == "rotary":
            return []
        defaults = PositionConfig()
        return [
            f"{join_path(where, name)} is set but {join_path(where, 'type')} = {self.type}; "
            'remove it, or use the type "rotary"'
            for name in ("rotary_base", "rotary_fraction", "rotary_interleaved", "rotary_scaling")
            if getattr(self, name) != getattr(defaults, name)
        ]


@dataclass(frozen=True)
class NormConfig:
    """Normalisation.

    Attributes:
        type: "layernorm" has a weight and a bias, "rmsnorm" a weight only.
        epsilon: Added to the variance.
    """

    type: Literal["layernorm", "rmsnorm"] = "layernorm"
    epsilon: AboveZero = 1e-5

    def num_parameters(self, size: int) -> int:
        """Parameters of one norm over ``size`` features."""
        return 2 * size if self.type == "layernorm" else size


@dataclass(frozen=True)
class MLPConfig:
    """The feed-forward block.

    Attributes:
        intermediate_size: Width between the two projections (of each half for gated activations).
        activation: "gelu" is exact, "gelu_tanh" the approximation; "swiglu", "geglu" and
            "geglu_tanh" are gated: a second up-projection multiplies the activation
            (arXiv:2002.05202).
        bias: Whether the projections have a bias.
    """

    intermediate_size: Positive
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh"] = "gelu"
    bias: bool = True

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate beside the up-projection."""
        return self.activation in GATED_ACTIVATIONS


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

    def check_fields(self, where: str) -> list[str]:
        """Rules between the sections of the model."""
        problems = []
        if self.head_bias and self.tie_embeddings:
            problems.append(
                f"{join_path(where, 'head_bias')} = true needs tie_embeddings = false, because a "
                "tied head is the embedding itself; set one of them to false"
            )
        heads = self.attention.num_heads
        if self.attention.head_dim is None and self.hidden_size % heads:
            problems.append(
                f"{join_path(where, 'attention.num_heads')} = {heads} does not divide "
                f"{join_path(where, 'hidden_size')} = {self.hidden_size}; use one of "
                f"{divisors(self.hidden_size)}, or set attention.head_dim"
            )
        elif self.position.type == "rotary" and (self.rotary_dim % 2 or self.rotary_dim < 2):
            problems.append(
                f"{join_path(where, 'position.rotary_fraction')} = "
                f"{self.position.rotary_fraction:g} of head_dim = {self.head_dim} turns "
                f"{self.rotary_dim} features, but rotary positions turn pairs; choose a fraction "
                "that gives an even number of at least 2"
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
                f"use {_listed(self._tensor_degrees())}"
            )
        if self.mlp.intermediate_size % tensor:
            problems.append(
                f"parallel.tensor = {tensor} does not divide model.mlp.intermediate_size = "
                f"{self.mlp.intermediate_size}; use {_listed(self._tensor_degrees())}"
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
        if self.position.type != "learned" or sequence_length <= self.max_sequence_length:
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

    def shrunk(self, dims: ParallelDims) -> "GPTConfig":
        """The same architecture at sizes that train in seconds on a CPU, for proofs.

        Every option is kept; what is cut is the number of layers, the widths, the vocabulary (to an
        odd number of words) and the window. Heads keep their grouping and still fit ``dims``.
        """
        attention, heads, kv_heads = self.attention, self.attention.num_heads, 0
        if attention.kv_heads == heads:
            heads = kv_heads = 2 * dims.tensor
        else:
            kv_heads = min(attention.kv_heads, 2 * dims.tensor)
            if kv_heads % dims.tensor and dims.tensor % kv_heads:
                kv_heads = dims.tensor
            heads = kv_heads * max(2, dims.tensor // kv_heads)
        small = replace(
            attention,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=16 if attention.head_dim else None,
            sliding_window=attention.sliding_window and min(attention.sliding_window, 5),
        )
        return replace(
            self,
            vocab_size=61,
            num_layers=max(2, dims.pipeline * dims.virtual_pipeline),
            hidden_size=16 * heads,
            max_sequence_length=32,
            attention=small,
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


def divisors(number: int) -> str:
    """The divisors of a number in words, such as "1, 2, 4, 8 or 16"."""
    return _listed([degree for degree in range(1, number + 1) if number % degree == 0])


def _listed(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
