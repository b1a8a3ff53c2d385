"""Keys and values of all positions so far, so that each new token costs one position.

Legend: ``B`` batch, ``S`` positions of this call, ``K`` positions so far, ``M`` key/value heads of
this rank, ``D`` head dim.
"""

from __future__ import annotations

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
        self._data = self._data.index_select(0, rows.to(self._data.device))


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
