"""Batches for one data-parallel rank: a pure function of the global sample number.

Micro-batch ``m`` of data-parallel rank ``r`` holds the samples ``first + (m*dp + r)*mbs +
[0..mbs)``, so a step consumes the same samples under every layout and resuming takes nothing but
``first``.

Shapes: ``B`` micro-batch size, ``S`` sequence length.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from ds_engine.data.objective import Row
from ds_engine.errors import ConfigError

Tensors = tuple[torch.Tensor, ...]
# (what the model reads, sample numbers last; labels and weights of each loss term in turn)
Batch = tuple[Tensors, Tensors]


class Dataset(Protocol):
    """Anything that gives sample ``i``; it must be safe to read from a thread."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index``."""
        ...


class BatchLoader:
    """Makes the micro-batches of a step, and those of the next steps in a background thread.

    Use as a context manager or call ``close``. Nothing waits without end: an error of the thread is
    raised by the ``step`` that asks for that batch, and a request which was not foreseen is
    computed at once.

    Attributes:
        wait_seconds: how long the last ``step`` kept the caller waiting.
    """

    def __init__(
        self,
        dataset: Dataset,
        objective: Callable[[Any, int], Row],
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        prefetch: int = 2,
    ) -> None:
        """Prepare; no sample is read yet.

        Args:
            dataset: gives sample ``i``.
            objective: turns a sample and its number into a row.
            micro_batch_size: samples in a micro-batch.
            data_parallel_rank: rank in 0..data_parallel_size-1.
            data_parallel_size: number of data-parallel ranks.
            prefetch: how many steps to prepare ahead; 0 works without a thread.

        Raises:
            ConfigError: a size below 1, a rank out of range or a negative ``prefetch``.
        """
        if micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size = {micro_batch_size} must be at least 1")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank = {data_parallel_rank} is not in 0..{data_parallel_size - 1}"
            )
        if prefetch < 0:
            raise ConfigError(f"data.prefetch = {prefetch} must be 0 (no thread) or more")
        self._dataset = dataset
        self._objective = objective
        self._micro_batch_size = micro_batch_size
        self._rank = data_parallel_rank
        self._ranks = data_parallel_size
        self._prefetch = prefetch
        self._thread = ThreadPoolExecutor(1, "data-prefetch") if prefetch else None
        self._pending: dict[tuple[int, int], Future[list[Batch]]] = {}
        self.wait_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop what was prepared ahead and end the thread; may be called twice."""
        self._forget()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def step(self, first_sample: int, global_batch: int) -> list[Batch]:
        """Return this rank's micro-batches of one step.

        Args:
            first_sample: global number of the first sample of the step.
            global_batch: samples in the step over all ranks and micro-batches.

        Raises:
            ConfigError: the batch does not divide into micro-batches, or a negative sample.
            DataError: a sample cannot be read.
        """
        began = time.perf_counter()
        self._check(first_sample, global_batch)
        future = self._pending.pop((first_sample, global_batch), None)
        if future is None:
            self._forget()
            batches = self._make(first_sample, global_batch)
        else:
            batches = future.result()
        self.wait_seconds = time.perf_counter() - began
        if self._thread is not None:
            for ahead in range(1, self._prefetch + 1):
                wanted = (first_sample + ahead * global_batch, global_batch)
                if wanted not in self._pending:
                    self._pending[wanted] = self._thread.submit(self._make, *wanted)
        return batches

    def _check(self, first_sample: int, global_batch: int) -> None:
        share = self._micro_batch_size * self._ranks
        if global_batch < 1 or global_batch % share:
            raise ConfigError(
                f"a global batch of {global_batch} samples is not a positive multiple of "
                f"micro-batch size {self._micro_batch_size} x {self._ranks} data-parallel ranks = "
                f"{share}"
            )
        if first_sample < 0:
            raise ConfigError(f"first_sample = {first_sample} must be 0 or more")

    def _forget(self) -> None:
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()

    def _make(self, first_sample: int, global_batch: int) -> list[Batch]:
        size = self._micro_batch_size
        stride = size * self._ranks
        begins = range(first_sample + self._rank * size, first_sample + global_batch, stride)
        return [self._micro_batch(range(begin, begin + size)) for begin in begins]

    def _micro_batch(self, samples: range) -> Batch:
        rows = [self._objective(self._dataset[index], index) for index in samples]
        sample_ids = torch.arange(samples.start, samples.stop, dtype=torch.int64)
        inputs = _stacked([row.inputs for row in rows])
        return (*inputs, sample_ids), _stacked([row.targets for row in rows])


def _stacked(rows: Sequence[tuple[npt.NDArray[Any], ...]]) -> Tensors:
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
