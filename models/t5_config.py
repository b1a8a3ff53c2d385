"""Configuration of T5, an encoder and a decoder, without torch."""

from dataclasses import dataclass, field, replace
from typing import Literal

from ds_engine.config.reader import AboveZero, Positive, Probability, join_path
from ds_engine.parallel.dims import ParallelDims
from models import layout_rules as rules
from models.sections import AttentionConfig, MLPConfig, NormConfig, PositionConfig


@dataclass(frozen=True)
class T5Config:
    """T5 (arXiv:1910.10683): an encoder that a decoder attends to, norms before each block.

    Attributes:
        vocab_size: Tokens of the tokenizer, before padding.
        num_layers: Layers of the encoder.
        hidden_size: Width of the residual stream.
        max_sequence_length: Longest sequence of encoder and decoder, tokens; the size of their
            learned position tables.
        attention: Self-attention and cross-attention.
        mlp: The feed-forward block.
        family: Which model this is.
        num_decoder_layers: Layers of the decoder; null: num_layers.
        position: How tokens know where they stand: "relative" unless this is set, or "learned"
            (each of encoder and decoder has its own).
        norm: Normalisation; rmsnorm with epsilon 1e-6 unless this is set.
        tie_embeddings: Whether the head uses the embedding's weight (T5 1.0).
        scale_logits: Whether logits are multiplied by hidden_size ** -0.5; null: as
            tie_embeddings.
        scale_attention: Whether scores are multiplied by head_dim ** -0.5; T5 leaves it to the
            initial weights.
        embedding_dropout: Dropout after the embedding.
        hidden_dropout: Dropout of each block's output.
        activation_dropout: Dropout inside the feed-forward block, after the activation.
        init: How initial weights are drawn: "t5" as in the paper, each with a standard deviation
            of its own; "normal": with one standard deviation for all.
        init_std: "t5": factor of the standard deviations; "normal": the standard deviation.
        scaled_output_init: Whether projections into the residual stream start smaller, by
            1 / sqrt(2 x layers of encoder or decoder); "normal" only.
        vocab_multiple: The padded vocabulary is a multiple of this x parallel.tensor.
        head_bias: Whether an untied head has a bias.
    """

    vocab_size: Positive
    num_layers: Positive
    hidden_size: Positive
    max_sequence_length: Positive
    attention: AttentionConfig
    mlp: MLPConfig
    family: Literal["t5"] = "t5"
    num_decoder_layers: Positive | None = None
    position: PositionConfig = field(default_factory=lambda: PositionConfig(type="relative"))
    norm: NormConfig = field(default_factory=lambda: NormConfig("rmsnorm", 1e-6))
    tie_embeddings: bool = True
    scale_logits: bool | None = None
    scale_attention: bool = False
    embedding_dropout: Probability = 0.0
    hidden_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    init: Literal["t5", "normal"] = "t5"
    init_std: AboveZero = 1.0
    scaled_output_init: bool = False
    vocab_multiple: Positive = 128
    head_bias: bool = False

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether rows have two sequences: yes."""
        return True

    @property
    def decoder_layers(self) -> int:
        """Layers of the decoder, with the default filled in."""
        return self.num_decoder_layers or self.num_layers

    @property
    def has_scaled_logits(self) -> bool:
        """Whether logits are scaled, with the default filled in."""
        return self.tie_embeddings if self.scale_logits is None else self.scale_logits

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return rules.head_size(self.hidden_size, self.attention)

    @property
    def position_limit(self) -> int | None:
        """Positions that encoder and decoder can tell apart; None: no limit."""
        return self.max_sequence_length if self.position.type == "learned" else None

    def check_fields(self, where: str) -> list[str]:
        """Rules between the sections of the model."""
        tied = self.tie_embeddings
        problems = [
            *rules.tied_bias_problems(head_bias=self.head_bias, tied=tied, where=where),
            *rules.unsupported_position(self.position, ("relative", "learned"), "T5", where),
            *rules.unsupported_attention(self.attention, "T5", where),
            *rules.head_problems(self.hidden_size, self.attention, where),
        ]
        if self.attention.backend == "flash":
            problems.append(
                f"{join_path(where, 'attention.backend')} = flash is not for T5 models, whose "
                "scores have a bias and whose decoder attends to another sequence; use "
                '"auto"'
            )
        if self.init == "normal" and self.init_std >= 1:
            problems.append(
                f"{join_path(where, 'init_std')} = {self.init_std:g} is no standard deviation to "
                f"start from, which {join_path(where, 'init')} = normal reads it as; use a value "
                'such as 0.02, or the init "t5"'
            )
        if self.init == "t5" and self.scaled_output_init:
            problems.append(
                f"{join_path(where, 'scaled_output_init')} = true has no effect with "
                f'{join_path(where, "init")} = t5; set it to false, or use the init "normal"'
            )
        return problems

    def check(self, dims: ParallelDims) -> list[str]:
        """All reasons why this model cannot be laid out like ``dims``; empty: it can."""
        name = f"model.num_layers + num_decoder_layers = {self.num_layers} + {self.decoder_layers}"
        return [
            *rules.tensor_problems(self.attention, self.mlp, dims.tensor),
            *rules.stage_problems(dims, self.num_layers + self.decoder_layers, name),
        ]

    def check_sequence(self, sequence_length: int, decoder_length: int | None = None) -> list[str]:
        """Whether encoder and decoder can read sequences of these lengths; empty: they can."""
        limit = self.position_limit
        return [
            *rules.length_problems("data.sequence_length", sequence_length, limit),
            *rules.length_problems("data.decoder_sequence_length", decoder_length or 1, limit),
        ]

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to ``vocab_multiple * tensor``."""
        return rules.padded_vocabulary(self.vocab_size, self.vocab_multiple, tensor)

    def num_parameters(self) -> int:
        """Exact number of parameters, with the vocabulary not padded and tied weights once."""
        hidden = self.hidden_size
        norm = self.norm.num_parameters(hidden)
        attention = rules.attention_parameters(hidden, self.attention, self.norm) + norm
        layer = attention + rules.mlp_parameters(hidden, self.mlp) + norm
        layers = self.num_layers * layer + self.decoder_layers * (layer + attention)
        # Each of encoder and decoder has positions and a norm at its end.
        ends = 2 * (norm + (self.position_limit or 0) * hidden)
        if self.position.type == "relative":
            ends += 2 * self.position.relative_buckets * self.attention.num_heads
        head = self.vocab_size * (hidden * (not self.tie_embeddings) + self.head_bias)
        return self.vocab_size * hidden + layers + ends + head

    def flops_per_token(self, sequence_length: int) -> int:
        """Matrix-multiply FLOPs of one token, forward and backward.

        The mean over a row whose encoder and decoder both have ``sequence_length`` tokens.
        """
        return self.flops_per_sample(sequence_length, sequence_length) // (2 * sequence_length)

    def flops_per_sample(self, sequence_length: int, decoder_length: int | None) -> int:
        """Matrix-multiply FLOPs of one row, forward and backward.

        6 FLOPs for each weight and each token that it multiplies, and 12 A for each query and key
        (A = heads x head size), as for GPT: the encoder reads S tokens; the decoder T, for which
        it makes keys and values of the S encoder states; the head predicts T.

        Args:
            sequence_length: S, tokens of the encoder.
            decoder_length: T, tokens of the decoder; None: S.
        """
        source, target = sequence_length, decoder_length or sequence_length
        hidden, attention, size = self.hidden_size, self.attention, self.head_dim
        heads = rules.attention_weights(hidden, attention)
        # Keys and values of the encoder states; what is left are queries and outputs.
        states = 2 * hidden * size * attention.kv_heads
        layer = heads + rules.mlp_weights(hidden, self.mlp)
        encoder = 6 * source * layer + rules.attention_flops(attention, size, source, source)
        decoder = 6 * (target * (layer + heads - states) + source * states)
        decoder += rules.attention_flops(attention, size, target, target + source)
        head = 6 * target * self.vocab_size * hidden
        return self.num_layers * encoder + self.decoder_layers * decoder + head

    def portable(self) -> "T5Config":
        """The same model for any device: it is, having no kernel of its own."""
        return self

    def shrunk(self, dims: ParallelDims) -> "T5Config":
        """The same architecture at sizes that train in seconds on a CPU, for proofs.

        Every option is kept. Encoder and decoder get different depths, and together a layer for
        each stage, three at least.
        """
        attention = rules.shrunk_attention(self.attention, dims.tensor)
        layers = max(3, dims.pipeline * dims.virtual_pipeline)
        # One more in the decoder if it is the deeper one, else in the encoder.
        shallow = (layers - 1) // 2
        deep = max(layers - shallow, shallow + 1)
        deeper_decoder = self.decoder_layers > self.num_layers
        return replace(
            self,
            vocab_size=rules.SHRUNK_VOCABULARY,
            num_layers=shallow if deeper_decoder else deep,
            num_decoder_layers=deep if deeper_decoder else shallow,
            hidden_size=rules.SHRUNK_HEAD * attention.num_heads,
            max_sequence_length=rules.shrunk_length(dims.tensor),
            attention=attention,
            position=rules.shrunk_position(self.position),
            mlp=replace(self.mlp, intermediate_size=rules.SHRUNK_WIDTH * attention.num_heads),
            vocab_multiple=rules.SHRUNK_VOCAB_MULTIPLE,
        )
