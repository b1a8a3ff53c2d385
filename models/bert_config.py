"""Configuration of BERT, an encoder with heads for masked words and sentences, without torch."""

from dataclasses import dataclass, field, replace
from typing import Literal

from ds_engine.config.reader import AboveZero, Count, Positive, Probability, join_path
from ds_engine.parallel.dims import ParallelDims
from models import layout_rules as rules
from models.sections import AttentionConfig, MLPConfig, NormConfig, PositionConfig


@dataclass(frozen=True)
class BertConfig:
    """BERT (arXiv:1810.04805): an encoder that predicts masked words, and a class of the row.

    Attributes:
        vocab_size: Tokens of the tokenizer, before padding.
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        max_sequence_length: Longest sequence, tokens; the size of the learned position table.
        attention: Self-attention.
        mlp: The feed-forward block.
        family: Which model this is.
        norm: Normalisation; layernorm with epsilon 1e-12 unless this is set.
        norm_first: Whether norms stand before each block (and one after the last layer), rather
            than after each residual sum and the embedding as in the paper.
        num_token_types: Rows of the table that tells the parts of a row apart; 0: none (RoBERTa
            has 1).
        sentence_head: Whether there are a pooler and a head of two classes, for the sentence
            objectives.
        num_labels: Classes to fine-tune for: a classification head takes the place of the heads
            for words and sentences; null: none.
        position: How tokens know where they stand: "learned" as in the paper, or "rotary".
        tie_embeddings: Whether the head for words uses the embedding's weight.
        embedding_dropout: Dropout after the embedding.
        hidden_dropout: Dropout of each block's output, and before the classification head's last
            layer.
        init_std: Standard deviation of initial weights.
        scaled_output_init: Whether projections into the residual stream start smaller, by
            1 / sqrt(2 num_layers).
        vocab_multiple: The padded vocabulary is a multiple of this x parallel.tensor.
    """

    vocab_size: Positive
    num_layers: Positive
    hidden_size: Positive
    max_sequence_length: Positive
    attention: AttentionConfig
    mlp: MLPConfig
    family: Literal["bert"] = "bert"
    norm: NormConfig = field(default_factory=lambda: NormConfig("layernorm", 1e-12))
    norm_first: bool = False
    num_token_types: Count = 2
    sentence_head: bool = True
    num_labels: Positive | None = None
    position: PositionConfig = field(default_factory=PositionConfig)
    tie_embeddings: bool = True
    embedding_dropout: Probability = 0.0
    hidden_dropout: Probability = 0.0
    init_std: AboveZero = 0.02
    scaled_output_init: bool = False
    vocab_multiple: Positive = 128

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether rows have two sequences: no."""
        return False

    @property
    def has_sentence_head(self) -> bool:
        """Whether there is a head for sentences: not beside a classification head."""
        return self.sentence_head and self.num_labels is None

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return rules.head_size(self.hidden_size, self.attention)

    @property
    def position_limit(self) -> int | None:
        """Positions that the model can tell apart; None: no limit (rotary)."""
        return self.max_sequence_length if self.position.type == "learned" else None

    @property
    def rotary_dim(self) -> int:
        """Features of each head that rotary positions turn; 0 without rotary positions."""
        return rules.rotary_dims(self.hidden_size, self.attention, self.position)

    def check_fields(self, where: str) -> list[str]:
        """Rules between the sections of the model."""
        problems = [
            *rules.unsupported_position(self.position, ("learned", "rotary"), "BERT", where),
            *rules.unsupported_attention(self.attention, "BERT", where),
        ]
        heads = rules.head_problems(self.hidden_size, self.attention, where)
        turns = rules.rotary_problems(self.hidden_size, self.attention, self.position, where)
        problems += heads or turns
        if self.num_labels == 1:
            problems.append(
                f"{join_path(where, 'num_labels')} = 1 leaves nothing to tell apart; use 2 or more"
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
        norm = self.norm.num_parameters(hidden)
        layer = rules.attention_parameters(hidden, self.attention, self.norm)
        layer += rules.mlp_parameters(hidden, self.mlp) + 2 * norm
        # Before the first layer (post-norm) or after the last one (pre-norm).
        embedding = self.vocab_size + (self.position_limit or 0) + self.num_token_types
        return embedding * hidden + norm + self.num_layers * layer + self._head_parameters()

    def _head_parameters(self) -> int:
        hidden, dense = self.hidden_size, self.hidden_size * (self.hidden_size + 1)
        if self.num_labels is not None:
            return dense + self.num_labels * (hidden + 1)
        words = dense + self.norm.num_parameters(hidden) + self.vocab_size
        words += self.vocab_size * hidden * (not self.tie_embeddings)
        return words + (dense + 2 * (hidden + 1)) * self.sentence_head

    def flops_per_token(self, sequence_length: int) -> int:
        """Matrix-multiply FLOPs of one token, forward and backward.

        6 N + 12 L A S as for GPT, with N the weights of the layers and of the head for words (its
        dense layer and the vocabulary). The heads that read one token of a row are not counted.
        """
        hidden = self.hidden_size
        layer = rules.attention_weights(hidden, self.attention)
        layer += rules.mlp_weights(hidden, self.mlp)
        weights = self.num_layers * layer
        if self.num_labels is None:
            weights += hidden * (hidden + self.vocab_size)
        scores = rules.attention_flops(self.attention, self.head_dim, 1, sequence_length)
        return 6 * weights + self.num_layers * scores

    def flops_per_sample(self, sequence_length: int, decoder_length: int | None) -> int:
        """Matrix-multiply FLOPs of one row, forward and backward; there is no decoder length."""
        del decoder_length
        return self.flops_per_token(sequence_length) * sequence_length

    def portable(self) -> "BertConfig":
        """The same model for any device: the kernel "flash" becomes "auto"."""
        return replace(self, attention=rules.portable_attention(self.attention))

    def shrunk(self, dims: ParallelDims) -> "BertConfig":
        """The same architecture at sizes that train in seconds on a CPU; every option is kept."""
        attention = rules.shrunk_attention(self.portable().attention, dims.tensor)
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
