"""Rules and counts that the transformer families share, without torch.

A family's configuration class says which of them it keeps; none of them is written twice.
Legend: ``N`` query heads, ``K`` key and value heads, ``D`` head size.
"""

from dataclasses import replace

from ds_engine.config.reader import join_path
from ds_engine.parallel.dims import ParallelDims
from models.sections import (
    AttentionConfig,
    MLPConfig,
    NormConfig,
    PositionConfig,
    divisors,
    listed,
)

# Sizes of a model for proofs.
SHRUNK_HEAD = 16
SHRUNK_LENGTH = 32
SHRUNK_VOCABULARY = 61
SHRUNK_VOCAB_MULTIPLE = 8
SHRUNK_BUCKETS = 8
SHRUNK_DISTANCE = 16
SHRUNK_WIDTH = 32


def head_size(hidden_size: int, attention: AttentionConfig) -> int:
    """``D``, with the default filled in."""
    return attention.head_dim or hidden_size // attention.num_heads


def head_problems(hidden_size: int, attention: AttentionConfig, where: str) -> list[str]:
    """Why the width cannot be dealt to the heads; empty: it can."""
    if attention.head_dim is not None or hidden_size % attention.num_heads == 0:
        return []
    return [
        f"{join_path(where, 'attention.num_heads')} = {attention.num_heads} does not divide "
        f"{join_path(where, 'hidden_size')} = {hidden_size}; use one of "
        f"{divisors(hidden_size)}, or set attention.head_dim"
    ]


def tied_bias_problems(*, head_bias: bool, tied: bool, where: str) -> list[str]:
    """Why a head cannot have a bias; empty: it has none, or can."""
    if not (head_bias and tied):
        return []
    return [
        f"{join_path(where, 'head_bias')} = true needs tie_embeddings = false, because a "
        "tied head is the embedding itself; set one of them to false"
    ]


def unsupported_attention(attention: AttentionConfig, family: str, where: str) -> list[str]:
    """Options of attention that a family other than GPT does not have."""
    place = join_path(where, "attention")
    problems = []
    if attention.qk_norm:
        problems.append(
            f"{place}.qk_norm = true is not an option of {family} models; set it to false"
        )
    if attention.sliding_window is not None:
        problems.append(
            f"{place}.sliding_window = {attention.sliding_window} is not an option of {family} "
            "models; remove it"
        )
    return problems


def rotary_dims(hidden_size: int, attention: AttentionConfig, position: PositionConfig) -> int:
    """Features of each head that rotary positions turn; 0 without rotary positions."""
    if position.type != "rotary":
        return 0
    return int(head_size(hidden_size, attention) * position.rotary_fraction)


def rotary_problems(
    hidden_size: int, attention: AttentionConfig, position: PositionConfig, where: str
) -> list[str]:
    """Why rotary positions cannot turn these heads; empty: they can, or there are none."""
    least, why = 2, "turn pairs"
    if position.rotary_scaling.type == "dynamic_ntk":
        # Its exponent is R / (R - 2).
        least, why = 4, "with dynamic_ntk turn at least two pairs"
    turned = rotary_dims(hidden_size, attention, position)
    if position.type != "rotary" or (turned % 2 == 0 and turned >= least):
        return []
    return [
        f"{join_path(where, 'position.rotary_fraction')} = {position.rotary_fraction:g} of "
        f"head_dim = {head_size(hidden_size, attention)} turns {turned} features, but rotary "
        f"positions {why}; choose a fraction that gives an even number of at least {least}"
    ]


def unsupported_position(
    position: PositionConfig, allowed: tuple[str, ...], family: str, where: str
) -> list[str]:
    """Why a family cannot have these positions; empty: it can."""
    if position.type in allowed:
        return []
    choice = " or ".join(f'"{name}"' for name in allowed)
    return [
        f"{join_path(where, 'position.type')} = {position.type} is not for {family} models; "
        f"use {choice}"
    ]


def tensor_problems(attention: AttentionConfig, mlp: MLPConfig, tensor: int) -> list[str]:
    """Why layers cannot be cut into ``tensor`` parts; empty: they can."""
    problems = []
    if attention.num_heads % tensor:
        problems.append(
            f"parallel.tensor = {tensor} does not divide model.attention.num_heads = "
            f"{attention.num_heads}; use {divisors(attention.num_heads)}"
        )
    elif attention.kv_heads % tensor and tensor % attention.kv_heads:
        problems.append(
            f"parallel.tensor = {tensor} neither divides model.attention.num_kv_heads = "
            f"{attention.kv_heads} nor is a multiple of it; "
            f"use {listed(tensor_degrees(attention, mlp))}"
        )
    if mlp.intermediate_size % tensor:
        problems.append(
            f"parallel.tensor = {tensor} does not divide model.mlp.intermediate_size = "
            f"{mlp.intermediate_size}; use {listed(tensor_degrees(attention, mlp))}"
        )
    return problems


def tensor_degrees(attention: AttentionConfig, mlp: MLPConfig) -> list[int]:
    """All tensor-parallel degrees that layers can be cut by."""
    heads, kv_heads = attention.num_heads, attention.kv_heads
    return [
        degree
        for degree in range(1, heads + 1)
        if heads % degree == 0
        and (kv_heads % degree == 0 or degree % kv_heads == 0)
        and mlp.intermediate_size % degree == 0
    ]


def stage_problems(dims: ParallelDims, layers: int, name: str) -> list[str]:
    """Why ``layers`` cannot be dealt to the stages; ``name`` says which keys make them up."""
    chunks = dims.pipeline * dims.virtual_pipeline
    if layers >= chunks:
        return []
    return [
        f"parallel.pipeline = {dims.pipeline} x virtual_pipeline = {dims.virtual_pipeline} "
        f"= {chunks} is more than {name} = {layers}, but each stage "
        f"needs a layer; use at most {layers} in all"
    ]


def length_problems(key: str, length: int, limit: int | None) -> list[str]:
    """Why a sequence is too long for a table of ``limit`` positions; empty: it is not."""
    if limit is None or length <= limit:
        return []
    return [
        f"{key} = {length} is longer than model.max_sequence_length = "
        f"{limit}, the size of the learned position table; use at most "
        f"{limit}, or a longer table"
    ]


def padded_vocabulary(words: int, multiple: int, tensor: int) -> int:
    """``words`` rounded up to ``multiple * tensor``."""
    unit = multiple * tensor
    return -(-words // unit) * unit


def attention_weights(hidden_size: int, attention: AttentionConfig) -> int:
    """Weights of the four projections, biases not counted: (2 N + 2 K) x D x hidden."""
    heads = 2 * attention.num_heads + 2 * attention.kv_heads
    return hidden_size * head_size(hidden_size, attention) * heads


def attention_parameters(hidden_size: int, attention: AttentionConfig, norm: NormConfig) -> int:
    """Parameters of one attention block: projections, biases and norms of queries and keys."""
    size = head_size(hidden_size, attention)
    total = attention_weights(hidden_size, attention)
    total += (attention.num_heads + 2 * attention.kv_heads) * size * attention.bias
    total += hidden_size * attention.has_output_bias
    return total + 2 * norm.num_parameters(size) * attention.qk_norm


def mlp_weights(hidden_size: int, mlp: MLPConfig) -> int:
    """Weights of the two projections (three when gated), biases not counted."""
    return (3 if mlp.is_gated else 2) * hidden_size * mlp.intermediate_size


def mlp_parameters(hidden_size: int, mlp: MLPConfig) -> int:
    """Parameters of one feed-forward block."""
    biases = (1 + mlp.is_gated) * mlp.intermediate_size + hidden_size
    return mlp_weights(hidden_size, mlp) + biases * mlp.bias


def attention_flops(attention: AttentionConfig, size: int, queries: int, keys: int) -> int:
    """FLOPs of scores and weighted sums, forward and backward: 12 x N x D x queries x keys.

    As in PaLM (arXiv:2204.02311, appendix B): masks do not make it less.
    """
    return 12 * attention.num_heads * size * queries * keys


def portable_attention(attention: AttentionConfig) -> AttentionConfig:
    """The same attention for any device: the kernel "flash" becomes "auto"."""
    return replace(attention, backend="auto") if attention.backend == "flash" else attention


def shrunk_attention(attention: AttentionConfig, tensor: int) -> AttentionConfig:
    """Few small heads that keep their grouping and can be cut into ``tensor`` parts."""
    heads, kv_heads = attention.num_heads, 0
    if attention.kv_heads == heads:
        heads = kv_heads = 2 * tensor
    else:
        kv_heads = min(attention.kv_heads, 2 * tensor)
        if kv_heads % tensor and tensor % kv_heads:
            kv_heads = tensor
        heads = kv_heads * max(2, tensor // kv_heads)
    return replace(
        portable_attention(attention),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=SHRUNK_HEAD if attention.head_dim else None,
        sliding_window=attention.sliding_window and min(attention.sliding_window, 5),
    )


def shrunk_position(position: PositionConfig) -> PositionConfig:
    """The same kind of positions for small heads and short sequences.

    Rotary positions turn two pairs or more, the least that every scaling takes. Relative positions
    have so few buckets that a short sequence falls into each kind of them: near ones of one
    distance, far ones of several, and the last one.
    """
    if position.type == "rotary":
        turned = max(2 * int(SHRUNK_HEAD * position.rotary_fraction / 2), 4)
        return replace(position, rotary_fraction=turned / SHRUNK_HEAD)
    if position.type == "relative":
        return replace(
            position,
            relative_buckets=min(position.relative_buckets, SHRUNK_BUCKETS),
            relative_max_distance=SHRUNK_DISTANCE,
        )
    return position


def shrunk_length(tensor: int) -> int:
    """A short sequence that ``tensor`` ranks can split."""
    return -(-SHRUNK_LENGTH // tensor) * tensor
