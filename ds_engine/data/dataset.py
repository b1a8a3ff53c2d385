"""From the sources of a run file to one data set of numbered samples.

``build_dataset`` makes the endless, shuffled, blended training set; ``build_validation`` the finite
one. Both give ``Sample``s by number and keep no state, so a loader may ask in any order from any
thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from ds_engine.data.blend import Blend
from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.objective import Objective, TrainingSamples, ValidationSamples
from ds_engine.errors import DataError

_TOKENS_CHECKED = 1 << 20  # at the head of each source, before the first step


class Source(Protocol):
    """What is read of a ``SourceConfig``."""

    @property
    def path(self) -> str:
        """Prefix of the ``.bin``/``.idx`` pair."""
        ...

    @property
    def weight(self) -> float:
        """Share in the blend, relative to the others."""
        ...


@dataclass(frozen=True, slots=True)
class BlendState:
    """Where the current blend began; what a checkpoint must keep so that weights may change.

    Attributes:
        start: global number of the first sample drawn with these weights.
        sources: (path, weight) of each source, in blend order.
        consumed: samples of each source, by its path, drawn before ``start``; sources that are not
            blended any more stay listed, so that they continue where they stopped if they return.
    """

    start: int = 0
    sources: tuple[tuple[str, float], ...] = ()
    consumed: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "BlendState":
        """Read what ``BlendedDataset.state`` gave, also after a round trip through JSON.

        Raises:
            DataError: a key is missing or unknown.
        """
        if set(mapping) != {"start", "sources", "consumed"}:
            raise DataError(
                f"a blend state has the keys start, sources and consumed, not {sorted(mapping)}"
            )
        sources = tuple((str(path), float(weight)) for path, weight in mapping["sources"])
        return cls(int(mapping["start"]), sources, dict(mapping["consumed"]))


class BlendedDataset:
    """Endless training samples from weighted sources; sample ``i`` is a pure function of its
    number.

    Attributes:
        paths: the sources, in the order of the run file.
        blend: which source each sample comes from.
        blend_state: where this blend began.
        num_tokens: tokens in one epoch of each source.
    """

    def __init__(
        self,
        samples: Sequence[TrainingSamples],
        *,
        blend_state: BlendState,
        vocab_size: int | None,
    ) -> None:
        """Combine the opened sources of ``blend_state``; use ``build_dataset`` to open them."""
        self.paths = tuple(path for path, _ in blend_state.sources)
        self.blend = Blend([weight for _, weight in blend_state.sources])
        self.blend_state = blend_state
        self.num_tokens = tuple(source.num_tokens for source in samples)
        self._samples = tuple(samples)
        self._before = tuple(blend_state.consumed.get(path, 0) for path in self.paths)
        self._vocab_size = vocab_size

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``.

        Raises:
            DataError: a token id is not in the model's vocabulary.
            IndexError: the sample lies before the current weights took effect.
        """
        source, number = self.locate(index)
        sample = self._samples[source][number]
        _check_ids(sample, self._vocab_size, self.paths[source], number)
        return sample

    def locate(self, index: int) -> tuple[int, int]:
        """Return (source, number of the sample within that source) of global sample ``index``."""
        if index < self.blend_state.start:
            raise IndexError(
                f"sample {index} was drawn with other weights; these hold from "
                f"{self.blend_state.start}"
            )
        source, number = self.blend[index - self.blend_state.start]
        return source, number + self._before[source]

    def consumed(self, samples: int) -> dict[str, int]:
        """Return how many of the first ``samples`` global samples came from each path, exactly."""
        counts = dict(self.blend_state.consumed)
        since = self.blend.counts(samples - self.blend_state.start)
        for path, before, count in zip(self.paths, self._before, since, strict=True):
            counts[path] = before + count
        return counts

    def epochs(self, samples: int) -> dict[str, float]:
        """Return how many epochs of each source the first ``samples`` global samples cover."""
        counts = self.consumed(samples)
        return {
            path: counts[path] / source.epoch_samples
            for path, source in zip(self.paths, self._samples, strict=True)
        }

    def state(self) -> dict[str, Any]:
        """Return the blend state as JSON for a checkpoint; ``build_dataset`` takes it back."""
        return asdict(self.blend_state)


class ValidationDataset:
    """Fixed validation samples: every label of every source once, sources interleaved evenly.

    ``len`` is the number of real samples. Numbers past the end give samples without a valid token,
    which add nothing to a loss, so that all ranks may always run whole batches.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, ValidationSamples]],
        *,
        empty: Any,
        vocab_size: int | None,
    ) -> None:
        """Combine opened sources; use ``build_validation`` to open them."""
        self._sources, self._empty = tuple(sources), empty
        self._vocab_size = vocab_size
        # Sample j of a source with n samples belongs at (j + 1/2)/n of the way: the first batches
        # are a fair cut through all sources even if the evaluation stops early.
        place = [(np.arange(len(samples)) + 0.5) / len(samples) for _, samples in sources]
        which = [np.full(len(samples), k, dtype=np.int32) for k, (_, samples) in enumerate(sources)]
        number = [np.arange(len(samples)) for _, samples in sources]
        order = np.argsort(np.concatenate(place), kind="stable")
        self._which = np.concatenate(which)[order]
        self._number = np.concatenate(number)[order]

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``; past the end, one without a valid token.

        Raises:
            DataError: a token id is not in the model's vocabulary.
        """
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        if index >= len(self):
            return self._empty
        path, samples = self._sources[int(self._which[index])]
        number = int(self._number[index])
        sample = samples[number]
        _check_ids(sample, self._vocab_size, path, number)
        return sample


def build_dataset(
    sources: Sequence[Source],
    objective: Objective,
    *,
    seed: int,
    vocab_size: int | None = None,
    state: Mapping[str, Any] | None = None,
    first_sample: int = 0,
) -> BlendedDataset:
    """Open the training sources of a run.

    Args:
        sources: paths and weights.
        objective: says what a sample is.
        seed: seeds the order of documents and samples.
        vocab_size: size of the model's vocabulary; None: ids are not checked.
        state: ``BlendedDataset.state()`` of the checkpoint, or None for a new run.
        first_sample: global number of the first sample this run will consume. If sources or weights
            differ from ``state``, the new blend begins here and each source continues after the
            samples that were consumed of it: nothing is repeated or lost.

    Raises:
        DataError: no source, a path twice, unusable files or weights, or an id >= ``vocab_size``.
    """
    _check_paths(sources)
    weighted = tuple((source.path, float(source.weight)) for source in sources)
    opened = [objective.samples(_open(path, vocab_size), seed=seed) for path, _ in weighted]
    blend_state = BlendState(0, weighted, {})
    if state is not None:
        blend_state = BlendState.from_dict(state)
        if blend_state.sources != weighted:
            consumed = _consumed(blend_state, first_sample)
            blend_state = BlendState(first_sample, weighted, consumed)
    return BlendedDataset(opened, vocab_size=vocab_size, blend_state=blend_state)


def build_validation(
    sources: Sequence[Source], objective: Objective, *, vocab_size: int | None = None
) -> ValidationDataset:
    """Open the validation sources of a run.

    Raises:
        DataError: no source, a path twice, unequal weights (they would have no effect: every token
            counts once), unusable files, or an id >= ``vocab_size``.
    """
    _check_paths(sources)
    if len({source.weight for source in sources}) > 1:
        raise DataError(
            "data.validation: weights differ, but every validation token counts once; leave them "
            "out"
        )
    opened = [
        (source.path, objective.validation(_open(source.path, vocab_size))) for source in sources
    ]
    return ValidationDataset(opened, empty=objective.empty(), vocab_size=vocab_size)


def _consumed(old: BlendState, samples: int) -> dict[str, int]:
    """Return what the blend ``old`` had consumed of each path after ``samples`` samples."""
    if samples < old.start:
        raise DataError(
            f"first_sample = {samples} lies before {old.start}, where the stored weights took "
            "effect; resume from the checkpoint that holds this state"
        )
    counts = Blend([weight for _, weight in old.sources]).counts(samples - old.start)
    consumed = dict(old.consumed)
    for (path, _), count in zip(old.sources, counts, strict=True):
        consumed[path] = consumed.get(path, 0) + count
    return consumed


def _check_paths(sources: Sequence[Source]) -> None:
    paths = [source.path for source in sources]
    if not paths:
        raise DataError("no data source is given; list at least one path")
    for path in paths:
        if paths.count(path) > 1:
            raise DataError(f"data source {path} is listed twice; list it once and add the weights")


def _open(path: str, vocab_size: int | None) -> IndexedDataset:
    data = IndexedDataset(path)
    head = data.tokens[:_TOKENS_CHECKED]
    if vocab_size is not None and len(head) and head.dtype.kind in "iu":
        _raise_if_outside(int(head.min()), int(head.max()), vocab_size, f"{path}.bin")
    return data


def _check_ids(sample: Any, vocab_size: int | None, path: str, number: int) -> None:
    if vocab_size is not None and len(sample.tokens):
        low, high = int(sample.tokens.min()), int(sample.tokens.max())
        _raise_if_outside(low, high, vocab_size, f"{path}.bin, sample {number}")


def _raise_if_outside(low: int, high: int, vocab_size: int, where: str) -> None:
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{where}: token id {low if low < 0 else high} is outside the model's vocabulary, "
            f"0..{vocab_size - 1} (model.vocab_size = {vocab_size}); tokenize with the model's "
            "tokenizer or raise model.vocab_size"
        )
