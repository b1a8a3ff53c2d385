"""Which device the ranks of this machine will use, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """DeepSpeed's name of the device and the number of devices (1 for the CPU)."""

    name: str
    devices: int


def find_accelerator(environment: dict[str, str]) -> Accelerator:
    """Ask torch; ``DS_ACCELERATOR`` in the environment decides the name, as in DeepSpeed."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = environment.get("DS_ACCELERATOR", "cuda" if devices else "cpu")
    return Accelerator(name, devices if name == "cuda" and devices else 1)
