"""The causal language-model objective: from the tokens of a sample to inputs, labels and masks.

Shapes: ``S`` sequence length; every array of a row is ``(S,)``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_engine.data.samples import Sample

IntArray = npt.NDArray[np.int64]


class Row(NamedTuple):
    """One sample, ready to be stacked into a batch.

    Attributes:
        tokens: (S,) input ids.
        positions: (S,) position of each token, from 0.
        segments: (S,) number of the document within the row, from 0; tokens see only their own.
        labels: (S,) the next token of each token.
        loss_mask: (S,) float32, 1 where the label counts and 0 where it does not.
    """

    tokens: IntArray
    positions: IntArray
    segments: IntArray
    labels: IntArray
    loss_mask: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CausalLM:
    """Predict each next token.

    Attributes:
        isolate_documents: documents packed into one row do not see each other: segments count them,
            positions restart at each, and the label that crosses from the last token of a document
            to the first of the next does not count. Otherwise the row is one stream: segment 0,
            positions 0..S-1 and every real label counts. Boundaries come from the index, not from a
            search for an end-of-document id, so they are exact for any data.
    """

    isolate_documents: bool = True

    def __call__(self, sample: Sample) -> Row:
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
        return Row(sample.tokens[:-1], positions, segments, sample.tokens[1:], loss_mask)
