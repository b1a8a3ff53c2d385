"""Keys and values of all positions so far, so that each new token costs one position.

Legend: ``B`` batch, ``S`` positions of this call, ``K`` positions so far, ``E`` positions of an
encoder's source, ``M`` key/value heads of this rank, ``D`` head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class _Buffer:
    """A tensor that grows along dim 1.

    Room is doubled when it runs out, so appending n positions one by one copies O(n) of them in
    all; ``torch.cat`` at each step would copy O(n^2).
    """

    def __init__(self, first: Tensor, capacity: int) -> None:
        self.length = 0
        self._data = first.new_empty(first.shape[0], capacity, *first.shape[2:])

    def append(self, new: Tensor) -> Tensor:
        """Add ``new`` (B, S, ...); return a view of everything so far (B, K, ...)."""
        end = self.length + new.shape[1]
        if end > self._data.shape[1]:
            room = max(end, 2 * self._data.shape[1])
            grown = self._data.new_empty(self._data.shape[0], room, *self._data.shape[2:])
            grown[:, : self.length] = self._data[:, : self.length]
            self._data = grown
        self._data[:, self.length : end] = new
        self.length = end
        return self._data[:, :end]

    def reorder(self, rows: Tensor) -> None:
        """Replace the batch by the rows that are named."""
        used = self._data[:, : self.length].index_select(0, rows.to(self._data.device))
        if used.shape[0] != self._data.shape[0]:
            self._data = used.new_empty(used.shape[0], *self._data.shape[1:])
        self._data[:, : self.length] = used


class KVCache:
    """What attention layers keep between the calls of one generation.

    A model calls ``key_segments`` once per forward pass and ``extend`` once in each attention
    layer. Tensors are made at the first call of each layer, on its device and in its dtype. The
    views that come back are valid until the next call for the same layer.

    Args:
        batch: B; each call must have as many rows.
        capacity: positions to make room for at first; the cache grows beyond them by itself.

    Raises:
        ValueError: batch or capacity below 1.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(
                f"a cache for {batch} rows and {capacity} positions holds nothing; "
                "use at least 1 of both"
            )
        self.batch, self.capacity = batch, capacity
        self._segments: _Buffer | None = None
        self._layers: dict[str, tuple[_Buffer, _Buffer]] = {}

    @property
    def length(self) -> int:
        """K: positions that the model has read, padding included."""
        return 0 if self._segments is None else self._segments.length

    def key_segments(self, segments: Tensor) -> Tensor:
        """Append this call's document numbers (B, S); return those of all keys (B, K).

        Raises:
            ValueError: another number of rows.
        """
        self._check(segments, "segments")
        if self._segments is None:
            self._segments = _Buffer(segments, self.capacity)
        return self._segments.append(segments)

    def extend(self, layer: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append this call's keys and values (B, S, M, D); return all so far (B, K, M, D).

        Args:
            layer: a name that is this layer's own in the model.
            key: keys, with positions already applied.
            value: values.

        Raises:
            ValueError: another number of rows.
        """
        self._check(key, f"keys of {layer}")
        self._check(value, f"values of {layer}")
        if layer not in self._layers:
            self._layers[layer] = (_Buffer(key, self.capacity), _Buffer(value, self.capacity))
        keys, values = self._layers[layer]
        return keys.append(key), values.append(value)

    def reset(self) -> None:
        """Forget all positions and keep the memory, for the next batch of as many rows."""
        if self._segments is not None:
            self._segments.length = 0
        for pair in self._layers.values():
            for buffer in pair:
                buffer.length = 0

    def reorder(self, rows: Tensor) -> None:
        """Let row i continue what row ``rows[i]`` was, as a beam search does between steps.

        Args:
            rows: (B',) int64; numbers may repeat or be absent, and B' is the new batch.

        Raises:
            ValueError: not a list of numbers of rows.
        """
        fits = rows.ndim == 1 and rows.dtype == torch.int64 and rows.numel() > 0
        if not fits or rows.min() < 0 or rows.max() >= self.batch:
            raise ValueError(
                f"rows = {rows.tolist()} must be whole numbers from 0 to {self.batch - 1}, "
                "in one int64 dimension"
            )
        if self._segments is not None:
            self._segments.reorder(rows)
        for pair in self._layers.values():
            for buffer in pair:
                buffer.reorder(rows)
        self.batch = rows.numel()

    def _check(self, new: Tensor, what: str) -> None:
        # Checked because assigning one row to a slice of many would be broadcast without a word.
        if new.shape[0] != self.batch:
            raise ValueError(
                f"{what} have {new.shape[0]} rows but the cache was made for {self.batch}; "
                "make a new cache for each batch"
            )


class EncoderDecoderCache(KVCache):
    """Also what a decoder keeps of an encoder: the source is read once, in the first call.

    ``key_segments`` and ``extend`` serve the decoder's self-attention. In the first call the model
    runs its encoder and calls ``set_encoded`` after its last layer; in later calls the encoder's
    inputs are empty and its layers pass the state on as it is (``encoded``). Cross-attention takes
    its keys and values from ``source``, which has them made once.

    Args:
        batch: see ``KVCache``.
        capacity: see ``KVCache``; positions of the decoder.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__(batch, capacity)
        self.encoded = False
        self._source_segments: Tensor | None = None
        self._sources: dict[str, tuple[Tensor, Tensor]] = {}

    def set_encoded(self) -> None:
        """Say that the encoder has run."""
        self.encoded = True

    def source_segments(self, segments: Tensor) -> Tensor:
        """The source's document numbers (B, E): those of the first call, kept for later ones.

        Raises:
            ValueError: another number of rows.
        """
        self._check(segments, "source segments")
        if self._source_segments is None:
            self._source_segments = segments
        return self._source_segments

    def source(
        self, layer: str, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the source (B, E, M, D) for one layer's cross-attention.

        Args:
            layer: a name that is this layer's own in the model.
            make: computes them; called at the layer's first call only.

        Raises:
            ValueError: another number of rows.
        """
        if layer not in self._sources:
            key, value = make()
            self._check(key, f"source keys of {layer}")
            self._check(value, f"source values of {layer}")
            self._sources[layer] = (key, value)
        return self._sources[layer]

    def reset(self) -> None:
        """Forget the source too; see ``KVCache.reset``."""
        super().reset()
        self.encoded, self._source_segments = False, None
        self._sources.clear()

    def reorder(self, rows: Tensor) -> None:
        """See ``KVCache.reorder``; the source's rows go along."""
        super().reorder(rows)

        def pick(kept: Tensor) -> Tensor:
            return kept.index_select(0, rows.to(kept.device))

        if self._source_segments is not None:
            self._source_segments = pick(self._source_segments)
        self._sources = {name: (pick(k), pick(v)) for name, (k, v) in self._sources.items()}
