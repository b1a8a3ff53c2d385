"""Configuration of the model families, without torch: shapes, counts and layout rules.

Everything that can be said about a model before its first tensor exists is said here: which values
fit together, how many parameters and FLOPs they mean, and which parallel layouts can hold them.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from ds_engine.config.reader import AboveZero, Positive, Probability, join_path
from ds_engine.parallel.dims import ParallelDims
from models import layout_rules as rules
from models.sections import (
    AttentionConfig,
    MLPConfig,
    NormConfig,
    PositionConfig,
    RotaryScalingConfig,
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
    def is_encoder_decoder(self) -> bool:
        """Whether rows have two sequences: no."""
        return False

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return rules.head_size(self.hidden_size, self.attention)

    @property
    def rotary_dim(self) -> int:
        """Features of each head that rotary positions turn; 0 without rotary positions."""
        return rules.rotary_dims(self.hidden_size, self.attention, self.position)

    @property
    def position_limit(self) -> int | None:
        """Positions that the model can tell apart; None: no limit (anything but a table)."""
        return self.max_sequence_length if self.position.type == "learned" else None

    def check_fields(self, where: str) -> list[str]:
        """Rules between the sections of the model."""
        tied = self.tie_embeddings
        problems = rules.tied_bias_problems(head_bias=self.head_bias, tied=tied, where=where)
        allowed = ("learned", "rotary", "alibi", "none")
        problems += rules.unsupported_position(self.position, allowed, "GPT", where)
        heads = rules.head_problems(self.hidden_size, self.attention, where)
        turns = rules.rotary_problems(self.hidden_size, self.attention, self.position, where)
        problems += heads or turns
        if self.attention.backend == "flash" and self.position.type == "alibi":
            problems.append(
                f"{join_path(where, 'attention.backend')} = flash cannot add ALiBi to the scores "
                '(position.type = alibi); use "auto", or other positions'
            )
        return problems

    def check(self, dims: ParallelDims) -> list[str]:
        """All reasons why this model cannot be laid out like ``dims``; empty: it can."""
        return [
            *rules.tensor_problems(self.attention, self.mlp, dims.tensor),
            *rules.stage_problems(dims, self.num_layers, "model.num_layers"),
        ]

    def check_sequence(self, sequence_length: int, decoder_length: int | None = None) -> list[str]:
        """Whether the model can read sequences of this length; empty: it can."""
        del decoder_length
        return rules.length_problems("data.sequence_length", sequence_length, self.position_limit)

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to ``vocab_multiple * tensor``."""
        return rules.padded_vocabulary(self.vocab_size, self.vocab_multiple, tensor)

    def num_parameters(self) -> int:
        """Exact number of parameters, with the vocabulary not padded and tied weights once."""
        hidden = self.hidden_size
        layer = rules.attention_parameters(hidden, self.attention, self.norm)
        layer += rules.mlp_parameters(hidden, self.mlp) + 2 * self.norm.num_parameters(hidden)
        embedding = self.vocab_size * hidden + (self.position_limit or 0) * hidden
        head = self.vocab_size * (hidden * (not self.tie_embeddings) + self.head_bias)
        return embedding + self.num_layers * layer + self.norm.num_parameters(hidden) + head

    def flops_per_token(self, sequence_length: int) -> int:
        """Matrix-multiply FLOPs of one token's forward and backward pass.

        6 N + 12 L A S, as in PaLM (arXiv:2204.02311, appendix B): N weights that are multiplied
        (head included, tied or not; embedding look-up, norms and biases not), L layers, A = heads x
        head size, S the positions attended to: ``sequence_length``, or the sliding window if that
        is shorter. The causal mask's halving and recomputed activations are not counted.
        """
        span = min(sequence_length, self.attention.sliding_window or sequence_length)
        layer = rules.attention_weights(self.hidden_size, self.attention)
        layer += rules.mlp_weights(self.hidden_size, self.mlp)
        weights = self.num_layers * layer + self.vocab_size * self.hidden_size
        scores = rules.attention_flops(self.attention, self.head_dim, 1, span)
        return 6 * weights + self.num_layers * scores

    def flops_per_sample(self, sequence_length: int, decoder_length: int | None) -> int:
        """Matrix-multiply FLOPs of one row, forward and backward; there is no decoder length."""
        del decoder_length
        return self.flops_per_token(sequence_length) * sequence_length

    def portable(self) -> "GPTConfig":
        """The same model for any device: the kernel "flash" becomes "auto"."""
        if self.attention.backend != "flash":
            return self
        return replace(self, attention=rules.portable_attention(self.attention))

    def shrunk(self, dims: ParallelDims) -> "GPTConfig":
        """The same architecture at sizes that train in seconds on a CPU, for proofs.

        Every option is kept but the kernel (see ``portable``); what is cut is the number of layers,
        the widths, the vocabulary (to an odd number of words), the window and the sequence (to a
        multiple of ``dims.tensor``, for sequence parallelism). Heads keep their grouping and still
        fit ``dims``.
        """
        attention = rules.shrunk_attention(self.attention, dims.tensor)
        return replace(
            self,
            vocab_size=rules.SHRUNK_VOCABULARY,
            num_layers=max(2, dims.pipeline * dims.virtual_pipeline),
            hidden_size=rules.SHRUNK_HEAD * attention.num_heads,
            max_sequence_length=rules.shrunk_length(dims.tensor),
            attention=attention,
            position=rules.shrunk_position(self.position),
            mlp=replace(self.mlp, intermediate_size=rules.SHRUNK_WIDTH * attention.num_heads),
            vocab_multiple=rules.SHRUNK_VOCAB_MULTIPLE,
        )
