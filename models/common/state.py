"""What flows through a stack of layers: inputs, the state between them, each stage's context.

Legend: ``B`` batch, ``S`` sequence, ``H`` hidden; ``_T`` this rank's sequence part under SP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from models.common.masks import AttentionMask


class TokenInput(NamedTuple):
    """Input of the first layer. All int64.

    Attributes:
        tokens: (B, S) word numbers.
        positions: (B, S) place in the document; restarts at each packed document.
        segments: (B, S) number of the document inside its row.
        sample_ids: (B,) number of the sample in the run; seeds dropout.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    sample_ids: Tensor


class HiddenState(NamedTuple):
    """What crosses a stage boundary: activations (B, S_T, H) and the integers that go along."""

    hidden: Tensor
    positions: Tensor
    segments: Tensor
    sample_ids: Tensor


@dataclass(frozen=True)
class LayerContext:
    """What a stage derives once per micro-batch, and what only one end of the model needs.

    Attributes:
        mask: who may attend to whom.
        rotary: (cos, sin) tables (B, S, 1, R/2), or None.
        labels: (labels (B, S) int64, weights (B, S) float32), or None to get logits.
        cache: keys and values of earlier positions during generation, or None.
        source: what cross-attention looks at, in a decoder layer of an encoder-decoder.
    """

    mask: AttentionMask
    rotary: tuple[Tensor, Tensor] | None = None
    labels: tuple[Tensor, ...] | None = None
    cache: KeyValueStore | None = None
    source: AttentionSource | None = None


@dataclass(frozen=True)
class AttentionSource:
    """What cross-attention looks at.

    Attributes:
        hidden: encoder states (B, S_T, H).
        mask: which of them a position of the decoder may see.
    """

    hidden: Tensor
    mask: AttentionMask


class KeyValueStore(Protocol):
    """What a model needs from a generation cache; see ``ds_engine.inference.kv_cache``."""

    def key_segments(self, segments: Tensor) -> Tensor:
        """Append this call's document numbers (B, S), once per forward; return all (B, K)."""

    def extend(self, layer: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append this call's keys and values (B, S, M, D); return all so far (B, K, M, D)."""


class SourceStore(KeyValueStore, Protocol):
    """What an encoder-decoder needs besides: the encoder runs in the first call only.

    See ``ds_engine.inference.kv_cache.EncoderDecoderCache``.
    """

    @property
    def encoded(self) -> bool:
        """Whether the encoder has run."""

    def set_encoded(self) -> None:
        """Note that it has."""

    def source_segments(self, segments: Tensor) -> Tensor:
        """The encoder's document numbers (B, S) of the first call."""

    def source(
        self, layer: str, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of the encoder states, made in the first call."""
