"""The causal language-model objective: from the tokens of a sample to inputs, labels and masks.

Shapes: ``S`` sequence length; every array of a row is ``(S,)``.
"""

from dataclasses import dataclass

import numpy as np

from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.objective import Row
from ds_engine.data.samples import Sample, SequentialSamples, ShuffledSamples


@dataclass(frozen=True, slots=True)
class CausalLM:
    """Predict each next token.

    A row reads ``(tokens, positions, segments)`` and predicts ``(labels, loss_mask)``.

    Attributes:
        sequence_length: ``S``.
        isolate_documents: documents packed into one row do not see each other: segments count them,
            positions restart at each, and the label that crosses from the last token of a document
            to the first of the next does not count. Otherwise the row is one stream: segment 0,
            positions 0..S-1 and every real label counts. Boundaries come from the index, not from a
            search for an end-of-document id, so they are exact for any data.
    """

    sequence_length: int
    isolate_documents: bool = True

    def samples(self, data: IndexedDataset, *, seed: int) -> ShuffledSamples:
        """Pieces of the shuffled stream, each with the first token of the next."""
        return ShuffledSamples(data, sequence_length=self.sequence_length, seed=seed)

    def validation(self, data: IndexedDataset) -> SequentialSamples:
        """Pieces in file order."""
        return SequentialSamples(data, sequence_length=self.sequence_length)

    def empty(self) -> Sample:
        """See ``Objective``."""
        size = self.sequence_length + 1
        return Sample(np.zeros(size, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)

    def __call__(self, sample: Sample, number: int = 0) -> Row:
        """Return the row of ``sample``. Padding forms a segment of its own without loss."""
        size = len(sample.tokens) - 1
        loss_mask = np.zeros(size, dtype=np.float32)
        loss_mask[: max(sample.num_valid - 1, 0)] = 1.0
        positions = np.arange(size, dtype=np.int64)
        segments = np.zeros(size, dtype=np.int64)
        if self.isolate_documents:
            starts = sample.starts[sample.starts > 0]
            loss_mask[starts - 1] = 0.0
            if sample.num_valid < size:
                starts = np.append(starts, max(sample.num_valid, 1))
            segments[starts[starts < size]] = 1
            np.cumsum(segments, out=segments)
            first = np.concatenate(([0], starts))
            positions -= first[segments]
        return Row((sample.tokens[:-1], positions, segments), (sample.tokens[1:], loss_mask))
