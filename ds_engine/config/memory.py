"""Memory of weights, gradients and optimizer states on one rank, by precision and ZeRO stage.

The byte counts are those of mixed-precision Adam in ZeRO (arXiv:1910.02054, section 3.1), with
gradients accumulated in fp32 as ``normalise_deepspeed`` asks for. Activations are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_engine.config.deepspeed import offloads_optimizer, precision, zero_stage

GIB = 2**30


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank.

    Attributes:
        weights: Weights of the forward pass.
        gradients: Gradients, with their fp32 accumulation buffer.
        optimizer: Adam moments and the fp32 master weights, if they are on the device.
    """

    weights: float
    gradients: float
    optimizer: float

    @property
    def total_gib(self) -> float:
        """All of it, GiB."""
        return (self.weights + self.gradients + self.optimizer) / GIB


def model_states(parameters: float, section: Mapping[str, Any], data_parallel: int) -> ModelStates:
    """Estimates the model states of one rank.

    Args:
        parameters: Parameters that one rank holds after tensor and pipeline splitting.
        section: The DeepSpeed section.
        data_parallel: Ranks over which ZeRO partitions.
    """
    stage = zero_stage(section)
    if precision(section) == "fp32":
        weights, gradients, optimizer = 4, 4, 8
    else:
        # 16-bit gradients, and from ZeRO-1 on an fp32 buffer that accumulates micro-batches.
        weights, gradients, optimizer = 2, 6 if stage >= 1 else 2, 12
    if offloads_optimizer(section):
        optimizer = 0

    def share(partitioned_from: int) -> float:
        return parameters / data_parallel if stage >= partitioned_from else parameters

    return ModelStates(weights * share(3), gradients * share(2), optimizer * share(1))
