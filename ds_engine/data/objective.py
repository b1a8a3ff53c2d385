"""What turns indexed data into rows of a batch: the interface that every objective offers.

An objective says which tokens form a sample (in training and in validation) and what a model reads
and predicts from it. Everything about it is a function of numbers: sample ``i`` of a source of the
seed and ``i``, the random part of a row of the seed and the sample's global number. So masking is
new in every epoch, and resuming a run needs no state.

Shapes: ``S`` sequence length, ``T`` length of the decoder's sequence, ``V`` words.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import IndexedDataset
from ds_engine.errors import ConfigError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Row(NamedTuple):
    """One sample, ready to be stacked into a batch.

    Attributes:
        inputs: what the model reads, in the order of its input state, but for the sample numbers,
            which the loader appends.
        targets: labels (int64) and weights (float32 in {0, 1}) of each loss term in turn.
    """

    inputs: tuple[IntArray, ...]
    targets: tuple[npt.NDArray[Any], ...]


class TrainingSamples(Protocol):
    """Endless training samples of one source; safe to read from several threads."""

    @property
    def num_tokens(self) -> int:
        """Tokens in one epoch."""
        ...

    @property
    def epoch_samples(self) -> float:
        """Samples in one epoch."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index`` (0 or more), which has ``tokens``."""
        ...


class ValidationSamples(Protocol):
    """The samples of one validation source, in a fixed order."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index``, which has ``tokens``."""
        ...


class Objective(Protocol):
    """From indexed data to rows."""

    def samples(self, data: IndexedDataset, *, seed: int) -> TrainingSamples:
        """Training samples of a source, in an order drawn from ``seed``.

        Raises:
            DataError: the source cannot be used for this objective.
        """
        ...

    def validation(self, data: IndexedDataset) -> ValidationSamples:
        """Validation samples of a source.

        Raises:
            DataError: the source cannot be used for this objective.
        """
        ...

    def empty(self) -> Any:
        """A sample whose row has no valid target, to fill up the last batch of a validation."""
        ...

    def __call__(self, sample: Any, number: int) -> Row:
        """The row of a sample; ``number`` is its global number and seeds what is drawn."""
        ...


@dataclass(frozen=True)
class SpecialIds:
    """Ids that mean something to an objective; None where the tokenizer has no such token.

    Attributes:
        pad: fills rows up.
        eos: ends an example (T5).
        start: first input of a decoder.
        mask: replaces a masked token (BERT).
        cls, sep: begin a row and end a part of it (BERT).
        sentinels: stand for removed spans, in order (T5).
        special: ids that are no words: never masked, never drawn as random words.
        continues_word: (V,) whether an id goes on with the word before it, for whole-word masking.
    """

    pad: int | None = None
    eos: int | None = None
    start: int | None = None
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    sentinels: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()
    continues_word: npt.NDArray[np.bool_] | None = None

    def require(self, name: str, *, kind: str) -> int:
        """An id that an objective cannot do without.

        Args:
            name: of the attribute.
            kind: of tokenizer that has all that the objective needs, for the message.

        Raises:
            ConfigError: the tokenizer has no such token.
        """
        found: int | None = getattr(self, name)
        if found is None:
            raise ConfigError(
                f"the tokenizer has no {name} token, which this objective needs; name it in "
                f"data.objective.special_tokens.{name}, or train a tokenizer with "
                f"`ds-engine tokenizer train --kind {kind}`"
            )
        return found
