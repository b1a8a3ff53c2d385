"""Random batches for proofs, for every kind of model that a plan describes.

They are hard to get right: packed documents of unequal length, padding, masked tokens, an uneven
share of valid targets per sample, and rows without any. Every value is a function of (seed, sample
number), so any split of the same global batch over replicas and micro-batches sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_engine.parallel.init import derive_seed
from ds_engine.pipeline.plan import Batch, LayerPlan, LossTerm

PADDING = -1


@dataclass(frozen=True)
class SyntheticData:
    """Batches of what a plan reads and predicts.

    Attributes:
        fields: names of the plan's inputs.
        losses: its loss terms.
        vocab_size: words to draw from.
        sequence_length: S.
        decoder_length: T of an encoder-decoder, else None.
        global_batch: samples of a step.
        seed: of all values.
    """

    fields: tuple[str, ...]
    losses: tuple[LossTerm, ...]
    vocab_size: int
    sequence_length: int
    decoder_length: int | None
    global_batch: int
    seed: int = 0

    @classmethod
    def for_plan(
        cls,
        plan: LayerPlan,
        *,
        vocab_size: int,
        lengths: tuple[int, int | None],
        global_batch: int,
        seed: int = 0,
    ) -> SyntheticData:
        """Data for a plan; ``lengths`` are S, and T for an encoder-decoder."""
        fields: tuple[str, ...] = plan.input_state._fields  # type: ignore[attr-defined]
        return cls(fields, plan.losses, vocab_size, *lengths, global_batch, seed)

    def micro_batch(self, samples: Sequence[int]) -> Batch:
        """The given samples as one micro-batch."""
        rows = [self._row(sample) for sample in samples]
        inputs = tuple(torch.stack(column) for column in zip(*(i for i, _ in rows), strict=True))
        targets = tuple(torch.stack(column) for column in zip(*(t for _, t in rows), strict=True))
        return (*inputs, torch.tensor(samples)), targets

    def step(self, number: int, micro_batch: int, replica: int, replicas: int) -> list[Batch]:
        """This replica's micro-batches of a step, assigned as ``data.loader`` does."""
        first = number * self.global_batch
        count = self.global_batch // (micro_batch * replicas)
        return [
            self.micro_batch(
                [first + (m * replicas + replica) * micro_batch + i for i in range(micro_batch)]
            )
            for m in range(count)
        ]

    def _row(self, sample: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs but for the sample number, and targets."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "proof", sample))
        if not {"decoder_tokens", "token_types"} & set(self.fields):
            return self._decoder_only(sample, generator)
        documents = sample % 4 + 1
        values = self._sequence("", self.sequence_length, documents, sample, generator)
        length = self.sequence_length
        if self.decoder_length is not None:
            length = self.decoder_length
            values |= self._sequence("decoder_", length, documents, sample + 1, generator)
        if "token_types" in self.fields:
            values["token_types"] = torch.randint(2, (length,), generator=generator)
        targets: list[Tensor] = []
        for term in self.losses:
            targets += self._targets(term, length, sample, generator)
        return tuple(values[name] for name in self.fields[:-1]), tuple(targets)

    def _decoder_only(
        self, sample: int, generator: torch.Generator
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """A row of a decoder, which predicts each next token."""
        length = self.sequence_length
        stream = torch.randint(self.vocab_size, (length + 1,), generator=generator)
        cuts = torch.randint(1, length, (sample % 4,), generator=generator)
        segments, positions = _documents(length, cuts)
        mask = _mask(length, sample, generator)
        return (stream[:-1], positions, segments), (stream[1:], mask)

    def _sequence(
        self, prefix: str, length: int, documents: int, sample: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Tokens, positions and segments of a row, and some padding."""
        cuts = torch.randperm(length - 1, generator=generator)[: documents - 1] + 1
        segments, positions = _documents(length, cuts)
        if sample % 3 == 0:
            index = torch.arange(length)
            padding = index >= length - 2
            segments = segments.masked_fill(padding, PADDING)
            positions = torch.where(padding, index - length + 2, positions)
        tokens = torch.randint(self.vocab_size, (length,), generator=generator)
        return {
            f"{prefix}tokens": tokens,
            f"{prefix}positions": positions,
            f"{prefix}segments": segments,
        }

    def _targets(
        self, term: LossTerm, length: int, sample: int, generator: torch.Generator
    ) -> list[Tensor]:
        if term.num_classes is not None:
            label = torch.randint(term.num_classes, (), generator=generator)
            return [label, torch.tensor(float(sample % 3 != 1))]
        labels = torch.randint(self.vocab_size, (length,), generator=generator)
        return [labels, _mask(length, sample, generator)]


def _documents(length: int, cuts: Tensor) -> tuple[Tensor, Tensor]:
    """Segments and positions (S,) of a row with documents that begin at the cuts."""
    starts = torch.zeros(length, dtype=torch.long)
    starts[cuts] = 1
    index = torch.arange(length)
    first = torch.where(starts.bool() | (index == 0), index, 0).cummax(0).values
    return starts.cumsum(0), index - first


def _mask(length: int, sample: int, generator: torch.Generator) -> Tensor:
    """An uneven share of masked tokens per sample tells a mean of means from the true mean."""
    share = (sample % 5) / 6
    return (torch.rand(length, generator=generator) >= share).float()
