"""Which device the ranks of this machine will use, how many there are, and whose is which.

DeepSpeed's and torch's names of devices are the same (cuda, xpu, npu, hpu, ...), so torch alone can
answer here, in a second less than importing DeepSpeed takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Accelerator:
    """A kind of device and how many of it are visible; the CPU takes any number of ranks."""

    name: str
    devices: int

    @property
    def is_cpu(self) -> bool:
        """Whether ranks share the CPU."""
        return self.name == "cpu"

    def check_ranks(self, ranks: int, source: str) -> None:
        """Refuse more ranks than devices, before a process starts.

        Args:
            ranks: on this machine.
            source: where the number comes from, for the message.

        Raises:
            ConfigError: naming both numbers.
        """
        if not self.is_cpu and ranks > self.devices:
            raise ConfigError(
                f"{ranks} ranks ({source}) need {ranks} devices, but {self.devices} {self.name} "
                f"device(s) are visible; start {self.devices}, or set DS_ACCELERATOR=cpu"
            )


def find_accelerator(environment: Mapping[str, str]) -> Accelerator:
    """Ask torch; ``DS_ACCELERATOR`` in the environment decides the name, as in DeepSpeed."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    name = environment.get("DS_ACCELERATOR", "cpu" if found is None else found.type)
    if name == "cpu":
        return Accelerator("cpu", 1)
    return Accelerator(name, torch.accelerator.device_count() if found is not None else 0)


def local_device(environment: Mapping[str, str], local_rank: int) -> torch.device:
    """The device of one rank, made current."""
    import torch

    accelerator = find_accelerator(environment)
    if accelerator.is_cpu or not accelerator.devices:
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.name, local_rank)
