"""What every model family offers, and what a run adds to an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan


@dataclass(frozen=True)
class PlanOptions:
    """What a run adds to a model: not part of the architecture, but of how it is trained.

    Attributes:
        seed: of initial values and dropout.
        isolate_documents: packed documents do not see each other.
        label_smoothing, z_loss: see ``LossOptions``.
        dtype: of activations; rotary tables are made in it.
        lengths: tokens of a row, and of its decoder's part if there is one; balances the stages.
            None: the model's longest.
    """

    seed: int = 0
    isolate_documents: bool = True
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, int | None] | None = None


@dataclass(frozen=True)
class ModelDefinition:
    """One family: how its configuration becomes a plan.

    Attributes:
        plan: ``plan(config, tensor_parallel, options)``.
        heads: prefixes of parameters that a run which starts from other weights may lack there.
        aliases: prefixes of parameters -> where else to look for them in those weights.
    """

    plan: Callable[[Any, TensorParallel, PlanOptions], LayerPlan]
    heads: tuple[str, ...] = ("head.",)
    aliases: Mapping[str, str] = field(default_factory=dict)
