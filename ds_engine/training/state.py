"""What a run must remember between two processes, beside weights and optimizer state."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ds_engine.errors import CheckpointError


@dataclass
class TrainState:
    """Counters of a run. Data order, learning rate and dropout are pure functions of them.

    Attributes:
        step: completed optimizer steps, skipped updates included.
        consumed_samples: samples that were trained on; the next batch starts at this number.
        consumed_tokens: valid target tokens that were trained on.
        skipped_steps: updates left out because a gradient was not finite.
        consecutive_skipped: how many of them in a row just now.
        blend: where the current blend of sources began, see ``ds_engine.data.dataset``.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    consecutive_skipped: int = 0
    blend: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TrainState:
        """Inverse of ``to_json``.

        Raises:
            CheckpointError: keys are missing or unknown.
        """
        expected = set(cls().to_json())
        if set(value) != expected:
            raise CheckpointError(
                f"a training state has {sorted(expected)}, this one has {sorted(value)}"
            )
        return cls(**value)
