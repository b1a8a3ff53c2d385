"""The sections of a model's configuration that families share, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ds_engine.config.reader import AboveZero, Positive, Probability, Range, join_path

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh")

# The keys that only one type of positions reads.
POSITION_KEYS: Mapping[str, tuple[str, ...]] = {
    "rotary": ("rotary_base", "rotary_fraction", "rotary_interleaved", "rotary_scaling"),
    "relative": ("relative_buckets", "relative_max_distance"),
}


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
        backend: Kernel: "auto" takes the fastest that supports the layer and the device; "flash"
            trains with flash-attn or not at all (to generate, evaluate and verify it is "auto").
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
        problems = []
        if self.num_heads % self.kv_heads:
            problems.append(
                f"{join_path(where, 'num_kv_heads')} = {self.num_kv_heads} does not divide "
                f"{join_path(where, 'num_heads')} = {self.num_heads}; use "
                f"{divisors(self.num_heads)}"
            )
        if self.backend == "flash" and self.dropout > 0:
            problems.append(
                f"{join_path(where, 'backend')} = flash cannot drop attention probabilities "
                f"(dropout = {self.dropout:g}), because its masks depend on the layout; use "
                '"auto", or dropout = 0'
            )
        return problems


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
            "alibi" lowers scores by distance (arXiv:2108.12409), "relative" adds a trained number
            to scores for each bucket of distances and head (T5, arXiv:1910.10683), "none" leaves
            the causal mask.
        rotary_base: Base of the rotary wavelengths.
        rotary_fraction: Share of each head that is turned.
        rotary_interleaved: Whether pairs are neighbours (GPT-J) rather than halves (NeoX, Llama).
        rotary_scaling: Stretching to longer contexts.
        relative_buckets: Buckets of distances; an encoder has half of them for each direction.
        relative_max_distance: Distance, tokens, from which on all share the last bucket.
    """

    type: Literal["learned", "rotary", "alibi", "relative", "none"] = "learned"
    rotary_base: AboveZero = 10000.0
    rotary_fraction: Annotated[float, Range(above=0, maximum=1)] = 1.0
    rotary_interleaved: bool = False
    rotary_scaling: RotaryScalingConfig = field(default_factory=RotaryScalingConfig)
    relative_buckets: Annotated[int, Range(minimum=4)] = 32
    relative_max_distance: Positive = 128

    def check_fields(self, where: str) -> list[str]:
        """Keys of positions of another type would be ignored, so they are refused."""
        defaults = PositionConfig()
        problems = [
            f"{join_path(where, name)} is set but {join_path(where, 'type')} = {self.type}; "
            f'remove it, or use the type "{kind}"'
            for kind, names in POSITION_KEYS.items()
            for name in names
            if self.type != kind and getattr(self, name) != getattr(defaults, name)
        ]
        if self.type == "rotary" and self.rotary_scaling.type == "yarn" and self.rotary_base <= 1:
            problems.append(
                f"{join_path(where, 'rotary_base')} = {self.rotary_base:g} must be above 1 "
                "with rotary_scaling.type = yarn, which divides by its logarithm"
            )
        if self.type == "relative":
            problems += self._check_relative(where)
        return problems

    def _check_relative(self, where: str) -> list[str]:
        buckets, distance = self.relative_buckets, self.relative_max_distance
        if buckets % 2:
            return [
                f"{join_path(where, 'relative_buckets')} = {buckets} must be even, because an "
                f"encoder has half of them for each direction; use {buckets - 1} or {buckets + 1}"
            ]
        if distance <= buckets // 2:
            return [
                f"{join_path(where, 'relative_max_distance')} = {distance} must be above "
                f"relative_buckets / 2 = {buckets // 2}: so many distances have a bucket of their "
                f"own; use at least {buckets // 2 + 1}"
            ]
        return []


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


def divisors(number: int) -> str:
    """The divisors of a number in words, such as "1, 2, 4, 8 or 16"."""
    return listed([degree for degree in range(1, number + 1) if number % degree == 0])


def listed(numbers: list[int]) -> str:
    """Numbers in words, such as "1, 2 or 4"."""
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
